"""Raw files: read from this machine, where DVC pointers identify them, or from a git and DVC repository at a commit."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from components.prepare_data.config import DataRepository, PrepareConfig
from components.shared.errors import PipelineError
from components.shared.progress import say
from components.shared.versioning import Workspace

_RAW = Path("data/raw")
_REMOTE = Path("dvc-storage")
"""The folder of the DVC remote `local` in .dvc/config."""
_CACHE = Path(".dvc/cache")
_WORKSPACE = Workspace(Path(), Path(".dvc/tmp"))
"""The checkout of this project, with a scratch folder that is DVC's home if the process has none."""


class RawFolder(NamedTuple):
    """Where the raw files of a run are."""

    path: Path
    """Folder that the paths of the sources are relative to."""
    md5s: dict[Path, str]
    """MD5 in the DVC pointer of each source that has one."""


@contextmanager
def raw_folder(config: PrepareConfig) -> Iterator[RawFolder]:
    """Yield the folder with the sources' files: the current one, or a temporary copy of the repository's files."""
    if config.repository:
        with tempfile.TemporaryDirectory(prefix="grpo-pipeline-data-") as scratch:
            yield _copy_from(config.repository, config, Workspace(Path(scratch), Path(scratch)))
        return
    md5s = {}
    for path in config.files:
        pointer = _pointer_path(path)
        md5 = _field(pointer.read_text("utf-8"), "md5") if pointer.is_file() else None
        # A file may have been changed after its pointer was made. The MD5 of a folder cannot be checked here.
        if md5 and (path.is_dir() or _md5(path) == md5):
            md5s[path] = md5
    yield RawFolder(Path(), md5s)


def _copy_from(repository: DataRepository, config: PrepareConfig, workspace: Workspace) -> RawFolder:
    """Copy the sources' files from a repository, except datasets on the hub; PipelineError if it lacks one of them."""
    url, commit = repository.url, repository.commit
    clone, files = workspace.folder / "clone", workspace.folder / "files"
    workspace.git("clone", "--quiet", "--no-checkout", "--no-local", "--", url, str(clone))
    if workspace.try_git("-C", str(clone), "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise PipelineError(f"prepare_data.repository: {url} has no commit {commit}")
    md5s: dict[Path, str] = {}
    num_files = 0
    for path in dict.fromkeys(config.files):
        pointer = workspace.try_git("-C", str(clone), "show", f"{commit}:{_pointer_path(path).as_posix()}")
        in_git = workspace.try_git("-C", str(clone), "ls-tree", commit, path.as_posix())
        if path in config.hub_ids and not pointer and not in_git:
            continue  # read from the hub
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            workspace.dvc_get(str(clone), path.as_posix(), commit, files / path)
        except PipelineError as error:
            reason = str(error).removeprefix("dvc: ")
            # Of the same type, as a RetryableError is retried.
            raise type(error)(f"cannot read {path} from {url} at {commit}: {reason}") from None
        num_files += 1
        if md5 := _field(pointer or "", "md5"):
            md5s[path] = md5
    say("prepare_data", f"{num_files} files from {url} at {commit[:12]}")
    return RawFolder(files, md5s)


def _pointer_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.dvc")


def _field(pointer: str, key: str, kind: Literal["outs", "deps"] = "outs") -> str | None:
    """Return a field of the file (`outs`) or of its origin (`deps`) in the text of a DVC pointer; None if missing."""
    try:
        return str(yaml.safe_load(pointer)[kind][0][key])
    except (yaml.YAMLError, KeyError, IndexError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Pointer:
    """The `.dvc` file of one raw file."""

    path: Path
    target: Path
    md5: str
    url: str | None
    """Address at which the file is published; None if the pointer has none."""

    def object_in(self, store: Path) -> Path:
        """Return the path of the file's content in DVC's cache or in a remote."""
        return store / "files" / "md5" / self.md5[:2] / self.md5[2:]


def fetch_raw_files(source: Path) -> None:
    """Fetch the missing raw files: from the local DVC remote, the folder `source`, or the address in their pointer.

    PipelineError if a file, present or published, differs from its pointer, or cannot be found.
    """
    pointers = read_pointers()
    missing = [pointer for pointer in pointers if not _is_present(pointer)]
    if not missing:
        say("data", f"{_RAW} is complete ({len(pointers)} files)")
        return
    for pointer in missing:
        # Remove or replace damaged objects first: DVC would copy them without a check.
        cached, stored = pointer.object_in(_CACHE), pointer.object_in(_REMOTE)
        if _md5(cached) != pointer.md5:
            cached.unlink(missing_ok=True)
        if _md5(stored) != pointer.md5:
            _store(pointer, source / pointer.target.name)
    _WORKSPACE.dvc("pull", "--remote", "local", *(str(pointer.path) for pointer in missing))
    for pointer in missing:
        if not _is_present(pointer):
            raise PipelineError(f"{pointer.target}: still missing after dvc pull; see `dvc status {pointer.path}`")
    say("data", f"fetched {', '.join(pointer.target.name for pointer in missing)} into {_RAW}")


def read_pointers() -> list[Pointer]:
    """Return the pointers to the raw files; PipelineError if there is none."""
    paths = sorted(_RAW.glob("*.dvc"))
    if not paths:
        raise PipelineError(f"{_RAW}: contains no DVC pointers; run this in the project's folder")
    pointers = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        name, md5 = _field(text, "path"), _field(text, "md5")
        if name is None or md5 is None:
            raise PipelineError(f"{path}: not a DVC pointer to one file; restore it with git")
        pointers.append(Pointer(path, path.parent / name, md5, _field(text, "path", "deps")))
    return pointers


def _is_present(pointer: Pointer) -> bool:
    """Tell whether the file of a pointer exists; PipelineError if it has other content."""
    md5 = _md5(pointer.target)
    if md5 not in {None, pointer.md5}:
        # Do not overwrite it: it may be the only copy of somebody's work.
        raise PipelineError(f"{pointer.target}: has MD5 {md5}, not {pointer.md5} as in its pointer; move it away")
    return md5 is not None


def _store(pointer: Pointer, file: Path) -> None:
    """Copy the content of a pointer into the remote, from `file` if it has the right MD5, or from its address."""
    stored = pointer.object_in(_REMOTE)
    stored.parent.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    problem = f"{stored}, the remote's copy of {pointer.target}, and {file} are no file with MD5 {pointer.md5}"
    if _md5(file) == pointer.md5:
        shutil.copyfile(file, partial)
    elif pointer.url:
        try:
            _WORKSPACE.dvc("get-url", pointer.url, str(partial))
            problem += f"; {pointer.url} has other content now"
        except PipelineError as error:
            problem += f"; {pointer.url} cannot be read ({error})"
    if _md5(partial) != pointer.md5:
        partial.unlink(missing_ok=True)
        advice = "run `make data SOURCE=DIR` with a folder that has it (data/README.md says where to get it)"
        raise PipelineError(f"{problem}; {advice}")
    partial.rename(stored)


def _md5(path: Path) -> str | None:
    """Return the MD5 of a file; None if there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
