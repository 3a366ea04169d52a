"""Checkpoints of a run in training: the policy with its optimizer, random state, and what the stage adds.

Written by the main process and read by all, whatever their number. Beside weights in safetensors there are plain
values (numbers, text, tensors in lists and dicts), never objects.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from components.policy.config import CheckpointConfig
from components.policy.determinism import random_state, set_random_state
from components.policy.engine import Policy
from components.policy.parallel import Ranks
from components.policy.shutdown import StopRequest
from components.shared.errors import StoppedError
from components.shared.progress import say
from components.shared.work import CHECKPOINTS, CheckpointWriter, fingerprint_in, latest_checkpoint

_POLICY, _VALUES = "policy.safetensors", "values.pt"


class TrainingCheckpoint:
    """A checkpoint to resume from."""

    def __init__(self, folder: Path) -> None:
        self.policy = folder / _POLICY
        """File with the weights and the state of the optimizer: see `load_parameters` and `Policy.load_state`."""
        self.values: dict[str, Any] = torch.load(folder / _VALUES, map_location="cpu", weights_only=True)
        """What the stage added, on the CPU: each process has another GPU than the one that wrote it."""


class Resumption:
    """The checkpoints of one run: the one it is resumed from, and those it writes."""

    def __init__(self, ranks: Ranks, work: Path, config: CheckpointConfig, *, stage: str, num_steps: int) -> None:
        self._ranks, self._stage, self._num_steps = ranks, stage, num_steps
        self._every_steps = config.every_steps
        folder = work / CHECKPOINTS
        self._writer = None
        newest = None
        if ranks.is_main:
            fingerprint = fingerprint_in(work)
            self._writer = CheckpointWriter(
                folder, keep_last=config.keep_last, keep_best=config.keep_best, fingerprint=fingerprint
            )
            newest = latest_checkpoint(folder, stage=stage, fingerprint=fingerprint)
        # Only the main process reads all of it to verify that it is complete.
        latest = ranks.all_gather(newest, "the choice of a checkpoint")[0]
        self.steps_done = latest.step if latest else 0
        """Steps of the checkpoint that the run is resumed from; 0 for a new run."""
        self._folder = latest.folder if latest else None
        self._random_states: list[dict[str, Any]] = []
        if latest and ranks.is_main:
            say(stage, f"resuming after step {latest.step}" + (": all steps are done" * (latest.step == num_steps)))

    def load(self) -> TrainingCheckpoint | None:
        """Return the checkpoint that the run is resumed from, if any."""
        if self._folder is None:
            return None
        checkpoint = TrainingCheckpoint(self._folder)
        self._random_states = checkpoint.values["random"]
        return checkpoint

    def restore_random_state(self) -> None:
        """Set this process's random generators as in the checkpoint, if there are as many processes as there were."""
        if len(self._random_states) == self._ranks.world_size:
            set_random_state(self._random_states[self._ranks.rank])

    def after_step(
        self,
        step: int,
        policy: Policy,
        values: Callable[[], dict[str, Any]],
        *,
        stop: StopRequest,
        score: float | None,
        last: bool = False,
    ) -> None:
        """Write a checkpoint if one is due after a step; StoppedError, after writing one, if any process is to stop.

        One is also due after the `last` step before the run ends for another reason.
        """
        stopped = any(self._ranks.all_gather(stop.requested, f"the end of step {step}"))
        if not (stopped or last or step % self._every_steps == 0 or step == self._num_steps):
            return
        state, added = policy.state(), values()
        random_states = self._ranks.all_gather(random_state(), "the writing of a checkpoint")

        def write(folder: Path) -> None:
            save_file(state, folder / _POLICY)
            # Through memory: torch.save hides errors of the system, such as a full disk.
            buffer = io.BytesIO()
            torch.save({**added, "random": random_states}, buffer)
            (folder / _VALUES).write_bytes(buffer.getbuffer())

        if self._writer:
            self._writer.save(step, write, score=score)
        self._ranks.barrier("the end of writing a checkpoint")
        if stopped:
            raise StoppedError(
                f"stopped on request: step {step} of {self._num_steps} is saved; run the same again to go on"
            )
