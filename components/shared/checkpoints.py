"""Numbered checkpoints in a folder: at whatever moment a run is killed, each one found is complete.

One process writes and any number read. A checkpoint is written to a hidden folder, sealed by a manifest of its files
and their digests, synced and renamed; one that is no longer needed is renamed before it is removed.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Fingerprint
from components.shared.progress import say
from components.shared.system_errors import full_disk

FOLDER = "checkpoints"
"""Where a stage keeps them in its folder of unfinished work."""
_MANIFEST = "manifest.json"
_LOCK = "writer.lock"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was complete when it was looked up."""

    step: int
    folder: Path
    score: float | None


def latest(folder: Path, *, stage: str, fingerprint: Fingerprint | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None where there is none at all.

    A damaged one is skipped with a line of output.

    Raises:
        PipelineError: All are damaged, or the checkpoint is of a run with another `fingerprint`.
    """
    stored = _stored(folder)
    for step in sorted(stored, reverse=True):
        try:
            manifest = _verified(stored[step])
        except PipelineError as error:
            say(stage, f"{error}; this checkpoint is skipped")
            continue
        if fingerprint is not None and manifest["fingerprint"] != fingerprint:
            differences = lineage.differences(stage, manifest["fingerprint"], fingerprint)
            raise PipelineError(
                f"{stored[step]}: is a checkpoint of another run ({differences}); move it out of this folder"
            )
        return Checkpoint(step, stored[step], manifest["score"])
    if stored:
        raise PipelineError(
            f"{folder}: every checkpoint is damaged (see above); put a copy of one back, "
            "or remove them all to start again from the first step"
        )
    return None


def last_step(work: Path) -> int | None:
    """Return the step of the newest checkpoint, complete or not, in a folder of unfinished work; None without any."""
    return max((step for folder in work.glob("*/") for step in _stored(folder)), default=None)


class Writer:
    """The one process that writes checkpoints into a folder; InUseError for a second one.

    Keeps the last `keep_last` checkpoints and, with `keep_best`, the one with the highest score (of equals the later).
    Each records the run's `fingerprint`.
    """

    def __init__(
        self, folder: Path, *, keep_last: int, keep_best: bool, fingerprint: Fingerprint | None = None
    ) -> None:
        self._folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._fingerprint = fingerprint
        self._lock = durable.lock_folder(folder / _LOCK)  # released with this object
        for leftover in folder.glob(".step-*"):
            durable.remove(leftover)

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None) -> None:
        """Store what `write` puts into its folder as the checkpoint of `step`.

        Earlier ones stay until this one is complete. A complete checkpoint of the same step is not written again:
        equal runs have equal states. Checkpoints of later steps, which the run did not resume from, are removed.
        """
        assert score is None or math.isfinite(score)
        target = self._folder / f"step-{step:06d}"
        try:
            _verified(target)
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
            content = {**manifest, "files": _digests(partial)}
            jsonl.write_json(partial / _MANIFEST, {"content": content, "digest": lineage.value_digest(content)})
            durable.sync_tree(partial)
            durable.replace(target, partial)
        except Exception as error:
            needed = max(map(durable.size, (partial, *_stored(self._folder).values())))
            durable.remove(partial)
            message = full_disk(error, target, f"the checkpoint takes {needed:,} bytes or more")
            if message is None:
                raise
            raise PipelineError(f"{message}; the earlier checkpoints are complete") from error
        finally:
            durable.remove(partial)

    def _prune(self, newest: int) -> None:
        """Remove every checkpoint that is not to be kept, now that the one of step `newest` is complete."""
        stored = _stored(self._folder)
        past = sorted(step for step in stored if step <= newest)
        keep = past[-self._keep_last :]
        if self._keep_best:
            scores: list[tuple[float, int]] = []
            for step in past:
                with suppress(PipelineError):  # one whose manifest is damaged is not the best
                    score = _manifest(stored[step])["score"]
                    scores += [] if score is None else [(score, step)]
            keep += [step for _, step in sorted(scores)[-1:]]
        for step in sorted(stored.keys() - keep):
            durable.discard(stored[step])


def _stored(folder: Path) -> dict[int, Path]:
    """The folder of each step, complete or not."""
    named = ((path, re.fullmatch(r"step-(\d{6,})", path.name)) for path in folder.glob("step-*"))
    return {int(match[1]): path for path, match in named if match}


def _verified(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; PipelineError unless every file is as it was written."""
    manifest = _manifest(folder)
    if int(folder.name.removeprefix("step-")) != manifest["step"]:
        raise PipelineError(f"{folder}: is the checkpoint of step {manifest['step']} under another name")
    written, stored = manifest["files"], _digests(folder)
    for name in sorted({**written, **stored}):
        if name not in stored:
            raise PipelineError(f"{folder / name}: no such file")
        if name not in written:
            raise PipelineError(f"{folder / name}: is not a file of this checkpoint")
        if stored[name] != written[name]:
            raise PipelineError(f"{folder / name}: is damaged: its SHA-256 is not that of what was written")
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    """The sealed manifest of a checkpoint; PipelineError where it is missing or damaged."""
    path = folder / _MANIFEST
    sealed = jsonl.read_json(path)
    if not isinstance(sealed, dict) or sealed.get("digest") != lineage.value_digest(sealed.get("content")):
        raise PipelineError(f"{path}: is damaged: its digest is not that of its content")
    content: dict[str, Any] = sealed["content"]
    return content


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / _MANIFEST)
    return {path.relative_to(folder).as_posix(): lineage.file_digest(path) for path in files}
