"""Checkpoints of a training in the registry: push them during training, list, fetch and remove them.

A run is named after its folder of unfinished work, so a resumed run keeps its name. Its checkpoints are on a branch of
the registry's git repository, `checkpoints/<run>`, whose newest commit has a folder for each one that is kept:

    step-000040/checkpoint.json  metrics of the step, digest of each file, when and by whom it was pushed
    step-000040/lineage.json     its lineage
    step-000040/model.dvc        pointer to the model

The models are in `checkpoints/<run>` of the registry's storage, where files that several checkpoints of the run share
are stored once. The folder has nothing else, so DVC may remove everything that this branch does not refer to.

    python -m components.register.checkpoints --work FOLDER --staging FOLDER --registry REGISTRY ...

pushes the checkpoints of a training while it writes them, and ends when there is a file `end` in the staging folder.
"""

import argparse
import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from components.register.registry import open_registry
from components.register.snapshot import DamagedError, Snapshot, read_registry
from components.register.storage import (
    CONFIG,
    REMOTE,
    config_below,
    error_prefix,
    md5_in,
    pointer_file,
    storage_url,
    write_dvc_config,
)
from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError, RetryableError, explain
from components.shared.lineage import Lineage
from components.shared.progress import say
from components.shared.versioning import Workspace, is_url
from components.shared.work import MODEL, Export, newest_export

END = "end"
_BRANCHES = "refs/heads/checkpoints/"
_FILE = "checkpoint.json"
_STAGE = "train_grpo"
_ACCURACY = "validation_accuracy"
"""Metric of a step by which the best checkpoint is chosen."""
_NAME = re.compile(r"([0-9a-f]{4,16})@(?:step-(\d+)|latest)")
_POLL_S = 0.5
_NICENESS = 19
"""Lowest priority: training needs the processors."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the registry."""

    run: str
    step: int
    at: str
    """When it was pushed, in ISO 8601."""
    by: str
    """User who ran the training; empty if unknown."""
    metrics: Mapping[str, Any]
    """Metrics of its step, as in steps.jsonl."""
    digests: Mapping[str, str]
    """SHA-256 of each file of the model, by path."""

    @property
    def name(self) -> str:
        """Name by which `fetch` finds it."""
        return f"{self.run}@step-{self.step}"


def stored_checkpoints(snapshot: Snapshot, run: str = "") -> list[StoredCheckpoint]:
    """Return a registry's checkpoints of the runs whose names begin with `run`, sorted by run and step."""
    git = snapshot.repository.git
    # From here on read commits, not branches: a branch may get a new commit at any time.
    commits = git("for-each-ref", "--sort=refname", "--format=%(objectname)", f"{_BRANCHES}{run}*").split()
    files = [
        f"{commit}:{path}"
        for commit in commits
        for path in git("ls-tree", "-r", "--name-only", commit).split()
        if path.endswith(f"/{_FILE}")
    ]
    return [StoredCheckpoint(**json.loads(git("show", file))) for file in files]


def is_checkpoint(name: str) -> bool:
    """Return whether a name has the form `<run>@step-<number>` or `<run>@latest`."""
    return _NAME.fullmatch(name) is not None


def fetch_checkpoint(location: str, name: str, destination: Path) -> StoredCheckpoint:
    """Copy the model of a checkpoint, `<run>@step-<number>` or `<run>@latest`, to the new folder `destination`.

    `<run>` may be the first digits of the name. The folder appears once it is complete; PipelineError unless every file
    in it is as it was pushed.
    """
    with durable.new_folder(destination) as folder, read_registry(location) as snapshot:
        checkpoint = _find(snapshot, name)
        for fault in checkpoint_faults(snapshot, checkpoint, folder.name, str(folder.parent.absolute())):
            raise DamagedError(fault)
    return checkpoint


def checkpoint_faults(snapshot: Snapshot, checkpoint: StoredCheckpoint, name: str = MODEL, *options: str) -> list[str]:
    """Read the model of a checkpoint, in messages and the optional destination as `name`; return a line per fault."""
    branch = f"{_BRANCHES}{checkpoint.run}"
    with error_prefix(f"{checkpoint.name}: cannot be read"):
        paths = (CONFIG, f"{_folder(checkpoint.step)}/{MODEL}.dvc")
        config, pointer = (snapshot.repository.try_git("show", f"{branch}:{path}") for path in paths)
        if config is None or pointer is None:
            raise RetryableError("it has just been removed; list the checkpoints again")
        read = snapshot.read_storage(config, {name: md5_in(pointer)}, *options)
    if read["faults"]:
        return [f"{checkpoint.name}: {fault}" for fault in read["faults"].values()]
    files = {path.removeprefix(f"{name}/"): digest for path, digest in read["files"].items()}
    return [
        f"{checkpoint.name}: {path} is not the file that was pushed; it was changed since"
        for path in sorted({**checkpoint.digests, **files})
        if checkpoint.digests.get(path) != files.get(path)
    ]


