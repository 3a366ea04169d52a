"""A run that is told to stop on its way and gone on with, beside one that is not: in as many processes as launched."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import get_rank, get_world_size

from components.shared.errors import StoppedError
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.train_rank import train_rank
from components.train_grpo.trainer import Trainer

STRAIGHT, RESUMED = "straight", "resumed"


def run_both(config: TrainGRPOConfig, *, problems: Path, reference: Path, folder: Path) -> dict[str, float]:
    """Train straight into folder/straight, and stopped after step 2 and gone on with into folder/resumed.

    Once for each stage of ZeRO that there is a folder for; the last process alone is told to stop.
    """
    for stage in (0, 2, 3):
        each = folder / f"zero_{stage}"
        if each.is_dir():
            changed = config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": stage})})
            _train(changed, problems, reference, each / STRAIGHT)
            with _told_after_step(2), pytest.raises(StoppedError, match="step 2 of 4 is done"):
                _train(changed, problems, reference, each / RESUMED)
            _train(changed, problems, reference, each / RESUMED)
    return {}


def _train(config: TrainGRPOConfig, problems: Path, reference: Path, folder: Path) -> None:
    outputs = {name: folder / name for name in ("policy", "training", "timings")}
    for path in outputs.values():
        path.mkdir(parents=True, exist_ok=True)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    train_rank(config, problems=problems, reference=reference, work=work, **outputs)


@contextmanager
def _told_after_step(number: int) -> Iterator[None]:
    step = Trainer._step

    def told(self: Trainer, done: int, *arguments: Any, **settings: Any) -> None:
        step(self, done, *arguments, **settings)
        if done == number and get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(Trainer, "_step", told):
        yield
