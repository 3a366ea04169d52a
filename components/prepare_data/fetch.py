"""Fetch the raw files behind the DVC pointers: what `grpo-pipeline data --source DIR` does."""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from components.shared.errors import PipelineError
from components.shared.progress import say

_RAW = Path("data/raw")
_REMOTE = Path("outputs/dvc-remote")
"""The DVC remote `local` of .dvc/config: a plain folder."""
_CACHE = Path(".dvc/cache")


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a `.dvc` file says of the file beside it."""

    path: Path
    target: Path
    md5: str

    @property
    def stored(self) -> Path:
        """Where the remote keeps the file's content."""
        return _REMOTE / "files" / "md5" / self.md5[:2] / self.md5[2:]

    @property
    def cached(self) -> Path:
        """Where DVC keeps a copy of that for this folder."""
        return _CACHE / "files" / "md5" / self.md5[:2] / self.md5[2:]


def fetch(source: Path) -> None:
    """Have every raw file in place, byte for byte what its pointer says; takes what is missing from `source`."""
    pointers = read_pointers()
    missing = [pointer for pointer in pointers if not _is_there(pointer)]
    if not missing:
        say("data", f"{_RAW} is complete ({len(pointers)} files)")
        return
    for pointer in missing:
        # DVC would copy what is damaged as it is.
        if pointer.cached.is_file() and _md5(pointer.cached) != pointer.md5:
            pointer.cached.unlink()
        if not pointer.stored.is_file() or _md5(pointer.stored) != pointer.md5:
            _store(pointer, source)
    _pull(missing)
    say("data", f"{', '.join(pointer.target.name for pointer in missing)} now in {_RAW}")


def read_pointers() -> list[Pointer]:
    """Return the pointers to the raw files; PipelineError where there are none."""
    paths = sorted(_RAW.glob("*.dvc"))
    if not paths:
        raise PipelineError(f"{_RAW}: holds no DVC pointers; run this in the project's folder")
    return [_read_pointer(path) for path in paths]


def _read_pointer(path: Path) -> Pointer:
    try:
        out = yaml.safe_load(path.read_text(encoding="utf-8"))["outs"][0]
        return Pointer(path, path.parent / out["path"], out["md5"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, IndexError, TypeError):
        raise PipelineError(f"{path}: is no DVC pointer to one file; restore it with git") from None


def _is_there(pointer: Pointer) -> bool:
    if not pointer.target.is_file():
        return False
    found = _md5(pointer.target)
    if found != pointer.md5:
        # Never overwritten: it may be the only copy of somebody's work.
        raise PipelineError(f"{pointer.target}: has MD5 {found}, its pointer says {pointer.md5}; move the file away")
    return True


def _store(pointer: Pointer, source: Path) -> None:
    """Put a file of `source` into the remote if it is the one that the pointer means."""
    file = source / pointer.target.name
    damaged = (
        f"{pointer.stored}, the remote's copy of {pointer.target}, is damaged; " if pointer.stored.exists() else ""
    )
    if not file.is_file():
        raise PipelineError(
            f"{damaged}{file}: no such file; `make data SOURCE=DIR` needs a folder with {pointer.target.name} "
            "(data/README.md says where it comes from)"
        )
    found = _md5(file)
    if found != pointer.md5:
        raise PipelineError(f"{damaged}{file}: has MD5 {found}, but {pointer.path} says {pointer.md5}: another version")
    pointer.stored.parent.mkdir(parents=True, exist_ok=True)
    partial = pointer.stored.with_suffix(".partial")
    shutil.copyfile(file, partial)
    partial.rename(pointer.stored)


def _pull(pointers: list[Pointer]) -> None:
    command = [sys.executable, "-m", "dvc", "pull", "--remote", "local"]
    done = subprocess.run(
        [*command, *(str(pointer.path) for pointer in pointers)],
        env={**os.environ, "DVC_NO_ANALYTICS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise PipelineError(f"dvc pull failed: {reason.removeprefix('ERROR: ')}")
    for pointer in pointers:
        if not _is_there(pointer):
            raise PipelineError(f"{pointer.target}: dvc pull did not bring it; see `dvc status {pointer.path}`")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