def _find(snapshot: Snapshot, name: str) -> StoredCheckpoint:
    """Return the checkpoint of a name for which `is_checkpoint` holds; PipelineError unless it names one checkpoint."""
    match = _NAME.fullmatch(name)
    assert match
    run, step = match.groups()
    stored = stored_checkpoints(snapshot, run)
    runs = list(dict.fromkeys(each.run for each in stored))
    if len(runs) > 1:
        raise PipelineError(f"{snapshot.location}: {name} is ambiguous: of {' or '.join(runs)}; give more digits")
    matching = [each for each in stored if step is None or each.step == int(step)]
    if not matching:
        available = ", ".join(each.name for each in stored or stored_checkpoints(snapshot)) or "none"
        raise PipelineError(f"{snapshot.location}: no checkpoint {name}; available: {available}")
    return matching[-1]


def remove_checkpoints(location: str, run: str) -> int:
    """Remove all checkpoints of a run and return how many they were; an interrupted call can be repeated."""
    with read_registry(location) as snapshot:
        config = snapshot.repository.try_git("show", f"{_BRANCHES}{run}:{CONFIG}")
        if config is None:
            raise PipelineError(f"{location}: has no checkpoints of a run {run}; `models checkpoints` lists the names")
        with _branch(run, snapshot.origin, config) as branch:
            folders = branch.folders
            branch.commit(f"Remove all checkpoints of {run}", removed=folders)
            branch.collect_garbage()
            branch.push("")
    return len(folders)


class _Branch:
    """A clone of the branch of one run, in which its next commit is prepared."""

    def __init__(self, run: str, origin: str, workspace: Workspace, config: str) -> None:
        self._origin, self._ref, self._storage_folder = origin, f"{_BRANCHES}{run}", f"checkpoints/{run}"
        self._workspace, self._git = workspace, workspace.git
        workspace.folder.mkdir()
        self._git("init", "--quiet")
        self._git("remote", "add", "origin", origin)
        if self._git("ls-remote", "origin", self._ref):  # otherwise the branch is new
            self._git("fetch", "--quiet", "--depth=1", "origin", f"+{self._ref}:refs/remotes/origin/tip")
            self._git("reset", "--quiet", "--hard", "refs/remotes/origin/tip")
            config = (workspace.folder / CONFIG).read_text(encoding="utf-8")
        else:
            config = config_below(config, self._storage_folder)
        self._storage = storage_url(config, origin, origin)
        write_dvc_config(workspace.folder, config, self._storage)

    @property
    def folders(self) -> dict[int, Path]:
        """The folder of each checkpoint by its step, the oldest first."""
        folders = self._workspace.folder.glob("step-*")
        return dict(sorted((int(path.name.removeprefix("step-")), path) for path in folders))

    def add(self, export: Export, checkpoint: StoredCheckpoint, made_by: Lineage | None) -> None:
        """Copy a model into the storage and prepare its folder; FileNotFoundError if training has removed it."""
        model = self._workspace.scratch / MODEL
        for path in export.digests:
            (model / path).parent.mkdir(parents=True, exist_ok=True)
            durable.link_or_copy(export.folder / path, model / path)
        stored = self._workspace.dvc_json("store", {MODEL: str(model)})
        digests = {f"{MODEL}/{path}": digest for path, digest in export.digests.items()}
        if stored["faults"] or stored["files"] != digests:
            faults = [*stored["faults"], f"{export.folder}: its files differ from the manifest of the checkpoint"]
            raise PipelineError(f"the storage does not have what was written: {faults[0]}")
        folder = self._workspace.folder / _folder(export.step)
        folder.mkdir()
        (folder / f"{MODEL}.dvc").write_text(pointer_file(MODEL, stored["pointers"][MODEL]), encoding="utf-8")
        jsonl.write_json(folder / _FILE, asdict(checkpoint))
        if made_by:
            lineage.write(folder, made_by)

    def commit(self, message: str, removed: Mapping[int, Path]) -> None:
        """Commit what was added, without the folders `removed`, and push it; PipelineError if the push is refused."""
        for folder in removed.values():
            shutil.rmtree(folder)
        self._git("add", "--all")
        if self._git("status", "--porcelain"):
            self._git("commit", "--quiet", "--message", message)
        self.push("HEAD")

    def push(self, commit: str) -> None:
        """Push a commit to the branch; an empty name removes the branch."""
        if not is_url(self._origin):  # a killed push leaves its lock; nobody else pushes to this branch
            for folder in (self._origin, f"{self._origin}/.git"):
                Path(folder, f"{self._ref}.lock").unlink(missing_ok=True)
        self._git("push", "--quiet", "origin", f"{commit}:{self._ref}")

    def collect_garbage(self) -> None:
        """Remove the files to which the branch does not refer any more from the run's folder of the storage."""
        if not self._storage.endswith(f"/{self._storage_folder}"):  # DVC would remove the registered versions
            raise PipelineError(f"{self._ref}: its storage {self._storage} is not this run's; nothing was removed")
        self._workspace.dvc("gc", "--workspace", "--cloud", "--remote", REMOTE, "--force")


