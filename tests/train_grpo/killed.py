"""A training that kills itself without warning: `python -m tests.train_grpo.killed FOLDER [STEP PLACE]`.

PLACE is `sampled`, before anything is learned; `learned`, before the checkpoint; `writing`, within it; or `written`.
FOLDER has `config.json`, `problems` and `reference`; what comes of the training is put beside, in `killed`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import save_file

from components.policy import training
from components.train_grpo import monitoring, worker
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.trainer import Trainer


def train(config: TrainGRPOConfig, inputs: Path, folder: Path) -> None:
    """Train into a folder, or go on with what is there."""
    outputs = {name: folder / name for name in ("policy", "training", "timings")}
    for path in (*outputs.values(), folder / "work"):
        path.mkdir(parents=True, exist_ok=True)
    problems, reference = inputs / "problems", inputs / "reference"
    worker.train_rank(config, problems=problems, reference=reference, work=folder / "work", **outputs)


def _die_in(step: int, place: str) -> None:
    """Have this process killed in a step."""
    learn, record = Trainer._learn, Trainer._record
    after_step, now = worker._after_step, 0

    def die_if(here: str) -> None:
        if (now, here) == (step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def learning(self: Trainer, groups: Any, number: int) -> Any:
        nonlocal now
        now = number
        die_if("sampled")
        return learn(self, groups, number)

    def recorded(self: Trainer, *arguments: Any) -> None:
        record(self, *arguments)
        die_if("learned")

    def saved(*arguments: Any) -> None:
        save_file(*arguments)
        die_if("writing")

    def written(*arguments: Any) -> None:
        after_step(*arguments)
        die_if("written")

    patch.object(Trainer, "_learn", learning).start()
    patch.object(Trainer, "_record", recorded).start()
    patch.object(training, "save_file", saved).start()
    patch.object(worker, "_after_step", written).start()


def main(folder: str, *death: str) -> None:
    """See above."""
    patch.object(monitoring, "measure_matmul_flops", lambda *_: 1e12).start()
    if death:
        step, place = death
        _die_in(int(step), place)
    config = TrainGRPOConfig.model_validate_json((Path(folder) / "config.json").read_text())
    train(config, Path(folder), Path(folder) / "killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
