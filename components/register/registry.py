"""The registry: a git repository whose tags are versions of models, with the weights in a DVC remote.

A version is prepared in a clone and registered by a single push of its commit and its tag. If a run is killed before
the push, the next run discards the clone; if it is killed after the push, the next run finds the version.
"""

import configparser
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from components.shared import lineage
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.versioning import Workspace

POLICY = "policy"
"""Folder of a version's weights, relative to the registry."""
VERSION_FILE = "version.json"
_REMOTE = "storage"
_VIEW = "grpo-pipeline.view"
"""Git setting of registries made here: their working tree only shows the newest version and may be reset."""
_REF_LOCKED = re.compile("cannot lock ref|failed to update ref|incorrect old value")
"""Git's message when two pushes collide on the server, and also when a lock there is stale."""
_PUSH_PAUSES_S = (0.2, 1.0, 5.0)
"""Pauses between pushes that collide with a lock on the server."""
_VERSION = re.compile(r"([a-z0-9-]+)@v(\d+)\.(\d+)\.(\d+)")
_ALIAS = re.compile(r"([a-z0-9-]+)#([a-z0-9-]+)(!?)#(\d+)")
_README = """# Model registry

Every tag `<name>@v<version>` is a registered version: its weights (`policy.dvc` points to them), model card, report,
verdict and lineage. List the versions with `gto show`, fetch one with
`dvc artifacts get <this repository> <name> --rev v<version>`. The working tree is only a view of the newest version.
"""


@dataclass(frozen=True)
class Tag:
    """An annotated tag: a version `<name>@v<version>`, or an alias given to one, `<name>#<alias>#<count>`."""

    tag: str
    commit: str
    message: str
    by: str
    """Who made it, `Name <address>`."""
    at: str
    """When, in ISO 8601."""


@dataclass(frozen=True)
class Version(Tag):
    """A registered version."""

    name: str
    number: tuple[int, int, int]

    @property
    def version(self) -> str:
        """The number as it is in the tag, such as `v0.0.1`."""
        return _text(*self.number)


@dataclass(frozen=True)
class Assignment(Tag):
    """An alias that was given to a version, or with `withdrawn` taken away."""

    name: str
    alias: str
    count: int
    """Of the changes of this alias; the highest is in force."""
    withdrawn: bool


