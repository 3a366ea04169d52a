"""The registry: a git repository whose tags are versions of models, with the weights in a DVC remote.

A version is made in a clone and becomes one by a single push of its commit and its tag. Whatever is killed before
leaves a clone that the next run throws away; whatever is killed after finds the version already there.
"""

import configparser
import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.workspace import Workspace

POLICY = "policy"
"""Where a version keeps its weights, relative to the registry."""
VERSION_FILE = "version.json"
_REMOTE = "storage"
_VIEW = "grpo-pipeline.view"
"""Set in the git config of registries made here: their working tree is ours to put back."""
_HELD_BY_OTHERS = re.compile("cannot lock ref|failed to update ref|incorrect old value")
"""What git says where two pushes meet on the server, and also where a lock is stale."""
_HELD_PAUSES_S = (0.2, 1.0, 5.0)
"""Between pushes that a lock on the server refuses."""
_README_FILE = "README.md"
_README = """# Model registry

Every tag `<name>@v<version>` is a registered version: its weights (`policy.dvc` points to them), model card, report,
verdict and lineage. List the versions with `gto show`, fetch one with
`dvc artifacts get <this repository> <name> --rev v<version>`. The working tree is only a view of the newest version.
"""


@dataclass(frozen=True)
class Registry:
    """A clone of the registry in which the next version is made."""

    location: str
    clone: Workspace
    source: str
    """Where the clone is from: the location as git is told of it."""
    storage: str | None
    """The storage that was asked for; None for the one that the registry has."""

    def versions(self, name: str) -> list[tuple[int, int, int]]:
        """Every version of a model, oldest first, also those withdrawn since: no number is given twice."""
        tags = self.clone.git("tag", "--list", f"{name}@v*").split()
        numbers = (re.match(rf"{name}@v(\d+)\.(\d+)\.(\d+)(?![\w.-])", tag) for tag in tags)
        return sorted({(int(match[1]), int(match[2]), int(match[3])) for match in numbers if match})

    def find(self, name: str, policy_digest: str) -> dict[str, Any] | None:
        """Return version.json of the registered version with these weights; None where there is none."""
        for numbers in reversed(self.versions(name)):
            tag = f"{name}@{_text(numbers)}"
            if self.clone.git("tag", "--list", f"{tag}!*"):  # withdrawn
                continue
            version: dict[str, Any] = json.loads(self.read(tag, VERSION_FILE))
            if version["policy_digest"] == policy_digest:
                return version
        return None

    def next_version(self, name: str) -> str:
        """The version that comes after all others."""
        versions = self.versions(name)
        if not versions:
            return "v0.0.1"
        major, minor, patch = versions[-1]
        return _text((major, minor, patch + 1))

    def read(self, tag: str, path: str) -> str:
        """Return a text file as it was registered."""
        return self.clone.git("show", f"refs/tags/{tag}:{path}")

    def pipeline_commit(self, tag: str) -> str:
        """The commit of the pipeline's code that registered a version."""
        commit = self.clone.git("log", "-1", "--format=%(trailers:key=Pipeline-Commit,valueonly)", f"refs/tags/{tag}")
        return commit.strip()

    def storage_url(self) -> str:
        """Where the weights are stored, as the registry has it."""
        path = self.clone.folder / ".dvc" / "config"
        config = configparser.ConfigParser(interpolation=None)
        config.read_string(path.read_text("utf-8"))
        try:
            return config[f"'remote \"{_REMOTE}\"'"]["url"]
        except KeyError:
            raise PipelineError(f"{self.location}: .dvc/config there has no remote named `{_REMOTE}`") from None

    def store(self, policy: Path) -> str:
        """Copy the weights into the storage and return the pointer to them."""
        copy, cache = self.clone.folder / POLICY, self.clone.folder / ".dvc" / "cache"
        shutil.copytree(policy, copy)
        try:
            self.clone.dvc("add", POLICY)
            self.clone.dvc("push", f"{POLICY}.dvc")
        except PipelineError as error:
            reason = str(error).removeprefix("dvc: ")
            raise type(error)(f"{self.known_storage()}: the weights cannot be stored there: {reason}") from None
        # Weights are large, and from here on it must be the storage that gives them back.
        for folder in (copy, cache):
            shutil.rmtree(folder)
        return (self.clone.folder / f"{POLICY}.dvc").read_text(encoding="utf-8")

    def commit(self, name: str, files: Mapping[str, str | Path], message: str) -> None:
        """Commit the pointer and the files of a version; nothing is visible to anyone yet."""
        artifacts = {"artifacts": {name: {"path": POLICY, "type": "model", "desc": "policy trained with GRPO"}}}
        texts = {_README_FILE: _README, ".gitignore": f"/{POLICY}\n", "dvc.yaml": yaml.safe_dump(artifacts)}
        for path, content in {**texts, **files}.items():
            target = self.clone.folder / path
            if path == _README_FILE and target.exists():
                continue  # it may be somebody's own by now
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_text(content, encoding="utf-8")
        self.clone.git("add", "--all")
        # The same version may be committed without its tag, if the push was killed between the two.
        if self.clone.git("status", "--porcelain"):
            self.clone.git("commit", "--quiet", "--message", message)

    def publish(self, name: str, version: str) -> bool:
        """Tag the commit with GTO and push both at once: from here on the version is registered.

        False where others have changed the registry since it was read: see `catch_up`. PipelineError where it refuses.
        """
        self.clone.gto("register", name, "HEAD", "--version", version)
        branch, tag = f"refs/heads/{self._branch}", f"refs/tags/{name}@{version}"
        for pause_s in (*_HELD_PAUSES_S, None):
            try:
                self.clone.git("push", "--quiet", "--atomic", "origin", f"HEAD:{branch}", tag)
            except PipelineError as error:
                if self._has_moved(branch, tag):
                    return False
                is_held = _HELD_BY_OTHERS.search(str(error)) is not None
                if not is_held or pause_s is None:
                    kind = RetryableError if is_held else type(error)
                    raise kind(f"{self.location}: does not take {name}@{version}: {error}") from None
                time.sleep(pause_s)
            else:
                return True
        raise AssertionError("the last attempt returns or raises")

    def catch_up(self) -> None:
        """Put the clone to what the registry is now, without what was committed and tagged here in vain."""
        refs = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        self.clone.git("fetch", "--quiet", "--prune", "origin", *refs)
        if self._seen() is not None:
            self.clone.git("reset", "--quiet", "--hard", f"refs/remotes/origin/{self._branch}")
        self.configure()

    def configure(self) -> None:
        """Have DVC's config in the clone, and check that the storage is the registry's own."""
        configured = self.clone.folder / ".dvc" / "config"
        if not configured.is_file():
            if self.storage is None:
                raise PipelineError("register.storage: a registry at a URL needs the folder or URL of its storage")
            self.clone.dvc("init", "--force")
            configured.write_text(_dvc_config(self.source, self.storage), encoding="utf-8")
        _prepare_storage(self)

    def known_storage(self) -> str:
        """Where the weights are stored, as seen from anywhere on this machine."""
        url = self.storage_url()
        return url if is_url(url) else os.path.normpath(Path(self.source) / ".dvc" / url)

    @property
    def _branch(self) -> str:
        return self.clone.git("symbolic-ref", "--short", "HEAD").strip()

    def _seen(self) -> str | None:
        """The commit that the registry was at when it was read; None for an empty one."""
        seen = self.clone.try_git("rev-parse", "--verify", "--quiet", f"refs/remotes/origin/{self._branch}")
        return seen and seen.strip()

    def _has_moved(self, branch: str, tag: str) -> bool:
        """Whether the branch of the registry is another commit than was seen, or the tag is there."""
        listed = self.clone.git("ls-remote", "origin", branch, tag).splitlines()
        there = {ref: commit for commit, _, ref in (line.partition("\t") for line in listed)}
        return tag in there or there.get(branch) != self._seen()


