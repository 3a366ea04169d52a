"""A job: one call of a function in several processes, with the files that they exchange.

Its folder, visible to all processes, holds job.json (the call), turn.json (name of the TrainJob whose pods may begin),
rank-0.json ... (the outcome of each rank), rank-1.log ... (the output of ranks other than the first) and
failures-0.json ... (how ranks of a node failed, as seen by their launcher).
"""

import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from components.shared import jsonl
from components.shared.config import Config, validate
from components.shared.environment import TRAIN_JOB_VARIABLE
from components.shared.errors import PipelineError, RetryableError

_TURN_POLL_S, _LONGEST_TURN_S = 1.0, 900.0
"""Longest wait of a pod, which holds quota meanwhile, for a step that was lost and is started again."""
RankFunction = Callable[..., dict[str, float]]
"""Takes a config and folders by name, as a stage's function does, and returns metrics; the first rank's are used."""


class RankFailure(NamedTuple):
    """How a rank failed, as its launcher saw it."""

    rank: int
    exit_code: int  # minus the number of a signal, if one ended it
    time: int  # seconds since the epoch


@dataclass(frozen=True)
class Job:
    """A call to be made by every rank."""

    folder: Path
    function: str
    """See `name_of`."""
    config: dict[str, Any]
    folders: dict[str, str]
    outputs: dict[str, str]
    """Folders for the first rank's results, which are emptied before it starts."""
    num_processes: int
    grace_s: float
    """Time for ranks to end by themselves after a request to stop."""
    with_samplers: bool = False
    """Whether pods with vLLM servers run beside the ranks of a TrainJob."""

    def write(self, turn: str = "") -> None:
        """Write the job, and remove an earlier one and its outcomes; only pods of the TrainJob `turn` may begin."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        jsonl.write_json(self._file("job"), self.fields())
        if turn:
            jsonl.write_json(self._file("turn"), turn)

    @staticmethod
    def turn(folder: Path) -> str:
        """Return the name of the TrainJob whose pods may begin the job in a folder; empty if none may."""
        with suppress(PipelineError):  # missing, or half written
            return str(jsonl.read_json(folder / "turn.json"))
        return ""

    def end_turn(self) -> None:
        """Make pods that have not begun wait."""
        self._file("turn").unlink(missing_ok=True)

    def is_written(self) -> bool:
        """Tell whether the folder holds this job, or a job of another run that does the same work."""
        return self._file("job").is_file() and Job.read(self.folder).work() == self.work()

    def fields(self) -> dict[str, Any]:
        """Return all fields but the folder."""
        return {name: value for name, value in vars(self).items() if name != "folder"}

    def work(self) -> dict[str, Any]:
        """Return the fields without the paths of inputs, in which runs of the same work differ."""
        return {**self.fields(), "folders": sorted(self.folders)}

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """Return the job of a folder."""
        return cls(folder=folder, **jsonl.read_json(folder / "job.json"))

    @classmethod
    def read_in_pod(cls, folder: Path) -> "Job":
        """Wait for the turn of this pod's TrainJob, then return its job; PipelineError if that takes too long."""
        # Without a handler, the first process of a container ignores SIGTERM.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(RetryableError.exit_code))
        name, waited_s = os.environ[TRAIN_JOB_VARIABLE], 0.0
        while Job.turn(folder) != name:
            if waited_s > _LONGEST_TURN_S:
                raise PipelineError(f"{name}: its step has not let it begin within {_LONGEST_TURN_S:g} s")
            time.sleep(_TURN_POLL_S)
            waited_s += _TURN_POLL_S
        signal.signal(signal.SIGTERM, before)
        return cls.read(folder)

    def call(self) -> dict[str, float]:
        """Call the function in this process and return its result."""
        module, _, name = self.function.partition(":")
        function: RankFunction = getattr(importlib.import_module(module), name)
        folders = {name: Path(path) for name, path in {**self.folders, **self.outputs}.items()}
        config_type: type[Config] = get_type_hints(function)["config"]
        return function(validate(config_type, self.config, name=""), **folders)

    def clear_rank(self, rank: int) -> None:
        """Remove the outcome of a rank's earlier start; for the first rank also empty the output folders."""
        self._file(f"rank-{rank}").unlink(missing_ok=True)
        if rank == 0:
            for path in self.outputs.values():
                shutil.rmtree(path, ignore_errors=True)
                Path(path).mkdir(parents=True)

    def write_outcome(self, rank: int, outcome: Mapping[str, Any]) -> None:
        """Write the outcome of a rank atomically: its `result`, or its `error` and `exit_code`."""
        partial = self.folder / f"rank-{rank}.partial"
        jsonl.write_json(partial, outcome)
        partial.rename(self._file(f"rank-{rank}"))

    def outcome(self, rank: int) -> dict[str, Any] | None:
        """Return the outcome of a rank; None if it has not been written."""
        path = self._file(f"rank-{rank}")
        return jsonl.read_json(path) if path.is_file() else None

    def results(self) -> list[dict[str, float]] | None:
        """Return the results of all ranks, or None if one has none."""
        outcomes = [self.outcome(rank) or {} for rank in range(self.num_processes)]
        results = [outcome["result"] for outcome in outcomes if "result" in outcome]
        return results if len(results) == self.num_processes else None

    def write_failures(self, node: int, failures: Sequence[RankFailure]) -> None:
        """Write how ranks of a node failed."""
        jsonl.write_json(self._file(f"failures-{node}"), failures)

    def exit_codes(self) -> dict[int, int]:
        """Return exit codes by rank, in the order of failure: later failures may be consequences of the first."""
        paths = self.folder.glob("failures-*.json")
        failures = [RankFailure(*fields) for path in paths for fields in jsonl.read_json(path)]
        return {failure.rank: failure.exit_code for failure in sorted(failures, key=lambda each: each.time)}

    def log(self, rank: int) -> Path:
        """Return the file of a rank's output; rank 0 has none, as it prints to the log of its pod."""
        return self.folder / f"rank-{rank}.log"

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def name_of(function: RankFunction) -> str:
    """Return `module:name` of a function at the top of a module, by which ranks in other pods import it."""
    return f"{function.__module__}:{function.__qualname__}"