@dataclass(frozen=True)
class Snapshot:
    """What a registry holds, read from its git repository."""

    location: str
    repository: Workspace
    """The git repository itself, or a clone of it."""
    origin: str
    """Where it is from: a URL, or the absolute path of a folder."""

    def tags(self) -> list[Tag]:
        """Return all annotated and other tags, the oldest first."""
        fields = ("refname:short", "objectname", "*objectname", "creatordate:iso-strict", "taggername", "taggeremail")
        form = "%00".join(f"%({field})" for field in (*fields, "contents")) + "%01"
        listed = self.repository.git("for-each-ref", "--sort=creatordate", f"--format={form}", "refs/tags")
        tags = []
        for entry in listed.split("\1")[:-1]:
            tag, itself, commit, at, name, address, message = entry.lstrip("\n").split("\0")
            tags.append(Tag(tag, commit or itself, message.strip(), f"{name} {address}".strip(), at))
        return tags

    def versions(self, name: str | None = None, *, withdrawn: bool = False) -> list[Version]:
        """Return the versions of a model, or of all, by their numbers; those that GTO deprecated only where asked."""
        tags = self.tags()
        deprecated = {each.tag.partition("!")[0] for each in tags if "!" in each.tag}
        versions = [
            Version(**vars(tag), name=match[1], number=(int(match[2]), int(match[3]), int(match[4])))
            for tag in tags
            if (match := _VERSION.fullmatch(tag.tag)) and name in (None, match[1])
        ]
        kept = (each for each in versions if withdrawn or each.tag not in deprecated)
        return sorted(kept, key=lambda version: (version.name, version.number))

    def version(self, spec: str) -> Version:
        """Return the version that `v0.0.1`, `<name>@v0.0.1`, `latest`, an alias or `<name>@<alias>` stands for."""
        versions, aliases = self.versions(), self.aliases()
        name, _, wanted = spec.rpartition("@")
        matching = {
            version.tag: version
            for version in versions
            if name in ("", version.name)
            and (
                wanted == version.version
                or aliases.get(f"{version.name}@{wanted}") == version.tag
                or (wanted == "latest" and version == [each for each in versions if each.name == version.name][-1])
            )
        }
        if not matching:
            known = ", ".join([*(version.tag for version in versions), *aliases]) or "none"
            raise PipelineError(f"{self.location}: no version {spec}; available: {known}")
        if len(matching) > 1:
            raise PipelineError(f"{self.location}: {spec} is ambiguous: {' or '.join(matching)}; give the full name")
        return next(iter(matching.values()))

    def aliases(self) -> dict[str, str]:
        """Return the tag of the version that each alias, `<name>@<alias>`, was given to last."""
        by_commit = {(version.name, version.commit): version.tag for version in self.versions()}
        latest = {f"{each.name}@{each.alias}": each for each in self.assignments()}
        return {
            alias: by_commit[each.name, each.commit]
            for alias, each in latest.items()
            if not each.withdrawn and (each.name, each.commit) in by_commit
        }

    def assignments(self, name: str | None = None, alias: str | None = None) -> list[Assignment]:
        """Return each time that an alias, or any, was given to a version of a model, or of any, by their counts."""
        assignments = [
            Assignment(**vars(tag), name=match[1], alias=match[2], count=int(match[4]), withdrawn=bool(match[3]))
            for tag in self.tags()
            if (match := _ALIAS.fullmatch(tag.tag)) and name in (None, match[1]) and alias in (None, match[2])
        ]
        return sorted(assignments, key=lambda each: each.count)

    def read(self, tag: str, path: str) -> str:
        """Return a text file of a registered version."""
        return self.repository.git("show", f"refs/tags/{tag}:{path}")

    def get(self, tag: str, paths: Sequence[str], destination: Path) -> None:
        """Copy files and folders of a version into a folder; PipelineError unless each is as it was registered."""
        version = json.loads(self.read(tag, VERSION_FILE))
        for path in paths:
            (destination / path).parent.mkdir(parents=True, exist_ok=True)
            if path == POLICY:
                _download(self.repository, self.origin, tag, version, destination / path)
            else:
                (destination / path).write_text(self.read(tag, path), encoding="utf-8")

    def find(self, name: str, policy_digest: str) -> dict[str, Any] | None:
        """Return version.json of the registered version with these weights; None if there is none."""
        for known in reversed(self.versions(name)):
            version: dict[str, Any] = json.loads(self.read(known.tag, VERSION_FILE))
            if version["policy_digest"] == policy_digest:
                return version
        return None

    def pipeline_commit(self, tag: str) -> str:
        """Return the commit of the pipeline's code that registered a version."""
        form = "--format=%(trailers:key=Pipeline-Commit,valueonly)"
        return self.repository.git("log", "-1", form, f"refs/tags/{tag}").strip()


