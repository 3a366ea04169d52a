"""Removes what runs have left on the shared volume: `python -m components.cluster.collector`, every night.

`components.shared.task` describes the folders. A finished run's folder is removed if, for `--finished-days`, nothing in
it has changed and no stage has begun to read a model in it. Unfinished work with its checkpoints is removed if it has
not changed for `--unfinished-days`. Regardless of age, these are kept:
- folders that an unfinished workflow or a training job names, and unfinished work that a run or its ranks have locked,
- run folders to which a file of another kept run, or of unfinished work in use, refers,
- run folders with anything in them that no stage makes: an empty file `keep` is enough,
- everything else on the volume, such as registries, their storage and base models.

Folders are renamed before they are removed: after an interruption they are complete or absent, and the next call
removes the rest. Times are those of the volume's server, because the clock of this pod may be wrong.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from components.cluster import kube
from components.cluster.kube import RetryPolicy, TrainJobs
from components.shared import durable, lineage, model
from components.shared.errors import PipelineError
from components.shared.progress import say
from components.shared.stage import exit_on_error
from components.shared.work import reserved

_LOCK = ".collector.lock"
_RUN_ID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORK_KEY = re.compile("[0-9a-f]{16}")
_RECORD = re.compile(rf"{_WORK_KEY.pattern}\.json|\.{_WORK_KEY.pattern}\.json\.partial")
_REMOVED = re.compile(rf"\.(?:{_RUN_ID.pattern}|{_WORK_KEY.pattern})\.removed")
_MADE_BY_STAGES = {"inputs", "train_sft", "train_grpo", "evaluate", "report"}
"""Names of the folders that stages make in the folder of a run."""
_REFERENCES = {model.PIPELINE_FILE, lineage.FILE_NAME, "job.json"}
"""Names of files that may contain the id of another run: references to models, configs, and calls of rank functions."""
_DAY_S, _GIB = 24 * 3600, 2**30


class Limits(NamedTuple):
    """Seconds without a change after which folders of finished runs and unfinished work are removed."""

    finished_s: float
    unfinished_s: float


def in_use(namespace: str) -> str:
    """Return a namespace's unfinished workflows and training jobs, as JSON. Raises errors as `RetryPolicy.call`."""
    api = kube.connect()

    def request() -> str:
        workflows = kube.unfinished_workflows(api, namespace)
        return json.dumps([*TrainJobs(api, namespace).find({}), *workflows.values()])

    return RetryPolicy(limit_s=60).call(f"list training jobs and workflows of {namespace}", request)


def collect(mount: Path, limits: Limits, find_in_use: Callable[[], str], *, dry_run: bool = False) -> str:
    """Remove folders on the volume at `mount` that are old and not in use; return a summary.

    `find_in_use` returns a text that names folders in use, as `in_use` does. PipelineError if there is no volume,
    another collector is running, or something could not be removed.
    """
    if not mount.is_dir():
        raise PipelineError(f"{mount}: no such folder; does this pod mount the shared volume?")
    root = mount / "grpo-pipeline"
    lock = durable.lock_folder(root / _LOCK)
    try:
        volume = _Volume(root, limits)
        runs, work = volume.unused(find_in_use())  # as late as possible, after the long search of the volume
        if dry_run:
            new_paths = {path: path for path in [*runs, *work]}
        else:
            new_paths = {path: durable.set_aside(path) for path in runs}
            for path in work:
                with reserved(path) as is_free:
                    if is_free:
                        new_paths[path] = durable.set_aside(path)
            for path in volume.old_records:
                path.unlink(missing_ok=True)
        sizes = {path: durable.size(new_path) for path, new_path in new_paths.items()}
        for path, size in sizes.items():
            say("collector", f"{'would remove' if dry_run else 'removes'} {path}, {size / _GIB:.2f} GiB")
        if not dry_run:
            _remove_renamed(root)
    finally:
        lock.release()
    kept = f"{volume.num_folders - len(sizes)} folders of runs and of unfinished work are kept"
    return f"{'would free' if dry_run else 'freed'} {sum(sizes.values()) / _GIB:.2f} GiB; {kept}"


