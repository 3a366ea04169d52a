"""Checkpoints of a run in training: the policy with its optimizer, random numbers, and what the stage adds.

Written by the first process and read by all, whatever their number. Beside weights in safetensors there are plain
values (numbers, text, tensors in lists and dicts), never objects.
"""

import io
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from components.policy.config import CheckpointConfig
from components.policy.engine import Policy, TensorFile
from components.policy.parallel import Ranks
from components.policy.shutdown import StopRequest
from components.shared import checkpoints
from components.shared import work as work_of
from components.shared.errors import StoppedError
from components.shared.progress import say

_POLICY, _VALUES = "policy.safetensors", "values.pt"


class TrainingCheckpoint:
    """A checkpoint to go on from."""

    def __init__(self, folder: Path) -> None:
        self.policy = TensorFile(folder / _POLICY)
        self.values: dict[str, Any] = torch.load(folder / _VALUES, map_location="cpu", weights_only=True)
        """What the stage added, on the CPU: each process has another GPU than the one that wrote it."""


class Resumption:
    """The checkpoints of one run: where it goes on, and what it leaves to go on from."""

    def __init__(self, ranks: Ranks, work: Path, config: CheckpointConfig, *, stage: str, num_steps: int) -> None:
        self._ranks, self._stage, self._num_steps = ranks, stage, num_steps
        self._every_steps = config.every_steps
        folder = work / checkpoints.FOLDER
        self._writer = None
        newest = None
        if ranks.is_main:
            fingerprint = work_of.fingerprint_in(work)
            self._writer = checkpoints.Writer(
                folder, keep_last=config.keep_last, keep_best=config.keep_best, fingerprint=fingerprint
            )
            newest = checkpoints.latest(folder, stage=stage, fingerprint=fingerprint)
        # Only the first process reads all of it to see that it is whole.
        found = ranks.all_gather(newest, "the choice of a checkpoint")[0]
        self.steps_done = found.step if found else 0
        """Steps of the checkpoint that is gone on from; 0 for a new run."""
        self._found = found.folder if found else None
        self._generators: list[dict[str, Any]] = []
        if found and ranks.is_main:
            left = num_steps - found.step
            say(stage, f"going on after step {found.step}" + ("" if left else ": nothing is left to do"))

    def load(self) -> TrainingCheckpoint | None:
        """Return the checkpoint that is gone on from; while it is there its files are open, and take their room."""
        if self._found is None:
            return None
        saved = TrainingCheckpoint(self._found)
        self._generators = saved.values["random"]
        return saved

    def restore_random_state(self) -> None:
        """Set every generator of this process to where it was `saved`, if there are as many processes as there were."""
        if len(self._generators) == self._ranks.world_size:
            _restore_generators(self._generators[self._ranks.rank])

    def after_step(
        self,
        step: int,
        engine: Policy,
        values: Callable[[], dict[str, Any]],
        *,
        stop: StopRequest,
        score: float | None,
        last: bool = False,
    ) -> None:
        """Write a checkpoint if one is due after a step; StoppedError, with one, if any process was told to stop.

        One is due after the `last` step before the run ends for another reason.
        """
        stopped = any(self._ranks.all_gather(stop.requested, f"the end of step {step}"))
        due = last or step % self._every_steps == 0 or step == self._num_steps
        if not stopped and not due:
            return
        state, added = engine.state(), values()
        generators = self._ranks.all_gather(_generators(), "the writing of a checkpoint")

        def write(folder: Path) -> None:
            save_file(state, folder / _POLICY)
            # By way of memory: torch.save does not say what the system refused, such as room on a disk.
            buffer = io.BytesIO()
            torch.save({**added, "random": generators}, buffer)
            (folder / _VALUES).write_bytes(buffer.getbuffer())

        if self._writer:
            self._writer.save(step, write, score=score)
        self._ranks.barrier("the end of writing a checkpoint")
        if stopped:
            raise StoppedError(
                f"told to stop: step {step} of {self._num_steps} is done and kept; run the same again to go on"
            )


def _generators() -> dict[str, Any]:
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": _of_gpu()}


def _restore_generators(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _of_gpu() -> torch.Tensor | None:
    """The state of the generator of this process's GPU: a machine may have others, which are not its own."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None
