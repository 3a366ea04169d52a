"""Group Relative Policy Optimization: from the reference checkpoint to the policy."""

from components.cluster.together import run_together
from components.shared.step import In, Out, Work
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.samplers import samplers_running

_RANK = "components.train_grpo.train_rank:train_rank"


def train(
    config: TrainGRPOConfig, *, problems: In, reference: In, policy: Out, training: Out, timings: Out, work: Work
) -> dict[str, float]:
    """Optimise the reference checkpoint with GRPO on the training problems."""
    with samplers_running(config, reference, work):
        return run_together(
            _RANK,
            config,
            {"problems": problems, "reference": reference, "work": work},
            {"policy": policy, "training": training, "timings": timings},
            num_processes=config.engine.num_processes,
            work=work,
            grace_s=config.checkpoint.grace_s,
            with_samplers=config.sampler.servers is not None,
        )