@contextmanager
def open_registry(location: str, storage: str | None) -> Iterator[Registry]:
    """Open a registry for writing, made on first use; a folder is locked meanwhile and left clean."""
    if is_url(location):
        with tempfile.TemporaryDirectory() as scratch:
            yield _clone(location, location, storage, Workspace(Path(scratch), Path(scratch)))
        return
    folder = Path(location).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder) as held:
        scratch_folder = folder.with_name(f".{folder.name}.work")
        killed = scratch_folder.exists()
        shutil.rmtree(scratch_folder, ignore_errors=True)
        scratch_folder.mkdir()
        outside = Workspace(scratch_folder, scratch_folder, held)
        try:
            _ensure_repository(folder, outside)
            view = Workspace(folder, scratch_folder, held)
            if killed:
                _remove_stale_locks(folder)
            yield _clone(location, str(folder), storage or f"{folder}-storage", outside)
            _refresh(view)
        finally:
            shutil.rmtree(scratch_folder, ignore_errors=True)


def is_url(location: str) -> bool:
    """Whether a location is served by someone, in any of git's and DVC's ways to write that."""
    return "://" in location or re.match(r"[\w.-]+@[\w.-]+:", location) is not None


@contextmanager
def _lock(folder: Path) -> Iterator[tuple[int, ...]]:
    """Hold the registry for this process and what it starts; the kernel lets go when the last of them ends."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("register", f"{folder} is in use by another registration; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield (file.fileno(),)


def _ensure_repository(folder: Path, outside: Workspace) -> None:
    """Make an empty repository aside and move it into place, unless there is one."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        made = outside.folder / "new"
        outside.git("init", "--quiet", "--initial-branch", "main", str(made))
        for key, value in ((_VIEW, "true"), ("receive.denyCurrentBranch", "ignore")):
            outside.git("-C", str(made), "config", key, value)
        if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
            raise PipelineError(f"{folder}: cannot be written to; give the registry a folder that can")
        made.rename(folder)
        return
    if not _is_repository(folder):
        raise PipelineError(f"{folder}: holds something else than a registry; name a new or empty folder")
    if outside.try_git("-C", str(folder), "config", "--get", _VIEW) is None and (folder / ".git").exists():
        raise PipelineError(
            f"{folder}: is a git repository with a working tree of its own; "
            "name a new folder, a bare repository or a URL"
        )
    objects = folder / (".git" if (folder / ".git").is_dir() else "") / "objects"
    if not os.access(objects, os.W_OK):
        raise PipelineError(f"{folder}: cannot be written to; give the registry a folder that can")


