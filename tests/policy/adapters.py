"""Fine-tuning with adapters in as many processes as were launched."""

from pathlib import Path

from torch.distributed import get_world_size

from components.train_sft.config import TrainSFTConfig
from components.train_sft.worker import train_rank

STAGES = {1: (2,), 2: (0, 2, 3)}
"""The stages of ZeRO for each number of processes."""


def fine_tune(config: TrainSFTConfig, *, problems: Path, folder: Path) -> dict[str, float]:
    """Fine-tune under each of `STAGES`, the outputs in folder/zero_STAGE-PROCESSES."""
    for stage in STAGES[config.engine.num_processes]:
        each = folder / f"zero_{stage}-{config.engine.num_processes}"
        outputs = {name: each / name for name in ("base_model", "reference", "training", "work")}
        for path in outputs.values():
            path.mkdir(parents=True, exist_ok=True)
        changed = config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": stage})})
        train_rank(changed, problems=problems, **outputs)
    return {"processes": get_world_size()}
