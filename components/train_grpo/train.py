"""Group Relative Policy Optimization: from the reference checkpoint to the policy."""

from pathlib import Path

from components.cluster.together import run_together
from components.shared.stage import Stage
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.samplers import samplers_running

_RANK = "components.train_grpo.train_rank:train_rank"


def train(
    config: TrainGRPOConfig, *, problems: Path, reference: Path, policy: Path, training: Path, timings: Path, work: Path
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


STAGE = Stage(
    name="train_grpo",
    function=train,
    config=TrainGRPOConfig,
    inputs=("problems", "reference"),
    outputs=("policy", "training", "timings"),
    has_work=True,
)
