"""The trainer's end of the line protocol by which grpo_step.py lets two live trainers take turns.

A trainer is a process of its own, started with the path of a case (case.py) as its one argument. Once it is built it
says `{"ready": ...}`; for every line `step` that it reads it takes one optimizer step and answers with its `Step`; at
`stop`, or when its input ends, it leaves. Between lines it sleeps. Only the standard library and torch are imported
here: the TRL trainer runs in an environment that has nothing of this project.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Step:
    """One whole optimizer step, sampling included."""

    seconds: float
    """From the request to the end of the optimizer step."""
    sampling_s: float
    """The part of it that sampled completions."""
    lengths: list[int]
    """Tokens of each completion, in ascending order."""
    peak_bytes: int
    """Most memory that the process has held so far: of the GPU where there is one, else of the machine."""


class Channel:
    """Lines to and from grpo_step.py; whatever else a library prints goes to standard error."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def ready(self) -> None:
        """Say that the trainer is built."""
        built = {"torch": torch.__version__, "threads": torch.get_num_threads(), "built_bytes": peak_bytes()}
        self._send({"ready": built})

    def wanted(self) -> bool:
        """Sleep until the next line; return whether it asks for a step."""
        return sys.stdin.readline().strip() == "step"

    def done(self, step: Step) -> None:
        """Answer a request; on a GPU, the other trainer needs the memory that this one keeps for its next step."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._send(asdict(step))

    def _send(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()


def read_case() -> dict[str, Any]:
    """Return the case named on the command line."""
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return case


def synchronize() -> None:
    """Wait for the GPU, if there is one, so that the clock sees its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Return the most memory this process has held: allocated by torch on a GPU, else resident (Linux's VmHWM)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