@dataclass(frozen=True)
class Registry:
    """A clone of the registry in which the next version is prepared."""

    location: str
    clone: Workspace
    origin: str
    """What the clone was made from: a URL, or the absolute path of a folder."""
    storage: str | None
    """The configured storage; None for the one that the registry has."""

    @property
    def snapshot(self) -> Snapshot:
        """The registry as it was last read."""
        return Snapshot(self.location, self.clone, self.origin)

    def next_version(self, name: str) -> str:
        """Return the number after the latest version, such as `v0.0.2`; numbers of deprecated versions stay taken."""
        versions = self.snapshot.versions(name, withdrawn=True)
        major, minor, patch = versions[-1].number if versions else (0, 0, 0)
        return _text(major, minor, patch + 1)

    def storage_url(self) -> str:
        """Return the storage of the weights: a URL, or an absolute path on this machine."""
        config = configparser.ConfigParser(interpolation=None)
        config.read_string((self.clone.folder / ".dvc" / "config").read_text("utf-8"))
        try:
            url = config[f"'remote \"{_REMOTE}\"'"]["url"]
        except KeyError:
            raise PipelineError(f"{self.location}: its .dvc/config has no remote named `{_REMOTE}`") from None
        return url if is_url(url) else os.path.normpath(Path(self.origin) / ".dvc" / url)

    def store(self, policy: Path) -> str:
        """Copy the weights into the storage and return the DVC pointer to them."""
        copy, cache = self.clone.folder / POLICY, self.clone.folder / ".dvc" / "cache"
        shutil.copytree(policy, copy)
        try:
            self.clone.dvc("add", POLICY)
            self.clone.dvc("push", f"{POLICY}.dvc")
        except PipelineError as error:
            reason = str(error).removeprefix("dvc: ")
            raise type(error)(f"{self.storage_url()}: cannot store the weights there: {reason}") from None
        # Weights are large, and the verification has to read them from the storage, not from here.
        for folder in (copy, cache):
            shutil.rmtree(folder)
        return (self.clone.folder / f"{POLICY}.dvc").read_text(encoding="utf-8")

    def commit(self, name: str, files: Mapping[str, str | Path], message: str) -> None:
        """Commit the pointer and the files of a version in the clone; nobody else sees it yet."""
        artifacts = {"artifacts": {name: {"path": POLICY, "type": "model", "desc": "policy trained with GRPO"}}}
        texts = {".gitignore": f"/{POLICY}\n", "dvc.yaml": yaml.safe_dump(artifacts)}
        if not (self.clone.folder / "README.md").exists():  # otherwise it may have been edited
            texts["README.md"] = _README
        for path, content in {**texts, **files}.items():
            target = self.clone.folder / path
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_text(content, encoding="utf-8")
        self.clone.git("add", "--all")
        # The commit may already be there without its tag, if a push was killed between the two.
        if self.clone.git("status", "--porcelain"):
            self.clone.git("commit", "--quiet", "--message", message)

    def verify(self, version: Mapping[str, Any]) -> None:
        """Fetch the weights of the committed version as a user will; PipelineError unless they are the policy's."""
        commit = self.clone.git("rev-parse", "HEAD").strip()
        _download(self.clone, str(self.clone.folder), commit, version, self.clone.scratch / "verification")

    def publish(self, name: str, version: str, alias: str, message: str) -> bool:
        """Tag the commit with GTO and push both atomically, with the tag of an alias of the version.

        From then on the version is registered. Returns False if the registry has changed since it was read (see
        `catch_up`); PipelineError if it refuses.
        """
        self.clone.gto("register", name, "HEAD", "--version", version)
        self._tag(alias, "HEAD", message)
        return self._push(f"{name}@{version}", alias, branch=f"refs/heads/{self._branch}")

    def assign(self, tag: str, commit: str, message: str) -> bool:
        """Give an alias to a version by a new tag `<name>#<alias>#<count>` on its commit, and push that.

        Returns False if somebody else has pushed this tag; PipelineError if the registry refuses it.
        """
        self._tag(tag, commit, message)
        return self._push(tag)

    def _tag(self, tag: str, commit: str, message: str) -> None:
        self.clone.git("tag", "--annotate", "--cleanup=verbatim", f"--message={message}", tag, commit)

    def _push(self, *tags: str, branch: str | None = None) -> bool:
        """Push tags, and atomically with them the commit to a branch; False where others have pushed in between."""
        pauses = iter(_PUSH_PAUSES_S)
        refs = [f"refs/tags/{tag}" for tag in tags]
        commit = [f"HEAD:{branch}"] if branch else []
        while True:
            try:
                self.clone.git("push", "--quiet", "--atomic", "origin", *commit, *refs)
            except PipelineError as error:
                if self._has_changed(refs, branch):
                    return False
                is_locked, pause_s = _REF_LOCKED.search(str(error)), next(pauses, None)
                if not is_locked or pause_s is None:
                    kind = RetryableError if is_locked else type(error)
                    raise kind(f"{self.location}: does not accept {tags[0]}: {error}") from None
                time.sleep(pause_s)
            else:
                return True

    def catch_up(self) -> None:
        """Reset the clone to the current state of the registry, without the commit and tag that were not pushed."""
        refs = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        self.clone.git("fetch", "--quiet", "--prune", "origin", *refs)
        if self._base_commit() is not None:
            self.clone.git("reset", "--quiet", "--hard", f"refs/remotes/origin/{self._branch}")
        self.configure()

    def configure(self) -> None:
        """Write DVC's config into the clone if it is missing, and check the storage."""
        config = self.clone.folder / ".dvc" / "config"
        configured = self.storage if self.storage is None or is_url(self.storage) else str(Path(self.storage).resolve())
        if not config.is_file():
            new = configured or ("" if is_url(self.origin) else f"{self.origin}-storage")
            if not new:
                raise PipelineError("register.storage: a registry at a URL needs the folder or URL of its storage")
            self.clone.dvc("init", "--force")
            # Relative, so that both can be moved together; DVC resolves relative paths only from a working tree.
            if not is_url(new) and (Path(self.origin) / ".git").exists():
                new = os.path.relpath(new, Path(self.origin) / ".dvc")
            core = f"[core]\n    analytics = false\n    check_update = false\n    remote = {_REMOTE}\n"
            config.write_text(f"{core}['remote \"{_REMOTE}\"']\n    url = {new}\n", encoding="utf-8")
        url = self.storage_url()
        if configured not in {None, url}:
            raise PipelineError(
                f"register.storage: the versions in {self.location} are stored in {url}, not in {configured}"
            )
        if not is_url(url):
            if not Path(url).is_dir() and self.clone.git("tag", "--list"):
                raise PipelineError(
                    f"{url}: the storage with the weights of the registered versions is missing; restore it"
                )
            Path(url).mkdir(parents=True, exist_ok=True)
            if not os.access(url, os.W_OK):
                raise PipelineError(f"{url}: not writable; choose another folder for register.storage")
        # DVC prefers config.local, and git ignores it. With hard links cache and working tree share one copy.
        local = f"[cache]\n    type = hardlink\n['remote \"{_REMOTE}\"']\n    url = {url}\n"
        config.with_name("config.local").write_text(local, encoding="utf-8")

    @property
    def _branch(self) -> str:
        return self.clone.git("symbolic-ref", "--short", "HEAD").strip()

    def _base_commit(self) -> str | None:
        """The commit of the registry when it was last read; None if it was empty."""
        commit = self.clone.try_git("rev-parse", "--verify", "--quiet", f"refs/remotes/origin/{self._branch}")
        return commit and commit.strip()

    def _has_changed(self, tags: Sequence[str], branch: str | None) -> bool:
        """Whether somebody else has pushed one of the tags, or to the branch, since the registry was read."""
        listed = self.clone.git("ls-remote", "origin", *tags, *([branch] if branch else [])).splitlines()
        commits = {ref: commit for commit, _, ref in (line.partition("\t") for line in listed)}
        has_tag = not commits.keys().isdisjoint(tags)
        return has_tag or (branch is not None and commits.get(branch) != self._base_commit())


