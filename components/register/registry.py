"""The registry: a git repository whose tags are versions of models, with their large files in a DVC remote.

A version is prepared in a clone and registered by a single push of its commit and its tags. If a run is killed before
the push, the next run discards the clone; if it is killed after the push, the next run finds the version.
"""

import fcntl
import hashlib
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
from typing import Any, NamedTuple

import yaml

from components.register.snapshot import DIGESTS_FILE, VERSION_FILE, Snapshot, Version, read_registry
from components.register.storage import (
    CONFIG,
    error_prefix,
    md5_in,
    new_config,
    pointer_file,
    resolved,
    storage_url,
    write_dvc_config,
    wrong_storage,
)
from components.shared import durable, lineage
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.versioning import Workspace, is_url

POLICY = "policy"
"""Folder of a version's weights, relative to the registry."""
_VIEW = "grpo-pipeline.view"
"""Git setting of the registries that this module creates: their working tree may be reset to the newest version."""
_REF_LOCKED = re.compile("cannot lock ref|failed to update ref|incorrect old value")
"""Git's message when two pushes collide on the server, and also when a lock there is stale."""
_REFUSED = "[remote rejected]"
"""Part of git's line on a ref that the server has declined."""
ASK_OWNER = "ask its owner for write permission"
_PUSH_PAUSES_S = (0.2, 1.0, 5.0)
"""Pauses between pushes that collide with a lock on the server; after them the push fails."""
_README = """# Model registry

Every tag `<name>@v<version>` is a registered version, a closed bundle: its files are in git, and its `.dvc` files point
to folders in the storage. `digests.json` has the SHA-256 of each file of both. A tag `<name>#<alias>#<count>` gives an
alias, such as `champion`, to a version. The working tree is only a view of the newest version.

`grpo-pipeline fetch` brings the weights of a version, `grpo-pipeline models get` all of it, and `grpo-pipeline models
verify` reads every byte. With GTO and DVC alone: `gto show` and `dvc artifacts get <this repository> <name> --rev
v<version>`.
"""


class RefusedError(PipelineError):
    """The registry's server does not accept a push to its branch: the branch is protected, or a hook declined it."""


class Stored(NamedTuple):
    """Folders of a version that are in the storage."""

    pointers: dict[str, str]
    """Content of the `.dvc` file of each folder."""
    digests: dict[str, str]
    """SHA-256 of each file as the storage returns it, by its path in the version."""


