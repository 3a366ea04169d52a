"""A training that is killed while it writes a checkpoint: `python -m tests.train_grpo.killed FOLDER [STEP]`.

FOLDER has `config.json`, `problems` and `reference`; the training is in FOLDER/killed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import save_file

from components.policy import training
from components.train_grpo import monitoring
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import train_rank


def train_in(folder: Path, config: TrainGRPOConfig, *, problems: Path, reference: Path) -> None:
    """Train into a folder, or go on with what is there."""
    outputs = {name: folder / name for name in ("policy", "training", "timings")}
    for path in (*outputs.values(), folder / "work"):
        path.mkdir(parents=True, exist_ok=True)
    train_rank(config, problems=problems, reference=reference, work=folder / "work", **outputs)


def main(folder: str, step: str = "") -> None:
    """See above."""
    record, done = Trainer._record, ""

    def recorded(self: Trainer, number: int, *arguments: Any) -> None:
        nonlocal done
        record(self, number, *arguments)
        done = str(number)

    def saved(*arguments: Any) -> None:
        save_file(*arguments)
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    patch.object(monitoring, "measure_matmul_flops", lambda *_: 1e12).start()
    patch.object(Trainer, "_record", recorded).start()
    patch.object(training, "save_file", saved).start()
    inputs = Path(folder)
    config = TrainGRPOConfig.model_validate_json((inputs / "config.json").read_text())
    train_in(inputs / "killed", config, problems=inputs / "problems", reference=inputs / "reference")


if __name__ == "__main__":
    main(*sys.argv[1:])
