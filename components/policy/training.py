"""What the training loops of SFT and GRPO share: determinism, checkpoints, learning rate, curves, advice on memory.

A checkpoint of an unfinished run has the policy with its optimizer in safetensors, as well as any other large tensors,
and as plain values, never objects, the random state and what the stage adds. The main process writes it, and all read
it, whatever their number.
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
    # Filling every new buffer guards against reading it unwritten; it would double the time of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no stub
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed: a step on a CPU frees and takes the same hundreds of megabytes again and again.

    By default glibc returns large pieces to the system at once, and each of their pages is cleared for the next use.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:  # glibc's; mallopt(3) has the numbers
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, -1)  # never


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, num_steps: int, final_fraction: float, schedule: Schedule = "linear"
) -> float:
    """Return the rate of `step` (from 0): linear warm-up to `peak`, then the decay of `schedule`.

    With d from 0 right after the warm-up to 1 in the last step, and f the `final_fraction`:

        linear     peak (1 - (1 - f) d)
        cosine     peak (f + (1 - f) (1 + cos(pi d)) / 2)
        constant   peak
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    match schedule:
        case "linear":
            return peak * (1 - (1 - final_fraction) * done)
        case "cosine":
            return peak * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * done)) / 2)
        case "constant":
            return peak


class TrainingCheckpoint:
    """A checkpoint to resume from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.policy = self.tensors(_POLICY)
        """File with the weights and the state of the optimizer: see optimizer_state.py."""
        self.values: dict[str, Any] = torch.load(folder / _VALUES, map_location="cpu", weights_only=True)
        """What the stage added, on the CPU: each process has another GPU than the one that wrote it."""

    def tensors(self, name: str) -> Path:
        """Return the file of the tensors that the stage added under a name."""
        return _tensors_file(self._folder, name)


def _tensors_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


class Resumption:
    """The checkpoints of one run: the one it is resumed from, and those it writes."""

    def __init__(self, ranks: Ranks, work: Path, config: CheckpointConfig, *, stage: str, num_steps: int) -> None:
        self._ranks, self._num_steps, self._every_steps = ranks, num_steps, config.every_steps
        self._random_states: list[dict[str, Any]] = []
        self._writer = newest = None
        self._folder, self._stage = work / CHECKPOINTS, stage
        if ranks.is_main:
            folder, fingerprint = self._folder, fingerprint_in(work)
            self._writer = CheckpointWriter(
                folder, keep_last=config.keep_last, keep_best=config.keep_best, fingerprint=fingerprint
            )
            newest = latest_checkpoint(folder, stage=stage, fingerprint=fingerprint)
        # Only the main process reads all of it to verify that it is complete.
        self._latest = ranks.all_gather(newest, "the choice of a checkpoint")[0]
        self.steps_done = self._latest.step if self._latest else 0
        """Steps of the checkpoint that the run is resumed from; 0 for a new run."""
        if self.steps_done and ranks.is_main:
            done = ": all steps are done" if self.steps_done == num_steps else ""
            say(stage, f"resuming after step {self.steps_done}{done}")

    def best(self) -> tuple[int, Path] | None:
        """Return the step of the checkpoint with the best score, and the file with its weights; None without any."""
        best = best_checkpoint(self._folder, stage=self._stage) if self._ranks.is_main else None
        best = self._ranks.all_gather(best, "the choice of the best checkpoint")[0]
        return (best.step, _tensors_file(best.folder, _POLICY)) if best else None

    def load(self) -> TrainingCheckpoint | None:
        """Return the checkpoint that the run is resumed from, if any."""
        if self._latest is None:
            return None
        checkpoint = TrainingCheckpoint(self._latest.folder)
        self._random_states = checkpoint.values["random"]
        return checkpoint

    def restore_random_state(self) -> None:
        """Set this process's random generators as in the checkpoint, if there are as many processes as there were."""
        if len(self._random_states) == self._ranks.world_size:
            _set_random_state(self._random_states[self._ranks.rank])

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
        """Write a checkpoint if one is due after a step; StoppedError, after writing one, if any process is to stop.

        Others than every few steps and the last are those that are `due` for a reason of the stage's own, such as a new
        best `score`. `values` are read by every process that resumes; each entry of `tensors`, which all processes
        compute together, goes into a file of its own. What `export` writes into its folder is for others than this run:
        it has the full weights.
        """
        stopped = any(self._ranks.all_gather(stop.requested, f"the end of step {step}"))
        if not (stopped or due or step % self._every_steps == 0 or step == self._num_steps):
            stop.unsaved_steps += 1
            return
        added, state = values(), {_POLICY: policy.state(), **tensors()}
        random_states = self._ranks.all_gather(_random_state(), "the writing of a checkpoint")

        def write(folder: Path) -> None:
            for name, of_name in state.items():
                save_file(of_name, _tensors_file(folder, name))
            # Through memory: torch.save hides errors of the system, such as a full disk.
            buffer = io.BytesIO()
            torch.save({**added, "random": random_states}, buffer)
            (folder / _VALUES).write_bytes(buffer.getbuffer())
            if export:
                export(folder / EXPORT)

        with policy.gather_full_parameters() if export else nullcontext():
            if self._writer:
                self._writer.save(step, write, score=score)
        self._ranks.barrier("the end of writing a checkpoint")
        stop.unsaved_steps = 0
        if stopped:
            raise StoppedError(
                f"stopped on request: step {step} of {self._num_steps} is saved; start the same run again to resume"
            )


def _random_state() -> dict[str, Any]:
    """Return the state of the generators of this process and of its GPU (a machine may have others)."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_curves(folder: Path, rows: Sequence[Mapping[str, float | None]], columns: Sequence[str] = ()) -> None:
    """Write steps.jsonl and curves.csv, None and an empty field where nothing was measured.

    Without a row the `columns` are those of the header.
    """
    jsonl.write_rows(folder / "steps.jsonl", (dict(row) for row in rows))
    with (folder / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=dict.fromkeys(chain(*rows)) if rows else columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def memory_for_loading(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Say which keys to change where a model, its optimizer or its reference does not fit."""
    key = f"{stage}.engine"
    remedies = [f"set {key}.zero_stage: 3 (it is {config.zero_stage})"] if config.zero_stage < 3 else []
    if config.offload != "all":
        remedies.append(f"set {key}.offload: all (it is {config.offload})")
    if config.num_processes > 1:
        remedies.append(f"lower {key}.num_processes (it is {config.num_processes}): each loads the model")
    return explain_out_of_memory("loading the model", *remedies, "use a smaller model")


def memory_for_passes(stage: str, config: EngineConfig, purpose: str, *more: str) -> AbstractContextManager[None]:
    """Say which keys to change where micro-batches do not fit, and what else helps."""
    lower = f"lower {stage}.engine.micro_batch_tokens (it is {config.micro_batch_tokens})"
    return explain_out_of_memory(purpose, lower, *more)


def memory_for_update(stage: str, config: EngineConfig) -> AbstractContextManager[None]:
    """Say which keys to change where the backward pass or the optimizer's step does not fit."""
    more = [] if config.gradient_checkpointing else [f"set {stage}.engine.gradient_checkpointing: true"]
    more += [f"set {stage}.engine.offload: optimizer"] if config.offload == "none" else []
    return memory_for_passes(stage, config, "the update of the policy", *more)
