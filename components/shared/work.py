"""A stage's unfinished work: found again by what it is made from, one run at a time, and never given up in silence.

<root>/<stage>/<key>/      the folder of a run that has not finished, with `fingerprint.json`
<root>/<stage>/<key>.json  where the last run that finished has put its outputs, for those that waited for it
"""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from components.shared import checkpoints, durable, jsonl, lineage
from components.shared.errors import PipelineError, StoppedError
from components.shared.lineage import Fingerprint, differences
from components.shared.progress import say

_LOCK, _RECORD = "run.lock", "fingerprint.json"
_NUM_NAMED = 3
"""Other unfinished work that is named piece by piece."""


def fingerprint_in(folder: Path) -> Fingerprint | None:
    """Return what the work in a folder is made from, without files of code; None where nobody has written it down."""
    recorded = _recorded(folder)
    return None if recorded is None else {name: value for name, value in recorded.items() if name != "files"}


def _recorded(folder: Path) -> Fingerprint | None:
    path = folder / _RECORD
    return jsonl.read_json(path) if path.is_file() else None


@dataclass
class WorkFolder:
    """The folder of unfinished work that this run alone has now."""

    stage: str
    folder: Path
    waited: bool
    """Whether another run of the same work had it first."""

    @property
    def _result(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    def take(self, outputs: Mapping[str, Path]) -> dict[str, float] | None:
        """Fill `outputs` with those of the run that this one has waited for; return its metrics, or None for nothing.

        There is nothing where this run has not waited, or that one did not finish.
        """
        if not self.waited or not self._result.is_file():
            return None
        result = jsonl.read_json(self._result)
        made = {name: self.folder.parent / path for name, path in result["outputs"].items()}
        if made.keys() != outputs.keys() or not _stand(made, result["made_by"]):
            return None
        for name, path in outputs.items():
            _copy(made[name], path)
        say(self.stage, "the other run has finished; this one has the same result")
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def begin(self, now: Fingerprint) -> None:
        """Write down what the work is made from; where it is new, say which unfinished work it does not go on with."""
        self._result.unlink(missing_ok=True)
        record = {**now, "files": lineage.code_files()}
        if checkpoints.last_step(self.folder) is None:
            _say_others(self.stage, self.folder, record)
        _write_json(self.folder / _RECORD, record)

    def finish(self, outputs: Mapping[str, Path], made_by: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Leave word of the outputs, once they stand, for runs that wait for them."""
        paths = {name: os.path.relpath(path.resolve(), self.folder.parent.resolve()) for name, path in outputs.items()}
        result = {"outputs": paths, "made_by": lineage.value_digest(made_by), "metrics": dict(metrics)}
        _write_json(self._result, result)

    def discard(self) -> None:
        """Remove the folder, and those it was in where they are empty now."""
        durable.discard(self.folder)
        with suppress(OSError):
            for parent in list(self.folder.parents)[: 3 if self.folder.parts[:2] == ("outputs", "work") else 1]:
                parent.rmdir()

    def is_empty(self) -> bool:
        """Tell whether nothing was done yet."""
        own = {_LOCK, _RECORD, f".{_RECORD}.partial"}
        return all(path.is_dir() or path.suffix == ".lock" or path.name in own for path in self.folder.rglob("*"))


@contextmanager
def locked_work(root: Path, stage: str, now: Fingerprint) -> Iterator[WorkFolder]:
    """Hold the folder of unfinished work; it is kept unless the block ends well or nothing was done.

    Where another run holds it this one waits, and has what that one has left: its result, or what it did not finish.
    """
    for left in (root / stage).glob(".*.removed"):
        shutil.rmtree(left, ignore_errors=True)
    folder = root / stage / lineage.value_digest(now)[:16]
    lock, waited = _hold(stage, folder)
    with lock:
        work = WorkFolder(stage, folder, waited)
        try:
            yield work
        except BaseException:
            if work.is_empty():
                work.discard()
            raise
        work.discard()


def _hold(stage: str, folder: Path) -> tuple[TextIO, bool]:
    """Return the lock of a folder, and whether it was waited for."""
    try:
        return durable.lock_folder(folder / _LOCK), False
    except durable.InUseError as error:
        holder = error.holder
    with _ended_when_told(folder):
        say(stage, f"{folder} is in use by {holder}, which does the same work; waiting to take its result")
        return durable.wait_for_lock(folder / _LOCK), True


@contextmanager
def _ended_when_told(folder: Path) -> Iterator[None]:
    """Have a request to stop end the wait at once: there is nothing to keep."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        if number == signal.SIGINT:
            raise SystemExit(128 + number)
        raise StoppedError(f"told to stop while it waited for {folder}; run the same again")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_others(stage: str, folder: Path, now: Fingerprint) -> None:
    """Name other unfinished work of the stage that nobody is at, with what differs."""
    steps, times = {}, {}
    for other in folder.parent.glob("[!.]*/"):
        step = None if other == folder else checkpoints.last_step(other)
        if step is not None and not durable.is_locked(other / _LOCK):
            with suppress(FileNotFoundError):  # its run may have finished meanwhile
                steps[other], times[other] = step, other.stat().st_mtime
    newest = sorted(times, key=lambda other: times[other], reverse=True)
    for other in newest[:_NUM_NAMED]:
        say(stage, f"{other}: unfinished work, after step {steps[other]}, is left: {_why(stage, other, now)}")
    if len(newest) > _NUM_NAMED:
        say(stage, f"{folder.parent}: unfinished work is in {len(newest) - _NUM_NAMED} more of its folders")
    if newest:
        say(
            stage,
            "this run begins at the first step; to go on with unfinished work restore what differs and start again, "
            "to discard it delete its folder",
        )


def _why(stage: str, other: Path, now: Fingerprint) -> str:
    try:
        before = _recorded(other)
    except PipelineError:
        before = None
    return differences(stage, before, now) if before else "what it was made from is not known"


def _stand(outputs: Mapping[str, Path], made_by: str) -> bool:
    """Tell whether every output has the lineage with that digest, and nobody has removed or replaced it."""
    return all(lineage.value_digest(lineage.read(path)) == made_by for path in outputs.values())


def _copy(folder: Path, target: Path) -> None:
    """Copy every file; unlike shutil.copytree this says what the system has refused."""
    for path in sorted(folder.rglob("*")):
        place = target / path.relative_to(folder)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, place)


def _write_json(path: Path, value: Any) -> None:
    """Write a file that is whole whenever somebody reads it."""
    partial = path.with_name(f".{path.name}.partial")
    jsonl.write_json(partial, value)
    partial.rename(path)
