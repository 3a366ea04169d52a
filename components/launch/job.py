"""What is launched: one function in several processes, and what each of them leaves behind.

A folder that all of them see holds the job (job.json), the outcome of each rank (rank-0.json ...), what ranks other
than the first have printed (rank-1.log ...), and what the launcher saw when some of them ended early (ended.json).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared import jsonl
from components.shared.config import Config, validate
from components.shared.step import config_type

_JOB, _ENDED = "job.json", "ended.json"


@dataclass(frozen=True)
class Job:
    """A call of a function of the project, to be made by every rank."""

    folder: Path
    function: str
    """`package.module:function`, which takes a config and folders by name."""
    config: dict[str, Any]
    folders: dict[str, str]
    num_processes: int
    grace_s: float
    """Time that ranks have to end by themselves when they are told to."""

    def write(self) -> None:
        """Write the job down where ranks look for it."""
        fields = {name: value for name, value in vars(self).items() if name != "folder"}
        jsonl.write_json(self.folder / _JOB, fields)

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """Return the job of a folder."""
        return cls(folder=folder, **jsonl.read_json(folder / _JOB))

    def call(self) -> dict[str, float]:
        """Make the call, in this process."""
        config = validate(config_type(_imported(self.function)), self.config, name="")
        return called(self.function, config, {name: Path(path) for name, path in self.folders.items()})

    def write_outcome(self, rank: int, outcome: Mapping[str, Any]) -> None:
        """Keep what became of a rank: its `result`, or its `error` and `exit_code`."""
        jsonl.write_json(self.folder / f"rank-{rank}.json", outcome)

    def outcome(self, rank: int) -> dict[str, Any] | None:
        """Return what became of a rank, or None where it ended without a word."""
        path = self.folder / f"rank-{rank}.json"
        return jsonl.read_json(path) if path.is_file() else None

    def write_ended(self, exit_codes: Mapping[int, int]) -> None:
        """Keep the exit codes (minus the signal) of all ranks that failed, in the order in which they did."""
        jsonl.write_json(self.folder / _ENDED, {str(rank): code for rank, code in exit_codes.items()})

    def ended(self) -> dict[int, int]:
        """Return the exit codes of ranks that failed, in their order; later ones may have been ended for the first."""
        path = self.folder / _ENDED
        codes = jsonl.read_json(path) if path.is_file() else {}
        return {int(rank): code for rank, code in codes.items()}

    def log(self, rank: int) -> Path:
        """Return where a rank other than the first prints to."""
        return self.folder / f"rank-{rank}.log"


def called(function: str, config: Config, folders: Mapping[str, Path]) -> dict[str, float]:
    """Return what `package.module:function` returns for a config and folders, in this process."""
    result: dict[str, float] = _imported(function)(config, **folders)
    return result


def _imported(function: str) -> Callable[..., dict[str, float]]:
    module, name = function.split(":")
    imported: Callable[..., dict[str, float]] = getattr(importlib.import_module(module), name)
    return imported
