"""Numbered checkpoints in a folder: whatever moment a run is killed at, what is found is whole.

One process writes and any number read. A checkpoint is filled aside, sealed by a manifest of its files and their
digests, synced and renamed; one that is not wanted any more is renamed before it is removed.
"""

import errno
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared import durable, jsonl, lineage, system_errors
from components.shared.errors import PipelineError
from components.shared.lineage import Fingerprint, differences
from components.shared.progress import say

FOLDER = "checkpoints"
"""Where a stage keeps them in its folder of unfinished work."""
_FORMAT = 2
_MANIFEST = "manifest.json"
_LOCK = "writer.lock"
_NAME = re.compile(r"step-(\d{6,})")
Listing = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was whole when it was looked for."""

    step: int
    folder: Path
    score: float | None


def latest(folder: Path, *, stage: str, fingerprint: Fingerprint | None = None) -> Checkpoint | None:
    """Return the newest whole checkpoint, or None where there is none at all.

    One that is torn or damaged is passed over with a line said; a PipelineError where that leaves none, or where the
    checkpoint is of a run that is not `fingerprint` the same.
    """
    stored = _stored(folder)
    for step in sorted(stored, reverse=True):
        fault = _fault(stored[step])
        if fault is None:
            manifest = _manifest(stored[step])
            _refuse_foreign(stored[step], manifest["fingerprint"], fingerprint, stage)
            return Checkpoint(step, stored[step], manifest["score"])
        say(stage, f"{fault}; this checkpoint is passed over")
    if stored:
        raise PipelineError(
            f"{folder}: none of the checkpoints is whole, as said above; put a copy of one back, "
            "or remove them all to begin again at the first step"
        )
    return None


def last_step(work: Path) -> int | None:
    """Return the step of the newest checkpoint, whole or not, in a folder of unfinished work; None without any."""
    return max((step for folder in work.glob("*/") for step in _stored(folder)), default=None)


class Writer:
    """The one process that writes checkpoints into a folder; a RetryableError for a second one.

    Keeps the last `keep_last` checkpoints and, with `keep_best`, the one with the highest score, of equals the later.
    Each holds what the run is `fingerprint`.
    """

    def __init__(
        self, folder: Path, *, keep_last: int, keep_best: bool, fingerprint: Fingerprint | None = None
    ) -> None:
        assert keep_last > 0
        self._fingerprint = fingerprint
        self._folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._lock = durable.lock_folder(folder / _LOCK)  # let go with this object
        for left in folder.glob(".step-*"):
            durable.remove(left)

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None) -> None:
        """Keep what `write` puts into the folder it is given as the checkpoint of `step`.

        The earlier ones stay until this one stands. A step that is there already, whole, is not written again: equal
        runs have equal states. Checkpoints of later steps, which the run did not go on from, are removed.
        """
        assert score is None or math.isfinite(score)
        target = self._folder / _name(step)
        if target.exists() and _fault(target):
            durable.discard(target)
        if not target.exists():
            made = {"format": _FORMAT, "step": step, "score": score, "fingerprint": self._fingerprint}
            self._write(target, write, made)
        self._thin_out(step)

    def _write(self, target: Path, write: Callable[[Path], None], manifest: dict[str, Any]) -> None:
        partial = target.with_name(f".{target.name}.partial")
        try:
            partial.mkdir()
            write(partial)
            content = {**manifest, "files": _listing(partial)}
            jsonl.write_json(partial / _MANIFEST, {"content": content, "digest": lineage.value_digest(content)})
            durable.sync_tree(partial)
            partial.rename(target)
            durable.sync(self._folder)
        except Exception as error:
            number = system_errors.errno_of(error)
            if number not in system_errors.NO_ROOM:
                raise
            raise PipelineError(f"{target}: {self._room(number, partial)}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _room(self, number: int, partial: Path) -> str:
        """Remove what was written and say how much room there is then, and how much it takes."""
        needed = max(map(durable.size, (partial, *_stored(self._folder).values())))
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(self._folder).free
        return (
            f"{os.strerror(number).lower()}: the checkpoint takes {needed:,} bytes or more, {free:,} are free; "
            "the earlier checkpoints are whole: make room and run again"
        )

    def _thin_out(self, newest: int) -> None:
        """Remove every checkpoint that is not to be kept, now that the one of step `newest` stands."""
        stored = _stored(self._folder)
        past = {step: folder for step, folder in stored.items() if step <= newest}
        kept = set(sorted(past)[-self._keep_last :])
        if self._keep_best:
            scores = [(score, step) for step, folder in past.items() if (score := _score(folder)) is not None]
            kept |= {step for _, step in sorted(scores)[-1:]}
        for step in sorted(stored.keys() - kept):
            durable.discard(stored[step])


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _stored(folder: Path) -> dict[int, Path]:
    """The folder of each step, whole or not."""
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("step-*"))
    return {int(match[1]): path for path, match in named if match}


def _score(folder: Path) -> float | None:
    """The score of a checkpoint; None also where it cannot be read."""
    try:
        score: float | None = _manifest(folder)["score"]
    except PipelineError:
        return None
    return score


def _refuse_foreign(folder: Path, made: Fingerprint | None, fingerprint: Fingerprint | None, stage: str) -> None:
    """Raise PipelineError for a whole checkpoint that was put among those of another run."""
    if fingerprint is None or made == fingerprint:
        return
    why = "which is not known" if made is None else differences(stage, made, fingerprint)
    raise PipelineError(
        f"{folder}: is a checkpoint of another run, made from something else: {why}; move it out of this folder"
    )


def _fault(folder: Path) -> str | None:
    """What a checkpoint has that is not as it was written; None for a whole one."""
    try:
        manifest = _manifest(folder)
    except PipelineError as error:
        return str(error)
    if manifest["format"] != _FORMAT:
        return f"{folder}: is in format {manifest['format']}, where {_FORMAT} is read"
    if folder.name != _name(manifest["step"]):
        return f"{folder}: is the checkpoint of step {manifest['step']} under another name"
    written, there = manifest["files"], _listing(folder)
    differing = [name for name in sorted(written.keys() | there.keys()) if written.get(name) != there.get(name)]
    if differing:
        name = differing[0]
        return f"{folder / name}: {_difference(written.get(name), there.get(name))}"
    return None


def _difference(written: dict[str, Any] | None, there: dict[str, Any] | None) -> str:
    if there is None:
        return os.strerror(errno.ENOENT).lower()
    if written is None:
        return "is no file of this checkpoint"
    if there["size"] != written["size"]:
        return f"has {there['size']:,} of {written['size']:,} bytes"
    return "is damaged: its SHA-256 is not that of what was written"


def _manifest(folder: Path) -> dict[str, Any]:
    """The sealed manifest of a checkpoint; a PipelineError where it is missing or not as it was written."""
    if not folder.is_dir():
        raise PipelineError(f"{folder}: is no folder")
    path = folder / _MANIFEST
    sealed = jsonl.read_json(path)
    if not isinstance(sealed, dict) or sealed.get("digest") != lineage.value_digest(sealed.get("content")):
        raise PipelineError(f"{path}: is damaged: its digest is not that of its content")
    content: dict[str, Any] = sealed["content"]
    return content


def _listing(folder: Path) -> Listing:
    """Size in bytes and SHA-256 of each file of a checkpoint."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / _MANIFEST)
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": lineage.file_digest(path)}
        for path in files
    }
