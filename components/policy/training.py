"""Functions that the training loops of SFT and GRPO share: determinism, checkpoints, schedule, curves, memory advice.

A checkpoint of an unfinished run has files of tensors (safetensors): the policy with its optimizer, and those that the
stage adds. `values.pt` has the random state and other values of the stage, without pickled objects. The main process
writes it, and any number of processes can resume from it.
"""

import csv
import ctypes
import io
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from components.policy.config import CheckpointConfig, EngineConfig, Schedule
from components.policy.engine import Policy
from components.policy.parallel import Ranks
from components.policy.shutdown import StopRequest
from components.shared import jsonl
from components.shared.errors import StoppedError, explain_out_of_memory
from components.shared.progress import say
from components.shared.work import (
    CHECKPOINTS,
    EXPORT,
    CheckpointWriter,
    best_checkpoint,
    fingerprint_in,
    latest_checkpoint,
)

_POLICY, _VALUES = "policy", "values.pt"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def prepare_process(seed: int) -> None:
    """Seed every generator, choose deterministic kernels, keep freed memory and quieten the libraries."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for determinism
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode fills each new buffer, so that none is read unwritten; this would double the time of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no stub
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory: each step on a CPU frees and allocates the same hundreds of megabytes.

    By default glibc returns large blocks to the system, which clears every page before it is used again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc; other C libraries lack it
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never return memory


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, num_steps: int, final_fraction: float, schedule: Schedule = "linear"
) -> float:
    """Return the rate of `step` (from 0): linear warm-up to `peak`, then the decay of `schedule`.

    With d rising from 0 after the warm-up to 1 in the last step, and f the `final_fraction`:

        linear     peak (1 - (1 - f) d)
        cosine     peak (f + (1 - f) (1 + cos(pi d)) / 2)
        constant   peak
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    match schedule:
        case "linear":
            return peak * (1 - (1 - final_fraction) * decay)
        case "cosine":
            return peak * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * decay)) / 2)
        case "constant":
            return peak