def _folder(step: int) -> str:
    return f"step-{step:06d}"


@contextmanager
def _branch(run: str, origin: str, config: str, parent: Path | None = None) -> Iterator[_Branch]:
    """Clone the branch of a run into a temporary folder in `parent`; `config` is the registry's DVC config."""
    # DVC runs in the clone and gets the path of the model, which is in the temporary folder: it must be absolute.
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-", dir=parent and parent.resolve()) as scratch:
        yield _Branch(run, origin, Workspace(Path(scratch) / "clone", Path(scratch)), config)


class _Publisher:
    """Pushes the checkpoints of one training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._run, self._started = options, options.work.name, datetime.now(UTC)
        self._has_leftovers = True
        """Whether a killed process may have left unreferenced files in the storage."""

    def run_until_end(self) -> None:
        """Push each new checkpoint until training has ended and the newest is pushed; failures are warnings.

        A checkpoint is skipped if a newer one is written while an earlier one is being pushed.
        """
        tried = pushed = 0  # steps
        while True:
            # Before the newest checkpoint is looked up, so that a checkpoint written just before the end is not missed.
            has_ended = (self._options.staging / END).exists()
            # At the end, a checkpoint whose push failed is tried once more.
            export = newest_export(self._options.work, after=pushed if has_ended else tried)
            if export:
                tried = export.step
                if self._push(export):
                    pushed = export.step
            if has_ended:
                return
            time.sleep(_POLL_S)

    def _push(self, export: Export) -> bool:
        """Push a checkpoint unless the registry has it; if that fails, print a warning and return False."""
        name = f"{self._run}@step-{export.step}"
        try:
            origin, config = self._registry
            with _branch(self._run, origin, config, self._options.staging) as branch:
                # Another run of the same training may be ahead; its checkpoints are equal.
                if export.step > max(branch.folders, default=0):
                    self._add(branch, export)
                    say(_STAGE, f"the checkpoint of step {export.step} is in the registry as {name}")
        except FileNotFoundError:  # training has removed it in favour of newer ones
            return False
        except Exception as error:  # git, DVC or the network
            if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
                error.filename = str(self._options.staging)  # what is pushed is written there first
            explained = explain(error)
            if explained is None:
                raise
            say(_STAGE, f"warning: {name} could not be pushed to {self._options.registry}: {explained}")
            return False
        return True

    @cached_property
    def _registry(self) -> tuple[str, str]:
        """The registry's folder or URL, and its DVC config; a new registry is created."""
        options = self._options
        with open_registry(options.registry, options.storage, options.storage_endpoint) as registry:
            return registry.origin, (registry.repository.folder / CONFIG).read_text(encoding="utf-8")

    def _add(self, branch: _Branch, export: Export) -> None:
        """Store a checkpoint and commit it; remove the checkpoints that are not kept any longer."""
        described = lineage.read(self._options.work)
        made_by = lineage.complete(described, {}, self._started) if described else None
        run = made_by.run() if made_by else None
        at, by = datetime.now(UTC).isoformat(timespec="seconds"), run.by if run else ""
        checkpoint = StoredCheckpoint(self._run, export.step, at, by, export.metrics, export.digests)
        branch.add(export, checkpoint, made_by)
        folders = branch.folders
        kept = set(list(folders)[-self._options.keep_last :])
        if self._options.keep_best:
            metrics = {step: jsonl.read_json(folder / _FILE)["metrics"] for step, folder in folders.items()}
            accuracies = {step: row[_ACCURACY] for step, row in metrics.items() if row.get(_ACCURACY) is not None}
            if accuracies:
                kept.add(max(accuracies, key=accuracies.__getitem__))  # ties go to the earliest step
        removed = {step: folder for step, folder in folders.items() if step not in kept}
        branch.commit(f"Add {checkpoint.name}", removed)
        if removed or self._has_leftovers:
            branch.collect_garbage()
            self._has_leftovers = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: push the checkpoints of a training until it ends."""
    parser = argparse.ArgumentParser(description="Push the checkpoints of a training into the registry.")
    parser.add_argument("--work", type=Path, required=True, help="the training's folder of unfinished work")
    parser.add_argument("--staging", type=Path, required=True, help="folder for what is being pushed")
    parser.add_argument("--registry", required=True, help="folder or URL")
    parser.add_argument("--storage", help="DVC remote for the models")
    parser.add_argument("--storage-endpoint", help="address of the remote's S3 server")
    parser.add_argument("--keep-last", type=int, required=True, help="checkpoints that are kept")
    parser.add_argument("--keep-best", action="store_true", help="whether the best is kept as well")
    options = parser.parse_args(arguments)
    _Publisher(options).run_until_end()


if __name__ == "__main__":
    os.nice(_NICENESS)
    main()