@dataclass(frozen=True)
class Registry(Snapshot):
    """A clone of the registry in which the next version is prepared."""

    storage: str | None = None
    """The configured storage; None for that in the registry's config."""
    endpoint: str | None = None
    """The configured address of the storage's S3 server; None for that in the registry's config."""

    def storage_url(self) -> str:
        """Return the storage of the versions' folders: a URL, or an absolute path on this machine."""
        return storage_url((self.repository.folder / CONFIG).read_text("utf-8"), self.location, self.origin)

    def store(self, folders: Mapping[str, Path]) -> Stored:
        """Copy the folders of a version into the storage; PipelineError unless it returns what was written."""
        with error_prefix(f"{self.storage_url()}: cannot store the version there"):
            stored = self.repository.dvc_json("store", {name: str(path.resolve()) for name, path in folders.items()})
        if stored["faults"]:
            fault = next(iter(stored["faults"].values()))
            raise PipelineError(f"{self.storage_url()}: does not return what is written there: {fault}")
        return Stored({name: pointer_file(name, each) for name, each in stored["pointers"].items()}, stored["files"])

    def serve(self, version: Mapping[str, Any]) -> str:
        """Copy the weights of a version to plain files in the storage, verified, and return their address.

        Model servers cannot read DVC's objects, which are named by their content.
        """
        folder = f"serve/{version['name']}/{version['version']}"
        with error_prefix(f"{self.storage_url()}: cannot copy {version['tag']} to {folder}"):
            self.repository.dvc("unpack", md5_in(self.read(version["tag"], f"{POLICY}.dvc")), folder)
        return f"{self.storage_url().rstrip('/')}/{folder}"

    def commit(
        self, version: Mapping[str, Any], files: Mapping[str, str | Path], stored: Stored, message: str
    ) -> dict[str, Any]:
        """Commit a version and its files (texts, or files to copy) in the clone; return its complete version.json."""
        folder, git = self.repository.folder, self.repository.git
        artifact = {"path": POLICY, "type": "model", "desc": "policy trained with GRPO"}
        contents = {
            "dvc.yaml": yaml.safe_dump({"artifacts": {version["name"]: artifact}}),
            ".gitignore": "".join(f"/{name}\n" for name in stored.pointers),
            **{f"{name}.dvc": pointer for name, pointer in stored.pointers.items()},
            **files,
        }
        if not (folder / "README.md").exists():  # otherwise it may have been edited
            contents["README.md"] = _README
        for pointer in folder.glob("?*.dvc"):  # the previous version may have had other folders
            pointer.unlink()
        for path, content in contents.items():
            target = folder / path
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_text(content, encoding="utf-8")
        git("add", "--all")
        in_git = set(git("ls-files", "-z").split("\0")[:-1]) - {VERSION_FILE, DIGESTS_FILE}
        digests = {**{path: lineage.file_digest(folder / path) for path in in_git}, **stored.digests}
        digests_text = json.dumps(dict(sorted(digests.items())), indent=2) + "\n"
        complete = {**version, "bundle_digest": hashlib.sha256(digests_text.encode()).hexdigest()}
        version_file = folder / VERSION_FILE
        previous = json.loads(version_file.read_text("utf-8")) if version_file.is_file() else {}
        if all(previous.get(key) == complete[key] for key in ("tag", "bundle_digest")):
            # A push was killed between the commit and its tag: the commit of this version is there already.
            git("reset", "--quiet", "--hard")
            return previous
        (folder / DIGESTS_FILE).write_text(digests_text, encoding="utf-8")
        version_file.write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
        git("add", "--all")
        git("commit", "--quiet", "--message", message)
        return complete

    def publish(self, tags: Mapping[str, str], commit: str | None = None) -> bool:
        """Push new tags, given as messages by name, on a commit of the registry: all of them or none.

        Without a `commit` they are on the clone's newest one, which is pushed with them. Returns False if the registry
        has changed since it was read; RefusedError if it does not accept the clone's commit (see `propose`).
        """
        git = self.repository.git
        for tag, message in tags.items():
            git("tag", "--annotate", "--cleanup=verbatim", f"--message={message}", tag, commit or "HEAD")
        branch = None if commit else self._branch
        tag_refs = [f"refs/tags/{tag}" for tag in tags]
        refs = [f"HEAD:refs/heads/{branch}", *tag_refs] if branch else tag_refs
        pauses = iter(_PUSH_PAUSES_S)
        while True:
            try:
                git("push", "--quiet", "--atomic", "origin", *refs)
                return True
            except PipelineError as error:
                if self._has_changed(tag_refs, branch):
                    return False
                kind = type(error)
                if _REF_LOCKED.search(str(error)):
                    pause_s = next(pauses, None)
                    if pause_s is not None:
                        time.sleep(pause_s)
                        continue
                    kind = RetryableError
                elif branch and _REFUSED in str(error):
                    kind = RefusedError
                raise kind(f"{self.location}: does not accept {next(iter(tags))}: {error}") from None

    def propose(self, branch: str, tags: Sequence[str]) -> bool | None:
        """Push the clone's commit to a new branch, for a pull request, with the tags of `publish` if accepted.

        Returns whether the tags were accepted, which registers the version; None if the server refuses the branch, or
        has it already with other weights.
        """
        git, ref = self.repository.git, f"refs/heads/{branch}"
        for tag_refs in ([f"refs/tags/{tag}" for tag in tags], []):  # in the second attempt the branch alone
            try:
                git("push", "--quiet", "--atomic", "origin", f"HEAD:{ref}", *tag_refs)
                return bool(tag_refs)
            except RetryableError:
                raise
            except PipelineError:
                continue
        if self.repository.try_git("fetch", "--quiet", "origin", ref) is None:
            return None
        # An earlier run may have proposed the same weights.
        ours, theirs = (json.loads(git("show", f"{each}:{VERSION_FILE}")) for each in ("HEAD", "FETCH_HEAD"))
        return False if ours["policy_digest"] == theirs["policy_digest"] else None

    def catch_up(self) -> None:
        """Reset the clone to the current state of the registry; drop the commit and tags that were not pushed."""
        refs = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        self.repository.git("fetch", "--quiet", "--prune", "origin", *refs)
        if self.newest_commit(self._branch) is not None:
            self.repository.git("reset", "--quiet", "--hard", f"refs/remotes/origin/{self._branch}")
        self.configure()

    def configure(self) -> None:
        """Write DVC's config into the clone if it is missing, and check the storage."""
        file = self.repository.folder / CONFIG
        if not file.is_file():
            configured = resolved(self.storage)
            if configured is None and is_url(self.origin):
                raise PipelineError("register.storage: a registry at a URL needs the folder or URL of its storage")
            new = configured or f"{self.origin}-storage"
            # Relative, so that both can be moved together; DVC resolves relative paths only from a working tree.
            if not is_url(new) and (Path(self.origin) / ".git").exists():
                new = os.path.relpath(new, Path(self.origin) / ".dvc")
            file.parent.mkdir(exist_ok=True)
            file.write_text(new_config(new, self.endpoint), encoding="utf-8")
        config = file.read_text("utf-8")
        for line in wrong_storage(config, self.location, self.origin, self.storage, self.endpoint):
            raise PipelineError(line)
        url = self.storage_url()
        if not is_url(url):
            self._ensure_storage_folder(Path(url))
        write_dvc_config(self.repository.folder, config, url)

    def _ensure_storage_folder(self, folder: Path) -> None:
        """Create the storage's folder; PipelineError if versions were lost with it, or if it is not writable."""
        if not (folder / "files").is_dir() and self.repository.git("tag", "--list"):
            raise PipelineError(f"{folder}: the storage is missing or empty; restore or mount it")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PipelineError(f"{folder}: cannot be written to by this user; {ASK_OWNER}")

    @property
    def _branch(self) -> str:
        return self.repository.git("symbolic-ref", "--short", "HEAD").strip()

    def newest_commit(self, branch: str) -> str | None:
        """Return the newest commit of a branch when the registry was last read; None if there was no such branch."""
        commit = self.repository.try_git("rev-parse", "--verify", "--quiet", f"refs/remotes/origin/{branch}")
        return commit and commit.strip()

    def _has_changed(self, tag_refs: Sequence[str], branch: str | None) -> bool:
        """Return whether somebody else has pushed one of the tags, or to the branch, since the registry was read."""
        branch_refs = [f"refs/heads/{branch}"] if branch else []
        listed = self.repository.git("ls-remote", "origin", *tag_refs, *branch_refs).splitlines()
        commits = {ref: commit for commit, ref in (line.split("\t") for line in listed)}
        if any(ref in commits for ref in tag_refs):
            return True
        return branch is not None and commits.get(f"refs/heads/{branch}") != self.newest_commit(branch)