@contextmanager
def open_registry(location: str, storage: str | None) -> Iterator[Registry]:
    """Open a registry for new versions and create it on first use; a folder is locked meanwhile and left clean."""
    with open_for_aliases(location) as opened:
        registry = replace(opened, storage=storage)
        registry.configure()
        yield registry


@contextmanager
def open_for_aliases(location: str) -> Iterator[Registry]:
    """Open a registry like `open_registry`, but for changes of its git repository alone."""
    if is_url(location):
        with tempfile.TemporaryDirectory() as scratch:
            yield _clone(location, location, Workspace(Path(scratch), Path(scratch)))
        return
    folder = Path(location).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        # The lock lasts until this process and all the tools that inherit it have ended.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("register", f"{folder} is in use by another registration; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        scratch_folder = folder.with_name(f".{folder.name}.work")
        was_killed = scratch_folder.exists()
        shutil.rmtree(scratch_folder, ignore_errors=True)
        scratch_folder.mkdir()
        workspace = Workspace(scratch_folder, scratch_folder, (lock.fileno(),))
        try:
            _ensure_repository(folder, workspace)
            for stale in (folder / ".git").rglob("*.lock") if was_killed else ():
                stale.unlink(missing_ok=True)  # nobody else writes while the registry is locked
            yield _clone(location, str(folder), workspace)
            if (folder / ".git").exists() and workspace.try_git("-C", str(folder), "rev-parse", "--verify", "HEAD"):
                workspace.git("-C", str(folder), "reset", "--quiet", "--hard")
        finally:
            shutil.rmtree(scratch_folder, ignore_errors=True)


