"""A stage's folder of unfinished work: identified by its fingerprint, one run at a time, never abandoned silently.

<root>/<stage>/<key>/      the folder of a run that has not finished, with `fingerprint.json`
<root>/<stage>/<key>.json  where the last run that finished put its outputs, for runs that waited for it
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from components.shared import checkpoints, durable, jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Fingerprint
from components.shared.progress import say

_LOCK, _RECORD = "run.lock", "fingerprint.json"
_NUM_LISTED = 3
"""Folders with other unfinished work that are listed."""


@dataclass
class WorkFolder:
    """A folder of unfinished work, locked by this run."""

    stage: str
    folder: Path
    waited: bool
    """Whether another run of the same work had it before."""

    def copy_result(self, outputs: Mapping[str, Path]) -> dict[str, float] | None:
        """Fill `outputs` from a finished run of the same work and return its metrics.

        None where this run did not wait for another one, or there is no such result.
        """
        result_file = self.folder.with_suffix(".json")
        if not self.waited or not result_file.is_file():
            return None
        result = jsonl.read_json(result_file)
        sources = {name: self.folder.parent / path for name, path in result["outputs"].items()}
        if sources.keys() != outputs.keys() or _made_by(sources.values()) != result["made_by"]:
            return None
        for name, path in outputs.items():
            _copy(sources[name], path)
        say(self.stage, "the other run has finished; its result was copied")
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def finish(self, outputs: Mapping[str, Path], metrics: Mapping[str, float]) -> None:
        """Record where the complete outputs are, for runs that wait for them."""
        paths = {name: os.path.relpath(path.resolve(), self.folder.parent.resolve()) for name, path in outputs.items()}
        result = {"outputs": paths, "made_by": _made_by(outputs.values()), "metrics": dict(metrics)}
        partial = self.folder.with_name(f".{self.folder.name}.json.partial")
        jsonl.write_json(partial, result)
        partial.rename(self.folder.with_suffix(".json"))


@contextmanager
def locked_work(root: Path, stage: str, fingerprint: Fingerprint) -> Iterator[WorkFolder]:
    """Lock the folder of unfinished work; remove it if the block succeeds, or fails with nothing in it.

    Where another run has it, wait until that one ends. List unfinished work that is not resumed.
    """
    for leftover in (root / stage).glob(".*.removed"):
        durable.remove(leftover)
    folder = root / stage / lineage.value_digest(fingerprint)[:16]
    waited = False
    try:
        lock = durable.lock_folder(folder / _LOCK)
    except durable.InUseError as error:
        say(stage, f"{folder} is in use by {error.owner}, which does the same work; waiting for its result")
        lock, waited = durable.lock_folder(folder / _LOCK, wait=True), True
    record = {**fingerprint, "files": lineage.code_files()}
    if not waited and checkpoints.last_step(folder) is None:
        _list_others(stage, folder, record)
    jsonl.write_json(folder / _RECORD, record)
    try:
        yield WorkFolder(stage, folder, waited)
    except BaseException:
        if _is_empty(folder):
            durable.discard(folder)
        raise
    else:
        durable.discard(folder)
    finally:
        lock.release()


def fingerprint_in(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the work in a folder; None where none is recorded."""
    path = folder / _RECORD
    return jsonl.read_json(path) if path.is_file() else None


def _made_by(outputs: Iterable[Path]) -> str:
    return lineage.value_digest([lineage.read(path) for path in outputs])


def _is_empty(folder: Path) -> bool:
    """Whether the stage has written nothing yet."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return all(path.suffix == ".lock" or path.name == _RECORD for path in files)


def _list_others(stage: str, folder: Path, fingerprint: Fingerprint) -> None:
    """List the longest other unfinished work of the stage that no run is using, and how it differs."""
    steps = {other: checkpoints.last_step(other) for other in folder.parent.glob("[!.]*/")}
    others = sorted((step, other) for other, step in steps.items() if step is not None)
    idle = [(step, other) for step, other in others if not durable.is_locked(other / _LOCK)]
    for step, other in idle[: -_NUM_LISTED - 1 : -1]:
        before = None
        with suppress(PipelineError):  # damaged
            before = fingerprint_in(other)
        differences = lineage.differences(stage, before, fingerprint)
        say(stage, f"{other}: unfinished work after step {step} is not resumed: {differences}")
    if idle:
        say(
            stage,
            "this run starts at the first step; to resume unfinished work, undo the difference and run again; "
            "to discard it, delete its folder",
        )


def _copy(folder: Path, target: Path) -> None:
    """Copy every file; unlike shutil.copytree this raises the system's own error."""
    for path in sorted(folder.rglob("*")):
        copy = target / path.relative_to(folder)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, copy)
