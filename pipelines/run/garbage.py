"""What `grpo-pipeline gc` removes: unfinished work that cannot be resumed, artifacts of failed runs, old runs.

Registries, their storage, the run started last and everything that a process uses always stay.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from components.shared import durable, lineage
from components.shared.errors import PipelineError
from components.shared.stage import WORK
from components.shared.work import fingerprint_in, last_step, reserved
from pipelines.run.history import ARTIFACTS, Run, every_run
from pipelines.run.listing import disk, remove_run


class Garbage(NamedTuple):
    """A file or folder that can be removed, and the run if it is a whole run."""

    path: Path
    reason: str
    run: Run | None = None


def collect(keep: int | None, *, dry_run: bool) -> None:
    """Remove all garbage, or with `dry_run` only print it; print how many bytes that frees.

    With `keep`, all but the newest `keep` runs are removed, except running ones; without it no whole run is.
    """
    if keep is not None and keep < 1:
        raise PipelineError(f"--keep {keep}: the run started last always stays; accepted: 1 or more")
    freed = 0
    for each in garbage(every_run(), keep=keep):
        number = disk(each.path)[1]
        if not dry_run and not _remove(each):
            continue
        freed += number
        print(f"{'would remove' if dry_run else 'removed'} {each.path} ({decimal(number)}): {each.reason}")
    print(f"{decimal(freed)} {'would be freed' if dry_run else 'freed'}")


def garbage(every: Sequence[Run], *, keep: int | None) -> Iterator[Garbage]:
    """Yield what can be removed; `every` has all runs, the newest first."""
    old = every[max(1, keep) :] if keep is not None else []
    for run in old:
        if not run.is_running:
            yield Garbage(run.folder, f"older than the newest {keep}", run)
    finished = [run.started for run in every if run.state == "finished"]
    for run in every[1:]:
        failed = run.state != "finished" and not run.is_running and any(run.started < start for start in finished)
        trained = run.stages.get("train_grpo")
        has_policy = trained is not None and trained.finished is not None  # which may exist only here
        if run not in old and failed and not has_policy and (run.folder / ARTIFACTS).is_dir():
            yield Garbage(run.folder / ARTIFACTS, f"the run {run.state}, and a later one has finished")
    yield from _abandoned(WORK)


def _abandoned(root: Path) -> Iterator[Garbage]:
    """Yield unfinished work of code that this checkout no longer has, or without a checkpoint."""
    for folder in sorted(root.glob("*/[!.]*/")):
        stage = folder.parent.name
        recorded = fingerprint_in(folder)
        if last_step(folder) is None:
            yield Garbage(folder, "has no checkpoint")
        elif recorded is None or recorded.get("files") != lineage.stage_files(stage):
            yield Garbage(folder, f"step {last_step(folder)} of other code, which cannot be resumed")


def _remove(each: Garbage) -> bool:
    """Remove something unless a process has started to use it; return whether it was removed."""
    if each.run:
        remove_run(each.run)
        return True
    with reserved(each.path) if each.path.name != ARTIFACTS else nullcontext(True) as is_free:
        if is_free:
            durable.discard(each.path)
        return is_free