@contextmanager
def read_registry(location: str) -> Iterator[Snapshot]:
    """Open a registry, a folder or a URL, for reading; PipelineError where there is none."""
    if not is_url(location) and not Path(location).is_dir():
        raise PipelineError(f"{location}: no such registry; nothing has been registered there")
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-registry-") as scratch:
        folder = Path(scratch)
        if is_url(location):
            Workspace(folder, folder).git("clone", "--quiet", "--bare", location, "registry")
            yield Snapshot(location, Workspace(folder / "registry", folder), location)
        else:
            origin = Path(location).resolve()
            yield Snapshot(location, Workspace(origin, folder), str(origin))


def fetch(registry: str, version: str, destination: Path) -> dict[str, Any]:
    """Fill the folder `destination` with the weights of a version (see `Snapshot.version`).

    Returns the version's version.json. The folder appears once it is complete and has the registered digest.
    """
    destination = destination.resolve()  # DVC runs in another folder
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise PipelineError(f"{destination}: is not empty; choose a new folder for the weights")
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with read_registry(registry) as snapshot:
            tag = snapshot.version(version).tag
            snapshot.get(tag, [POLICY], partial)
            registered: dict[str, Any] = json.loads(snapshot.read(tag, VERSION_FILE))
        (partial / POLICY).rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return registered


def is_url(location: str) -> bool:
    """Whether a location is a URL, in any of the forms that git and DVC accept, and not a folder."""
    return "://" in location or re.match(r"[\w.-]+@[\w.-]+:", location) is not None


def _download(
    workspace: Workspace, repository: str, revision: str, version: Mapping[str, Any], destination: Path
) -> None:
    """Fetch the weights at a revision; PipelineError unless they have the digest of the version."""
    tag, expected = version["tag"], version["policy_digest"]
    try:
        workspace.dvc_get(repository, POLICY, revision, destination)
    except PipelineError as error:
        raise type(error)(f"{tag}: cannot fetch the weights: {str(error).removeprefix('dvc: ')}") from None
    digest = lineage.digest(destination)
    if digest != expected:
        raise PipelineError(
            f"{tag}: the storage returned weights with digest {digest[:12]} instead of the registered "
            f"{expected[:12]}; they were changed or damaged there"
        )


def _ensure_repository(folder: Path, workspace: Workspace) -> None:
    """Create an empty repository aside and move it into place, unless there is one."""
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    is_working_tree = (folder / ".git").is_dir()
    # Without asking git, which would answer for a repository around the folder.
    if not is_new and not is_working_tree and not ((folder / "HEAD").is_file() and (folder / "objects").is_dir()):
        raise PipelineError(f"{folder}: contains something other than a registry; choose a new or empty folder")
    if is_working_tree and workspace.try_git("-C", str(folder), "config", "--get", _VIEW) is None:
        raise PipelineError(
            f"{folder}: is the working tree of another git repository; choose a new folder, a bare repository or a URL"
        )
    changed = (folder / ".git" if is_working_tree else folder) / "objects" if not is_new else folder
    if not os.access(changed if changed.exists() else changed.parent, os.W_OK):
        raise PipelineError(f"{folder}: not writable; choose another folder for register.registry")
    if is_new:
        new = workspace.folder / "new"
        workspace.git("init", "--quiet", "--initial-branch", "main", str(new))
        for key, value in ((_VIEW, "true"), ("receive.denyCurrentBranch", "ignore")):
            workspace.git("-C", str(new), "config", key, value)
        new.rename(folder)


def _clone(location: str, origin: str, workspace: Workspace) -> Registry:
    clone = Workspace(workspace.folder / "clone", workspace.scratch, workspace.locks)
    workspace.git("clone", "--quiet", "--no-local", origin, str(clone.folder))
    return Registry(location, clone, origin, None)


def _text(major: int, minor: int, patch: int) -> str:
    return f"v{major}.{minor}.{patch}"
