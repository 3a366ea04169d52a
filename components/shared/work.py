"""A stage's folder of unfinished work: identified by its fingerprint, used by one run at a time.

<root>/<stage>/<key>/      folder of an unfinished run, with `fingerprint.json` and its lineage so far
<root>/<stage>/<key>.json  outputs of finished runs (components/shared/results.py)

The folder has numbered checkpoints, written by one process and read by any number. A checkpoint is written to a hidden
folder, sealed by a manifest of its files and their digests, synced and renamed; one that is no longer needed is renamed
before it is removed. So every checkpoint with its final name is complete, even after a kill.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError, raise_if_disk_is_full
from components.shared.journal import run_name
from components.shared.lineage import Fingerprint
from components.shared.live import LIVE, base_name, name_in
from components.shared.progress import say

_LOCK, _RECORD = "run.lock", "fingerprint.json"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, in the folder of unfinished work."""
EXPORT, MODEL = "export", "model"
"""Folder of a checkpoint for readers other than the run, with `metrics.json`, and the folder of the model in it."""
_MANIFEST, _WRITER_LOCK = "manifest.json", "writer.lock"
_ADMINISTRATIVE = {_LOCK, _WRITER_LOCK, _RECORD, lineage.FILE_NAME}
"""Files that do not count as work to resume: a folder with no others can be removed."""


class OvertakenError(Exception):
    """While this run had not locked the folder, another run began or finished the same work."""


class WorkFolder:
    """A folder of unfinished work, locked by this run except while it waits in a queue."""

    def __init__(self, stage: str, folder: Path, owner: str) -> None:
        self.stage, self.folder, self._owner = stage, folder, owner
        self.has_waited = False
        """Whether this run had to wait for another run of the same work."""
        try:
            self._lock = durable.lock_folder(folder / _LOCK, owner=owner)
        except durable.InUseError as error:
            say(stage, f"waiting for the result of {error.owner}, which does the same work in {folder}")
            self._lock = durable.lock_folder(folder / _LOCK, wait=True, owner=owner)
            self.has_waited = True
        self._state = self._current_state()
        self.begin: Callable[[], None] = lambda: None
        """Writes the run's name into the folder; called after each lock, as another run may have written its name."""

    @property
    def is_locked(self) -> bool:
        """Whether this run has locked the folder."""
        return self._lock.is_locked

    def unlock(self) -> None:
        """Release the folder for other runs."""
        self._lock.release()

    def lock_again(self) -> bool:
        """Lock the folder after `unlock`; return False if another run has it."""
        try:
            self._lock = durable.lock_folder(self.folder / _LOCK, owner=self._owner)
        except durable.InUseError:
            return False
        self.require_unchanged()
        self.begin()
        return True

    def require_unchanged(self) -> None:
        """Raise OvertakenError if another run has finished the work or removed the folder since `unlock`."""
        if self._current_state() != self._state:
            self.unlock()
            raise OvertakenError

    def _current_state(self) -> tuple[int, bytes]:
        """Return a value that changes if another run removes the folder (inode) or records a result (its file)."""
        record = self.folder.with_suffix(".json")
        with suppress(FileNotFoundError):
            return self.folder.stat().st_ino, (record.read_bytes() if record.exists() else b"")
        return 0, b""


def work_folder(root: Path, stage: str, fingerprint: Fingerprint) -> Path:
    """Return the folder for unfinished work with a fingerprint."""
    work = {key: fingerprint[key] for key in ("config", "inputs", "code")}
    return root / stage / lineage.value_digest(work)[:16]


@contextmanager
def locked_work(root: Path, stage: str, fingerprint: Fingerprint, owner: str = "") -> Iterator[WorkFolder]:
    """Lock the folder of unfinished work, after waiting for other runs; remove it unless there is work to resume."""
    for leftover in (root / stage).glob(".*.removed"):
        durable.remove(leftover)
    folder = work_folder(root, stage, fingerprint)
    work = WorkFolder(stage, folder, owner)
    if not work.has_waited and last_step(folder) is None:
        _describe_others(stage, folder, fingerprint)
    jsonl.write_json(folder / _RECORD, fingerprint)
    token = _current.set(work)
    try:
        yield work
    except BaseException:
        if work.is_locked:
            files = [path for path in folder.rglob("*") if path.is_file() and folder / LIVE not in path.parents]
            if {path.name for path in files} <= _ADMINISTRATIVE:
                durable.discard(folder)
        raise
    else:
        durable.discard(folder)
    finally:
        _current.reset(token)
        work.unlock()
        with suppress(OSError):  # it is not empty
            folder.parent.rmdir()


