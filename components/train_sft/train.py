"""Supervised fine-tuning of the base model on worked solutions: the reference checkpoint of GRPO."""

from pathlib import Path

from components.cluster.together import run_together
from components.shared.stage import Stage
from components.train_sft.config import TrainSFTConfig

_RANK = "components.train_sft.train_rank:train_rank"


def train(
    config: TrainSFTConfig, *, problems: Path, base_model: Path, reference: Path, training: Path, work: Path
) -> dict[str, float]:
    """Fine-tune the base model on the training problems' solutions."""
    return run_together(
        _RANK,
        config,
        {"problems": problems, "work": work},
        {"base_model": base_model, "reference": reference, "training": training},
        num_processes=config.engine.num_processes,
        work=work,
        grace_s=config.checkpoint.grace_s,
    )


STAGE = Stage(
    name="train_sft",
    function=train,
    config=TrainSFTConfig,
    inputs=("problems",),
    outputs=("base_model", "reference", "training"),
    has_work=True,
)
