"""What is launched: one function in several processes, and what each of them leaves behind.

A folder that all of them see holds the job (job.json), the outcome of each rank (rank-0.json ...), what ranks other
than the first have printed (rank-1.log ...), and what the launcher of each node saw when some of them ended early
(ended-0.json ...).
"""

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from components.shared import jsonl
from components.shared.config import Config, validate

_JOB = "job.json"


class Failure(NamedTuple):
    """How a rank failed, as its launcher saw it."""

    rank: int
    exit_code: int
    """Minus the signal that ended it."""
    time: int
    """Seconds of the Unix clock."""


@dataclass(frozen=True)
class Job:
    """A call of a function of the project, to be made by every rank."""

    folder: Path
    function: str
    """`package.module:function`, which takes a config and folders by name."""
    config: dict[str, Any]
    folders: dict[str, str]
    outputs: dict[str, str]
    """Folders that the first rank finds empty and fills."""
    num_processes: int
    grace_s: float
    """Time that ranks have to end by themselves when they are told to."""
    with_samplers: bool = False
    """Whether, on a cluster, pods that sample stand beside those of the ranks."""

    def write(self) -> None:
        """Write the job down where ranks look for it; nothing is there of any job before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        jsonl.write_json(self.folder / _JOB, self.fields())

    def is_written(self) -> bool:
        """Tell whether the folder holds this very job."""
        path = self.folder / _JOB
        return path.is_file() and jsonl.read_json(path) == self.fields()

    def fields(self) -> dict[str, Any]:
        """Return all that says what is to be done."""
        return {name: value for name, value in vars(self).items() if name != "folder"}

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """Return the job of a folder."""
        return cls(folder=folder, **jsonl.read_json(folder / _JOB))

    def call(self) -> dict[str, float]:
        """Make the call, in this process."""
        config_type: type[Config] = get_type_hints(_imported(self.function))["config"]
        config = validate(config_type, self.config, name="")
        return called(self.function, config, self._paths())

    def _paths(self) -> dict[str, Path]:
        return {name: Path(path) for name, path in {**self.folders, **self.outputs}.items()}

    def begin(self, rank: int) -> None:
        """Take away what a rank has left that was started before, and has not come to its end."""
        self._outcome(rank).unlink(missing_ok=True)
        for path in map(Path, self.outputs.values() if rank == 0 else ()):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)

    def write_outcome(self, rank: int, outcome: Mapping[str, Any]) -> None:
        """Keep what became of a rank: its `result`, or its `error` and `exit_code`; whole, or not at all."""
        partial = self._outcome(rank).with_suffix(".partial")
        jsonl.write_json(partial, outcome)
        partial.rename(self._outcome(rank))

    def outcome(self, rank: int) -> dict[str, Any] | None:
        """Return what became of a rank, or None where it ended without a word."""
        path = self._outcome(rank)
        return jsonl.read_json(path) if path.is_file() else None

    def _outcome(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def results(self) -> list[dict[str, float]] | None:
        """Return what every rank has returned, or None unless all have."""
        outcomes = [self.outcome(rank) for rank in range(self.num_processes)]
        found = [outcome["result"] for outcome in outcomes if outcome is not None and "result" in outcome]
        return found if len(found) == self.num_processes else None

    def write_ended(self, node: int, failures: Sequence[Failure]) -> None:
        """Keep how ranks of a node failed."""
        jsonl.write_json(self.folder / f"ended-{node}.json", [list(each) for each in failures])

    def ended(self) -> dict[int, int]:
        """Return the exit codes of ranks that failed, in their order; later ones may have been ended for the first."""
        found = [Failure(*each) for path in self.folder.glob("ended-*.json") for each in jsonl.read_json(path)]
        return {each.rank: each.exit_code for each in sorted(found, key=lambda each: each.time)}

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