@contextmanager
def open_registry(location: str, storage: str | None, endpoint: str | None = None) -> Iterator[Registry]:
    """Open a registry for new versions, as `open_repository` does, and check its storage or create it on first use."""
    with open_repository(location) as opened:
        registry = replace(opened, storage=storage, endpoint=endpoint)
        registry.configure()
        yield registry


@contextmanager
def open_repository(location: str) -> Iterator[Registry]:
    """Open a registry for new tags and branches, created on first use; a folder is locked meanwhile and left clean."""
    if is_url(location):
        with tempfile.TemporaryDirectory() as scratch:
            yield _clone(location, location, Workspace(Path(scratch), Path(scratch)))
        return
    folder = Path(location).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        # The lock lasts until this process and all tools that inherit it have ended.
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
            if was_killed:  # git left its own locks; nobody else writes while the registry is locked
                for stale in (folder / ".git").rglob("*.lock"):
                    stale.unlink(missing_ok=True)
            yield _clone(location, str(folder), workspace)
            if (folder / ".git").exists() and workspace.try_git("-C", str(folder), "rev-parse", "--verify", "HEAD"):
                workspace.git("-C", str(folder), "reset", "--quiet", "--hard")
        finally:
            shutil.rmtree(scratch_folder, ignore_errors=True)


def fetch(registry: str, version: str, destination: Path, *, path: str = POLICY) -> Version:
    """Copy the weights of a version, or another of its paths (`.`: all of it), to the new folder `destination`.

    `version` is any name that `Snapshot.version` accepts. The folder appears once it is complete and verified.
    """
    with durable.new_folder(destination) as folder, read_registry(registry) as snapshot:
        wanted = snapshot.version(version)
        parts = folder.with_name(f"{folder.name}.parts")
        durable.remove(parts)
        try:
            snapshot.get(wanted.tag, [path], parts)
            (parts / path).rename(folder)
        finally:
            durable.remove(parts)
    return wanted


def is_new_folder(folder: Path, workspace: Workspace) -> bool:
    """Return whether a folder is new or empty; PipelineError if it has anything but a registry, or is not writable."""
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if is_new:
        to_write = folder if folder.exists() else folder.parent
    elif (folder / ".git").is_dir():
        to_write = folder / ".git" / "objects"
        workspace.git("-C", str(folder), "rev-parse", "--git-dir")  # an error if another user owns the folder
        if workspace.try_git("-C", str(folder), "config", "--get", _VIEW) is None:
            origin = workspace.try_git("-C", str(folder), "config", "--get", "remote.origin.url")
            raise PipelineError(
                f"{folder}: is the working tree of another git repository; choose a new folder, a bare repository or a "
                "URL" + (f"; if it is a clone of a registry, name that: {origin.strip()}" if origin else "")
            )
    # A bare repository. Git is not asked: it would answer for a repository around the folder.
    elif (folder / "HEAD").is_file() and (folder / "objects").is_dir():
        to_write = folder / "objects"
        workspace.git("-C", str(folder), "rev-parse", "--git-dir")
    else:
        raise PipelineError(f"{folder}: contains something other than a registry; choose a new or empty folder")
    if not os.access(to_write, os.W_OK):
        raise PipelineError(f"{folder}: cannot be written to by this user; {ASK_OWNER}")
    return is_new


def _ensure_repository(folder: Path, workspace: Workspace) -> None:
    """Create the repository of a registry in a new or empty folder; PipelineError if a folder has something else."""
    if is_new_folder(folder, workspace):
        new = workspace.folder / "new"
        workspace.git("init", "--quiet", "--initial-branch", "main", str(new))
        workspace.git("-C", str(new), "config", _VIEW, "true")
        workspace.git("-C", str(new), "config", "receive.denyCurrentBranch", "ignore")
        new.rename(folder)
        say("register", f"created the registry {folder.resolve()}")


def _clone(location: str, origin: str, workspace: Workspace) -> Registry:
    clone = Workspace(workspace.folder / "clone", workspace.scratch, workspace.locks)
    workspace.git("clone", "--quiet", "--no-local", "--", origin, str(clone.folder))
    return Registry(location, clone, origin)