_current: ContextVar[WorkFolder | None] = ContextVar("work", default=None)


def current_work() -> WorkFolder | None:
    """Return the folder of unfinished work inside a `locked_work` block, otherwise None."""
    return _current.get()


def is_in_use(folder: Path) -> bool:
    """Return whether a run is using a folder of unfinished work."""
    return durable.is_locked(folder / _LOCK)


@contextmanager
def reserved(folder: Path) -> Iterator[bool]:
    """Take all locks of a folder of unfinished work during the block; yield False if a run or a rank has one."""
    with ExitStack() as locks:
        is_free = True
        try:
            locks.callback(durable.lock_folder(folder / _LOCK).release)
            others = [path for path, _ in durable.walk(folder) if path.suffix == ".lock" and path.name != _LOCK]
            for path in others:
                locks.callback(durable.lock_folder(path).release)
        except durable.InUseError:
            is_free = False
        yield is_free


def fingerprint_in(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the work in a folder; None if it cannot be read."""
    fingerprint: Fingerprint | None = None
    with suppress(PipelineError):
        fingerprint = jsonl.read_json(folder / _RECORD)
    return fingerprint


def _describe_others(stage: str, folder: Path, fingerprint: Fingerprint) -> None:
    """Print which unfinished work of the same name and data is not resumed, and how it differs.

    Work that is in use does not count. On Kubeflow, names are not compared: even a clone of a run has another name.
    """
    this_name = run_name()
    for other in sorted(folder.parent.glob("[!.]*/")):
        with suppress(PipelineError):  # a file of another run may be half written
            step, known, name = last_step(other), fingerprint_in(other), name_in(other)
            has_same_data = known is not None and known["inputs"] == fingerprint["inputs"]
            may_be_same_run = not this_name or base_name(name) == base_name(this_name)
            if step is not None and has_same_data and may_be_same_run and not is_in_use(other):
                difference = lineage.differences(stage, known, fingerprint)
                say(stage, f"step {step} of {name or 'a run'} is not resumed: {difference}; its folder: {other}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files had the digests in its manifest when it was read."""

    step: int
    folder: Path
    score: float | None
    fingerprint: Fingerprint | None = None
    """Fingerprint of the run that wrote it, if it has one."""


def latest_checkpoint(folder: Path, *, stage: str, fingerprint: Fingerprint | None = None) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, if any; PipelineError if all are damaged, or it is of another run."""
    folders = _step_folders(folder)
    latest = _first_undamaged([folders[step] for step in sorted(folders, reverse=True)], stage)
    if latest is None and folders:
        raise PipelineError(
            f"{folder}: every checkpoint is damaged (see above); restore one from a copy, "
            "or remove them all to start again from the first step"
        )
    if latest and fingerprint is not None and latest.fingerprint != fingerprint:
        differences = lineage.differences(stage, latest.fingerprint, fingerprint)
        raise PipelineError(
            f"{latest.folder}: is a checkpoint of another run ({differences}); move it out of this folder"
        )
    return latest


def best_checkpoint(folder: Path, *, stage: str) -> Checkpoint | None:
    """Return the undamaged checkpoint with the highest score, on ties the earliest; None if none has a score."""
    folders = _step_folders(folder)
    return _first_undamaged([folders[step] for step in _best_first(folders)], stage)


def _first_undamaged(folders: Iterable[Path], stage: str) -> Checkpoint | None:
    """Return the first undamaged checkpoint, or None; report each damaged one before it."""
    for folder in folders:
        try:
            manifest = _verified_manifest(folder)
        except PipelineError as error:
            say(stage, f"{error}; this checkpoint is skipped")
        else:
            return Checkpoint(manifest["step"], folder, manifest["score"], manifest["fingerprint"])
    return None


def _best_first(folders: Mapping[int, Path]) -> list[int]:
    """Return the steps of the checkpoints with a readable score, the best first, on ties the earliest."""
    scores: dict[int, float] = {}
    for step, folder in folders.items():
        with suppress(PipelineError):  # its manifest is damaged
            score = _manifest(folder)["score"]
            if score is not None:
                scores[step] = score
    return sorted(scores, key=lambda step: (-scores[step], step))


@dataclass(frozen=True)
class Export:
    """The exported model of a checkpoint."""

    step: int
    folder: Path
    """Folder of the model, which the run may remove at any time."""
    metrics: dict[str, Any]
    digests: dict[str, str]
    """SHA-256 of each file of the model, by its path in the folder."""


def newest_export(work: Path, *, after: int = 0) -> Export | None:
    """Return the newest exported model of a step above `after` in a folder of unfinished work, or None."""
    folders = _step_folders(work / CHECKPOINTS)
    prefix = f"{EXPORT}/{MODEL}/"
    for step in sorted((step for step in folders if step > after), reverse=True):
        with suppress(PipelineError):  # damaged, or removed meanwhile
            files = _manifest(folders[step])["files"]
            digests = {path.removeprefix(prefix): files[path] for path in files if path.startswith(prefix)}
            if digests:
                export = folders[step] / EXPORT
                return Export(step, export / MODEL, jsonl.read_json(export / "metrics.json"), digests)
    return None


def last_step(work: Path) -> int | None:
    """Return the step of the newest checkpoint, damaged or not, in a folder of unfinished work; None without one."""
    return max((step for folder in work.glob("*/") for step in _step_folders(folder)), default=None)


class CheckpointWriter:
    """Writes checkpoints, each with the run's `fingerprint`, into a folder; InUseError for a second writer.

    Keeps the last `keep_last` checkpoints and, with `keep_best`, the one with the highest score (on ties the first).
    """

    def __init__(
        self, folder: Path, *, keep_last: int, keep_best: bool, fingerprint: Fingerprint | None = None
    ) -> None:
        self._folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._fingerprint = fingerprint
        self._lock = durable.lock_folder(folder / _WRITER_LOCK)  # released with this object
        for leftover in folder.glob(".step-*"):
            durable.remove(leftover)

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None) -> None:
        """Store the files that `write` puts into a folder as the checkpoint of `step`.

        Earlier checkpoints stay until this one is complete. An undamaged checkpoint of the same step is not written
        again: equal runs have equal states. Checkpoints of later steps, which the run did not resume from, are removed.
        """
        assert score is None or math.isfinite(score)
        target = self._folder / f"step-{step:06d}"
        try:
            _verified_manifest(target)
        except PipelineError:
            if target.exists():
                durable.discard(target)
            self._write(target, write, {"step": step, "score": score, "fingerprint": self._fingerprint})
        self._prune(step)

    def _write(self, target: Path, write: Callable[[Path], None], manifest: dict[str, Any]) -> None:
        partial = target.with_name(f".{target.name}.partial")
        try:
            partial.mkdir()
            write(partial)
            content = {**manifest, "files": lineage.file_digests(partial)}
            jsonl.write_json(partial / _MANIFEST, {"content": content, "digest": lineage.value_digest(content)})
            durable.sync_tree(partial)
            durable.replace(target, partial)
        except Exception as error:
            needed = max(map(durable.size, (partial, *_step_folders(self._folder).values())))
            durable.remove(partial)  # before the free space for the message is measured
            usage = f"the earlier checkpoints are complete, this one takes {needed:,} bytes or more"
            raise_if_disk_is_full(error, target, usage)
            raise
        finally:
            durable.remove(partial)

    def _prune(self, newest: int) -> None:
        """Remove all checkpoints but those to keep, now that the one of step `newest` is complete."""
        folders = _step_folders(self._folder)
        past = {step: folders[step] for step in sorted(folders) if step <= newest}
        keep = list(past)[-self._keep_last :]
        if self._keep_best:
            keep += _best_first(past)[:1]
        for step in sorted(folders.keys() - keep):
            durable.discard(folders[step])


def _step_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of the checkpoints in a folder, by step."""
    named = ((path, re.fullmatch(r"step-(\d{6,})", path.name)) for path in folder.glob("step-*"))
    return {int(match[1]): path for path, match in named if match}


def _verified_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; PipelineError if one of its files is damaged, missing or unknown."""
    manifest = _manifest(folder)
    if int(folder.name.removeprefix("step-")) != manifest["step"]:
        raise PipelineError(f"{folder}: is the checkpoint of step {manifest['step']} under another name")
    expected, actual = manifest["files"], lineage.file_digests(folder)
    del actual[_MANIFEST]
    for name in sorted({**expected, **actual}):
        if name not in expected:
            raise PipelineError(f"{folder / name}: is no file of this checkpoint")
        if name not in actual:
            raise PipelineError(f"{folder / name}: is missing")
        if actual[name] != expected[name]:
            raise PipelineError(f"{folder / name}: differs from its SHA-256 in the manifest")
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without a look at its files; PipelineError if it is damaged itself."""
    path = folder / _MANIFEST
    sealed = jsonl.read_json(path)
    if not isinstance(sealed, dict) or sealed.get("digest") != lineage.value_digest(sealed.get("content")):
        raise PipelineError(f"{path}: is damaged: its digest is not that of its content")
    content: dict[str, Any] = sealed["content"]
    return content
