"""Group Relative Policy Optimization: from the reference checkpoint to the policy."""

from pathlib import Path

from components.cluster.launch import run_ranks
from components.shared.stage import Stage
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.samplers import samplers_running


def train(
    config: TrainGRPOConfig, *, problems: Path, reference: Path, policy: Path, training: Path, timings: Path, work: Path
) -> dict[str, float]:
    """Optimise the reference checkpoint with GRPO on the training problems."""
    with samplers_running(config, reference, work):
        return run_ranks(
            _train_rank,
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


def _train_rank(config: TrainGRPOConfig, **folders: Path) -> dict[str, float]:
    """Train in this process; torch is imported here, as a process that only launches others does without it."""
    from components.train_grpo.train_rank import train_rank

    return train_rank(config, **folders)
