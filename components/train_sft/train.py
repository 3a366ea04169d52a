"""Supervised fine-tuning of the base model on worked solutions: the reference checkpoint of GRPO."""

from components.cluster.together import run_together
from components.shared.step import In, Out, Work
from components.train_sft.config import TrainSFTConfig

_RANK = "components.train_sft.train_rank:train_rank"


def train(
    config: TrainSFTConfig, *, problems: In, base_model: Out, reference: Out, training: Out, work: Work
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
