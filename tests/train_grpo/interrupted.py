"""A run that is stopped and resumed, beside one that is not, in any number of processes."""

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
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import train_rank

STRAIGHT, RESUMED = "straight", "resumed"


def run_both(config: TrainGRPOConfig, *, problems: Path, reference: Path, folder: Path) -> dict[str, float]:
    """Train into folder/straight, and stopped after step 2 and resumed into folder/resumed.

    Once for each stage of ZeRO that has a folder; only the last process is stopped.
    """
    for stage in (0, 2, 3):
        each = folder / f"zero_{stage}"
        if each.is_dir():
            changed = config.model_copy(update={"engine": config.engine.model_copy(update={"zero_stage": stage})})
            _train(changed, problems, reference, each / STRAIGHT)
            with _stopped_after_step(2), pytest.raises(StoppedError, match="step 2 of 4 is saved"):
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
def _stopped_after_step(number: int) -> Iterator[None]:
    record = Trainer._record

    def stop(self: Trainer, done: int, *arguments: Any) -> None:
        record(self, done, *arguments)
        if done == number and get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(Trainer, "_record", stop):
        yield