class _Volume:
    """The folders of runs and of unfinished work on a volume, with their ages and the ids of runs that they name."""

    def __init__(self, root: Path, limits: Limits) -> None:
        # The time by the volume's clock, which dates its folders too: locking has just written this file.
        now_s = (root / _LOCK).stat().st_mtime

        def unchanged_for(limit_s: float, paths: Iterable[Path]) -> set[Path]:
            return {path for path in paths if now_s - durable.last_change(path) > limit_s}

        self._runs = {path.name: path for path in _folders(root.iterdir(), _RUN_ID)}
        self._work = list(_folders(root.glob("work/*/*"), _WORK_KEY))
        removable = filter(_is_made_by_stages, self._runs.values())
        self._old_runs = {path.name for path in unchanged_for(limits.finished_s, removable)}
        self._old_work = unchanged_for(limits.unfinished_s, self._work)
        # Records of the outputs of finished work, which later runs look up.
        records = (path for path in root.glob("work/*/*") if _RECORD.fullmatch(path.name))
        self.old_records = unchanged_for(limits.finished_s, records)
        self.num_folders = len(self._runs) + len(self._work)
        self._references = {path: _ids_in(path) for path in [*self._runs.values(), *self._work]}

    def unused(self, text: str) -> tuple[list[Path], list[Path]]:
        """Return the old folders of runs and of unfinished work that nothing uses; `text` names those in use."""
        kept_runs = (self._runs.keys() - self._old_runs) | set(_RUN_ID.findall(text))
        unused_work = []
        for path in sorted(self._work):
            if path.name in text:  # in a training job, whose ranks may need the lock at any moment
                kept_runs |= self._references[path]
            elif path in self._old_work or self._references[path] & self._old_runs:  # else its lock does not matter
                with reserved(path) as is_free:
                    if not is_free:
                        kept_runs |= self._references[path]
                    elif path in self._old_work:
                        unused_work.append(path)
        num_kept = 0
        while num_kept < len(kept_runs):  # until the kept runs refer to no further ones
            num_kept = len(kept_runs)
            folders = [self._runs[run] for run in kept_runs & self._runs.keys()]
            kept_runs = kept_runs.union(*(self._references[folder] for folder in folders))
        return [self._runs[run] for run in sorted(self._old_runs - kept_runs)], unused_work


def _folders(paths: Iterable[Path], name: re.Pattern[str]) -> Iterable[Path]:
    return (path for path in paths if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink())


def _is_made_by_stages(run: Path) -> bool:
    """Tell whether the folder of a run has only entries that stages make."""
    try:
        return {path.name for path in run.iterdir()} <= _MADE_BY_STAGES
    except PermissionError:  # not a stage's folder: those are readable for all pods
        return False


def _ids_in(folder: Path) -> set[str]:
    """Return the ids of runs to which the files of a folder refer."""
    ids: set[str] = set()
    for path, _ in durable.walk(folder):
        if path.name in _REFERENCES:
            with suppress(OSError):
                ids |= set(_RUN_ID.findall(path.read_text(encoding="utf-8", errors="replace")))
    return ids


def _remove_renamed(root: Path) -> None:
    """Remove the folders that this call or an earlier one has renamed; PipelineError if one of a run is left."""
    renamed = list(_folders([*root.iterdir(), *root.glob("work/*/.*")], _REMOVED))
    for path in renamed:
        durable.remove(path)
    # Unfinished work does not count: a run that ends now renames and removes its own.
    left = [str(path) for path in renamed if path.parent == root and path.exists()]
    if left:
        raise PipelineError(f"{', '.join(left)}: could not be removed; make all folders in it writable for group 0")


def main() -> None:
    """Clear the volume once; runs and jobs of this pod's namespace are in use."""
    parser = argparse.ArgumentParser(prog="python -m components.cluster.collector", description="Clear the volume.")
    parser.add_argument("--volume", type=Path, default=Path("/work"), help="where it is mounted (default: %(default)s)")
    for kind, default in (("finished", 30), ("unfinished", 90)):
        text = f"days for which {kind} work is kept after its last change (default: %(default)s)"
        parser.add_argument(f"--{kind}-days", type=int, default=default, metavar="DAYS", help=text)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    options = parser.parse_args()
    with exit_on_error("collector"):
        if min(options.finished_days, options.unfinished_days) < 1:
            raise PipelineError("--finished-days, --unfinished-days: at least 1")
        limits = Limits(options.finished_days * _DAY_S, options.unfinished_days * _DAY_S)
        namespace = kube.own_namespace()
        say("collector", collect(options.volume, limits, lambda: in_use(namespace), dry_run=options.dry_run))


if __name__ == "__main__":
    main()
