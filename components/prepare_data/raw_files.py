"""Raw files: fetched for this machine behind their DVC pointers, or read from a git and DVC repository at a commit."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from components.prepare_data.config import DataRepository, PrepareConfig
from components.shared.errors import PipelineError
from components.shared.progress import say
from components.shared.versioning import Workspace

_RAW = Path("data/raw")
_REMOTE = Path("outputs/dvc-remote")
"""The DVC remote `local` of .dvc/config: a plain folder."""
_CACHE = Path(".dvc/cache")


@contextmanager
def raw_folder(config: PrepareConfig) -> Iterator[Path]:
    """Yield the folder to which the paths of the sources are relative; files of a repository are removed afterwards.

    Raises:
        PipelineError: The repository, its commit, a file at that commit or the content of a DVC pointer is missing.
    """
    repository = config.repository
    if repository is None:
        yield Path()
        return
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-data-") as scratch:
        workspace = Workspace(Path(scratch), Path(scratch))
        clone, files = workspace.folder / "clone", workspace.folder / "files"
        workspace.git("clone", "--quiet", "--no-checkout", "--no-local", repository.url, str(clone))
        if workspace.try_git("-C", str(clone), "cat-file", "-e", f"{repository.commit}^{{commit}}") is None:
            raise PipelineError(f"prepare_data.repository: {repository.url} has no commit {repository.commit}")
        for path in dict.fromkeys(config.files):
            _copy_from(clone, workspace, path, repository, files / path)
        say("prepare_data", f"{len(config.files)} files from {repository.url} at {repository.commit[:12]}")
        yield files


def _copy_from(clone: Path, workspace: Workspace, path: Path, repository: DataRepository, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        workspace.dvc_get(str(clone), path.as_posix(), repository.commit, target)
    except PipelineError as error:
        reason = str(error).removeprefix("dvc: ")
        raise type(error)(f"cannot read {path} from {repository.url} at {repository.commit}: {reason}") from None


@dataclass(frozen=True, slots=True)
class Pointer:
    """The `.dvc` file of one raw file."""

    path: Path
    target: Path
    md5: str

    def object_in(self, store: Path) -> Path:
        """The path of the file's content in DVC's cache or in a remote."""
        return store / "files" / "md5" / self.md5[:2] / self.md5[2:]


def fetch_raw_files(source: Path) -> None:
    """Put every raw file in its place, byte for byte as its pointer says; missing ones are copied from `source`."""
    pointers = read_pointers()
    missing = [pointer for pointer in pointers if not _is_present(pointer)]
    if not missing:
        say("data", f"{_RAW} is complete ({len(pointers)} files)")
        return
    for pointer in missing:
        # DVC would copy a damaged object without a check.
        cached, stored = pointer.object_in(_CACHE), pointer.object_in(_REMOTE)
        if cached.is_file() and _md5(cached) != pointer.md5:
            cached.unlink()
        if not stored.is_file() or _md5(stored) != pointer.md5:
            _store(pointer, source)
    # If there is no home, DVC keeps its temporary files next to the remote.
    Workspace(Path(), _REMOTE.parent).dvc("pull", "--remote", "local", *(str(pointer.path) for pointer in missing))
    for pointer in missing:
        if not _is_present(pointer):
            raise PipelineError(f"{pointer.target}: still missing after dvc pull; see `dvc status {pointer.path}`")
    say("data", f"fetched {', '.join(pointer.target.name for pointer in missing)} into {_RAW}")


def read_pointers() -> list[Pointer]:
    """Return the pointers to the raw files; PipelineError if there are none."""
    paths = sorted(_RAW.glob("*.dvc"))
    if not paths:
        raise PipelineError(f"{_RAW}: contains no DVC pointers; run this in the project's folder")
    return [_read_pointer(path) for path in paths]


def _read_pointer(path: Path) -> Pointer:
    try:
        out = yaml.safe_load(path.read_text(encoding="utf-8"))["outs"][0]
        return Pointer(path, path.parent / out["path"], out["md5"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, IndexError, TypeError):
        raise PipelineError(f"{path}: not a DVC pointer to one file; restore it with git") from None


def _is_present(pointer: Pointer) -> bool:
    if not pointer.target.is_file():
        return False
    md5 = _md5(pointer.target)
    if md5 != pointer.md5:
        # Never overwritten: it may be the only copy of somebody's work.
        raise PipelineError(f"{pointer.target}: has MD5 {md5}, not {pointer.md5} as in its pointer; move it away")
    return True


def _store(pointer: Pointer, source: Path) -> None:
    """Copy a file from `source` into the remote, after a check that it is the one the pointer expects."""
    file, stored = source / pointer.target.name, pointer.object_in(_REMOTE)
    damage = f"{stored}, the remote's copy of {pointer.target}, is damaged; " if stored.exists() else ""
    if not file.is_file():
        raise PipelineError(
            f"{damage}{file}: no such file; `make data SOURCE=DIR` needs a folder with {pointer.target.name} "
            "(data/README.md says where to get it)"
        )
    md5 = _md5(file)
    if md5 != pointer.md5:
        raise PipelineError(
            f"{damage}{file}: has MD5 {md5}, but {pointer.path} expects {pointer.md5}; "
            "data/README.md says where to get that version"
        )
    stored.parent.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(".partial")
    shutil.copyfile(file, partial)
    partial.rename(stored)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
