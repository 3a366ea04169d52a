"""A stage's folder of unfinished work: found again by its fingerprint, one run at a time, never abandoned silently.

<root>/<stage>/<key>/      the folder of a run that has not finished, with `fingerprint.json`
<root>/<stage>/<key>.json  where the last run that finished put its outputs, for runs that waited for it
"""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from filelock import FileLock

from components.shared import checkpoints, durable, jsonl, lineage
from components.shared.errors import PipelineError, StoppedError
from components.shared.lineage import Fingerprint
from components.shared.progress import say

_LOCK, _RECORD = "run.lock", "fingerprint.json"
_NUM_LISTED = 3
"""Folders with other unfinished work that are listed one by one."""


@dataclass
class WorkFolder:
    """A folder of unfinished work, locked by this run."""

    stage: str
    folder: Path
    waited: bool
    """Whether another run of the same work had it before."""

    @property
    def _result(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    def copy_result(self, outputs: Mapping[str, Path]) -> dict[str, float] | None:
        """Fill `outputs` from the run that this one waited for and return its metrics.

        None where this run did not wait, or that one did not finish.
        """
        if not self.waited or not self._result.is_file():
            return None
        result = jsonl.read_json(self._result)
        sources = {name: self.folder.parent / path for name, path in result["outputs"].items()}
        unchanged = all(lineage.value_digest(lineage.read(path)) == result["made_by"] for path in sources.values())
        if sources.keys() != outputs.keys() or not unchanged:
            return None
        for name, path in outputs.items():
            _copy(sources[name], path)
        say(self.stage, "the other run has finished; its result was copied")
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def begin(self, fingerprint: Fingerprint) -> None:
        """Record the fingerprint; where there is no checkpoint yet, list unfinished work that is not resumed."""
        self._result.unlink(missing_ok=True)
        record = {**fingerprint, "files": lineage.code_files()}
        if checkpoints.last_step(self.folder) is None:
            _list_others(self.stage, self.folder, record)
        _write_json(self.folder / _RECORD, record)

    def finish(self, outputs: Mapping[str, Path], made_by: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Record where the complete outputs are, for runs that wait for them."""
        paths = {name: os.path.relpath(path.resolve(), self.folder.parent.resolve()) for name, path in outputs.items()}
        result = {"outputs": paths, "made_by": lineage.value_digest(made_by), "metrics": dict(metrics)}
        _write_json(self._result, result)

    def discard(self) -> None:
        """Remove the folder, and its parents where they are empty now."""
        durable.discard(self.folder)
        with suppress(OSError):
            for parent in list(self.folder.parents)[: 3 if self.folder.parts[:2] == ("outputs", "work") else 1]:
                parent.rmdir()

    def is_empty(self) -> bool:
        """Tell whether the stage has written nothing yet."""
        own = {_LOCK, _RECORD, f".{_RECORD}.partial"}
        return all(path.is_dir() or path.suffix == ".lock" or path.name in own for path in self.folder.rglob("*"))


@contextmanager
def locked_work(root: Path, stage: str, fingerprint: Fingerprint) -> Iterator[WorkFolder]:
    """Lock the folder of unfinished work; remove it if the block succeeds, or fails with nothing in it.

    Where another run has it, wait for that run's result, or for what it leaves unfinished.
    """
    for leftover in (root / stage).glob(".*.removed"):
        durable.remove(leftover)
    folder = root / stage / lineage.value_digest(fingerprint)[:16]
    lock, waited = _lock(stage, folder)
    work = WorkFolder(stage, folder, waited)
    try:
        yield work
    except BaseException:
        if work.is_empty():
            work.discard()
        raise
    else:
        work.discard()
    finally:
        lock.release()


def fingerprint_in(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the work in a folder, without files of code; None where none is recorded."""
    record = _read_record(folder)
    return None if record is None else {name: value for name, value in record.items() if name != "files"}


def _read_record(folder: Path) -> Fingerprint | None:
    path = folder / _RECORD
    return jsonl.read_json(path) if path.is_file() else None


def _lock(stage: str, folder: Path) -> tuple[FileLock, bool]:
    """Return the lock of a folder, and whether it was waited for."""
    try:
        return durable.lock_folder(folder / _LOCK), False
    except durable.InUseError as error:
        owner = error.owner
    with _stop_while_waiting(folder):
        say(stage, f"{folder} is in use by {owner}, which does the same work; waiting for its result")
        return durable.wait_for_lock(folder / _LOCK), True


@contextmanager
def _stop_while_waiting(folder: Path) -> Iterator[None]:
    """End the wait at once when a stop is requested: there is nothing to save."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        if number == signal.SIGINT:
            raise SystemExit(128 + number)
        raise StoppedError(f"stopped while waiting for {folder}; run the same again")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _list_others(stage: str, folder: Path, fingerprint: Fingerprint) -> None:
    """List other unfinished work of the stage that no run is using, and how it differs."""
    others = []
    for other in folder.parent.glob("[!.]*/"):
        step = None if other == folder else checkpoints.last_step(other)
        if step is not None and not durable.is_locked(other / _LOCK):
            with suppress(FileNotFoundError):  # its run may have finished meanwhile
                others.append((other.stat().st_mtime, other, step))
    others.sort(reverse=True)
    for _, other, step in others[:_NUM_LISTED]:
        say(stage, f"{other}: unfinished work after step {step} is not resumed: {_why(stage, other, fingerprint)}")
    if len(others) > _NUM_LISTED:
        say(stage, f"{folder.parent}: {len(others) - _NUM_LISTED} more of its folders have unfinished work")
    if others:
        say(
            stage,
            "this run starts at the first step; to resume unfinished work, undo the difference and run again; "
            "to discard it, delete its folder",
        )


def _why(stage: str, other: Path, fingerprint: Fingerprint) -> str:
    with suppress(PipelineError):
        record = _read_record(other)
        if record:
            return lineage.differences(stage, record, fingerprint)
    return "its fingerprint is unknown"


def _copy(folder: Path, target: Path) -> None:
    """Copy every file; unlike shutil.copytree this raises the system's own error."""
    for path in sorted(folder.rglob("*")):
        copy = target / path.relative_to(folder)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, copy)


def _write_json(path: Path, value: Any) -> None:
    """Write a file that is complete whenever somebody reads it."""
    partial = path.with_name(f".{path.name}.partial")
    jsonl.write_json(partial, value)
    partial.rename(path)
