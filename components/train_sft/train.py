"""Supervised fine-tuning of the base model on worked solutions: the reference checkpoint of GRPO."""

from pathlib import Path

from components.cluster.launch import run_ranks
from components.shared.images import GPU
from components.shared.model import base_materials
from components.shared.stage import Stage
from components.shared.tools import environment_materials
from components.train_sft.config import TrainSFTConfig


def train(
    config: TrainSFTConfig, *, problems: Path, base_model: Path, reference: Path, training: Path, work: Path
) -> dict[str, float]:
    """Fine-tune the config's base model on solutions; without steps, it is the reference itself. Return the metrics."""
    if not config.num_steps:
        from components.train_sft.worker import keep_base  # imports torch

        return keep_base(config, problems=problems, base_model=base_model, reference=reference, training=training)
    return run_ranks(
        _train_rank,
        config,
        {"problems": problems, "work": work},
        outputs={"base_model": base_model, "reference": reference, "training": training},
        num_processes=config.engine.num_processes,
        work=work,
        grace_s=config.checkpoint.grace_s,
    )


STAGE = Stage(
    name="train_sft",
    function=train,
    config=TrainSFTConfig,
    inputs={"problems": "prepare_data/problems"},
    outputs=("base_model", "reference", "training"),
    image=GPU,
    has_work=True,
    sources=lambda config: environment_materials(config.model.tools),  # the reference records its tools
    materials=lambda config, outputs: base_materials(config.model.base, outputs["base_model"]),
)


def _train_rank(config: TrainSFTConfig, **folders: Path) -> dict[str, float]:
    """Train in this process, which imports torch; the process that launches the ranks does not need it."""
    from components.train_sft.worker import train_rank

    return train_rank(config, **folders)