def _is_repository(folder: Path) -> bool:
    # Not asked of git, which would answer for a repository around the folder.
    return (folder / ".git").is_dir() or ((folder / "HEAD").is_file() and (folder / "objects").is_dir())


def _clone(location: str, source: str, storage: str | None, outside: Workspace) -> Registry:
    clone = Workspace(outside.folder / "clone", outside.scratch, outside.held)
    outside.git("clone", "--quiet", "--no-local", source, str(clone.folder))
    registry = Registry(location, clone, source, storage)
    registry.configure()
    return registry


def _dvc_config(source: str, storage: str) -> str:
    """DVC's config of a new registry; the storage relative to it where both are folders, to be moved together."""
    url = storage
    if not is_url(storage):
        url = str(Path(storage).resolve())
        # DVC finds relative ones only from a working tree.
        if (Path(source) / ".git").exists():
            url = os.path.relpath(url, Path(source) / ".dvc")
    return (
        f"[core]\n    analytics = false\n    check_update = false\n    remote = {_REMOTE}\n"
        f"['remote \"{_REMOTE}\"']\n    url = {url}\n"
    )


def _prepare_storage(registry: Registry) -> None:
    """Check that the storage is the registry's own, and tell the clone where it is."""
    known, storage = registry.known_storage(), registry.storage
    asked = storage if storage is None or is_url(storage) else str(Path(storage).resolve())
    if asked is not None and asked != known:
        raise PipelineError(
            f"register.storage: the versions in {registry.location} are stored in {known}, not in {asked}"
        )
    if not is_url(known):
        _ensure_storage(Path(known), used=bool(registry.clone.git("tag", "--list")))
    local = registry.clone.folder / ".dvc" / "config.local"  # git ignores it, DVC prefers it
    # With hard links the cache and the working tree share one copy of the weights.
    text = f"[cache]\n    type = hardlink\n['remote \"{_REMOTE}\"']\n    url = {known}\n"
    local.write_text(text, encoding="utf-8")


def _ensure_storage(folder: Path, *, used: bool) -> None:
    if used and not folder.is_dir():
        raise PipelineError(f"{folder}: the storage of the registered versions is missing; put it back")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PipelineError(f"{folder}: cannot be written to; give the storage a folder that can")


def _remove_stale_locks(folder: Path) -> None:
    """Remove git's lock files: the registration that was killed held them, and nobody else writes meanwhile."""
    for lock in (folder / ".git").rglob("*.lock"):
        with contextlib.suppress(FileNotFoundError):
            lock.unlink()


def _refresh(view: Workspace) -> None:
    """Put the working tree, if there is one, to the newest commit."""
    if (view.folder / ".git").exists() and view.try_git("rev-parse", "--verify", "--quiet", "HEAD"):
        view.git("reset", "--quiet", "--hard")


def _text(numbers: tuple[int, int, int]) -> str:
    return "v" + ".".join(str(number) for number in numbers)