class TrainingCheckpoint:
    """A checkpoint to resume from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.policy = self.tensors(_POLICY)
        """File of the weights and the optimizer state: see optimizer_state.py."""
        self.values: dict[str, Any] = torch.load(folder / _VALUES, map_location="cpu", weights_only=True)
        """Values that the stage added, and the random states of all processes ("random")."""

    def tensors(self, name: str) -> Path:
        """Return the file of the tensors that the stage added under this name."""
        return _tensors_file(self._folder, name)


def _tensors_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


class Resumption:
    """The checkpoints of one run: the one it resumes from, and those it writes."""

    def __init__(self, ranks: Ranks, work: Path, config: CheckpointConfig, *, stage: str, num_steps: int) -> None:
        self._ranks, self._num_steps, self._every_steps = ranks, num_steps, config.every_steps
        self._folder, self._stage = work / CHECKPOINTS, stage
        self._random_states: list[dict[str, Any]] = []
        self._writer = latest = None
        # The main process alone writes checkpoints, and reads the latest completely to verify it.
        if ranks.is_main:
            fingerprint = fingerprint_in(work)
            self._writer = CheckpointWriter(
                self._folder, keep_last=config.keep_last, keep_best=config.keep_best, fingerprint=fingerprint
            )
            latest = latest_checkpoint(self._folder, stage=stage, fingerprint=fingerprint)
        self._latest = ranks.all_gather(latest, "the choice of a checkpoint")[0]
        self.steps_done = self._latest.step if self._latest else 0
        """The step of the checkpoint that the run resumes from; 0 for a new run."""
        if self.steps_done and ranks.is_main:
            done = ": all steps are done" if self.steps_done == num_steps else ""
            say(stage, f"resuming after step {self.steps_done}{done}")

    def best(self) -> tuple[int, Path] | None:
        """Return the step and the weights file of the checkpoint with the best score; None if none has a score."""
        best = best_checkpoint(self._folder, stage=self._stage) if self._ranks.is_main else None
        best = self._ranks.all_gather(best, "the choice of the best checkpoint")[0]
        return (best.step, _tensors_file(best.folder, _POLICY)) if best else None

    def load(self) -> TrainingCheckpoint | None:
        """Return the checkpoint that the run resumes from, if any."""
        if self._latest is None:
            return None
        checkpoint = TrainingCheckpoint(self._latest.folder)
        self._random_states = checkpoint.values["random"]
        return checkpoint

    def restore_random_state(self) -> None:
        """Restore this process's random generators from the loaded checkpoint, if it has as many processes."""
        if len(self._random_states) != self._ranks.world_size:
            return
        state = self._random_states[self._ranks.rank]
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    def after_step(
        self,
        step: int,
        policy: Policy,
        values: Callable[[], dict[str, Any]],
        *,
        stop: StopRequest,
        score: float | None = None,
        due: bool = False,
        tensors: Callable[[], Mapping[str, dict[str, Tensor]]] = dict,
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint if the step is the last, every `every_steps`-th or `due`, or if any process has to stop.

        `values` and `tensors` return the data that the stage adds; all processes compute `tensors` together, and each
        entry becomes a file. `export` writes files for other programs into a folder, while full weights are gathered.
        The best checkpoint is the one with the highest `score`. After the checkpoint, StoppedError if one has to stop.
        """
        is_stopped = any(self._ranks.all_gather(stop.requested, f"the end of step {step}"))
        if not (is_stopped or due or step % self._every_steps == 0 or step == self._num_steps):
            stop.unsaved_steps += 1
            return
        stage_values, files = values(), {_POLICY: policy.state(), **tensors()}
        random_states = self._ranks.all_gather(_random_state(), "the writing of a checkpoint")

        def write(folder: Path) -> None:
            for name, tensors_of_file in files.items():
                save_file(tensors_of_file, _tensors_file(folder, name))
            # Not directly to the file: torch.save hides errors of the system, such as a full disk.
            buffer = io.BytesIO()
            torch.save({**stage_values, "random": random_states}, buffer)
            (folder / _VALUES).write_bytes(buffer.getbuffer())
            if export:
                export(folder / EXPORT)

        with policy.gather_full_parameters() if export else nullcontext():
            if self._writer:
                self._writer.save(step, write, score=score)
        self._ranks.barrier("the end of writing a checkpoint")
        stop.unsaved_steps = 0
        if is_stopped:
            raise StoppedError(
                f"stopped on request: step {step} of {self._num_steps} is saved; start the same run again to resume"
            )


def _random_state() -> dict[str, Any]:
    """Return the state of the generators of this process and of its GPU."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def write_curves(folder: Path, rows: Sequence[Mapping[str, float | None]], columns: Sequence[str] = ()) -> None:
    """Write the rows to steps.jsonl, with null for None, and curves.csv, which has `columns` if there are no rows."""
    jsonl.write_rows(folder / "steps.jsonl", (dict(row) for row in rows))
    with (folder / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        names = dict.fromkeys(chain(*rows)) if rows else columns
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def explain_memory_for_loading(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Return a context whose errors name the keys to change if a model, its optimizer or reference does not fit."""
    key = f"{stage}.engine"
    remedies = [f"set {key}.zero_stage: 3 (it is {config.zero_stage})"] if config.zero_stage < 3 else []
    if config.offload != "all":
        remedies.append(f"set {key}.offload: all (it is {config.offload})")
    if config.num_processes > 1:
        remedies.append(f"lower {key}.num_processes (it is {config.num_processes}): each loads the model")
    return explain_out_of_memory("loading the model", *remedies, "use a smaller model")


def explain_memory_for_passes(
    stage: str, config: EngineConfig, purpose: str, *more: str
) -> AbstractContextManager[None]:
    """Return a context whose errors name the keys to change if micro-batches do not fit, and `more` remedies."""
    lower = f"lower {stage}.engine.micro_batch_tokens (it is {config.micro_batch_tokens})"
    return explain_out_of_memory(purpose, lower, *more)


def explain_memory_for_update(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Return a context whose errors name the keys to change if the backward pass or optimizer step does not fit."""
    more = []
    if not config.gradient_checkpointing:
        more.append(f"set {stage}.engine.gradient_checkpointing: true")
    if config.offload == "none":
        more.append(f"set {stage}.engine.offload: optimizer")
    return explain_memory_for_passes(stage, config, "the update of the policy", *more)
