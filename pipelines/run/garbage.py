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
    """A folder that can be removed."""

    path: Path
    reason: str
    run: Run | None = None
    """The run, if `path` is the whole folder of a run."""


def collect(keep: int | None, *, dry_run: bool) -> None:
    """Remove garbage, with `keep` also all but the newest `keep` runs, and print its size; `dry_run` only prints."""
    if keep is not None and keep < 1:
        raise PipelineError(f"--keep {keep}: the run started last always stays; accepted: 1 or more")
    total_bytes = 0
    for each in garbage(every_run(), keep=keep):
        freed_bytes = disk(each.path)[1]
        if dry_run or _remove(each):
            total_bytes += freed_bytes
            print(f"{'would remove' if dry_run else 'removed'} {each.path} ({decimal(freed_bytes)}): {each.reason}")
    print(f"{decimal(total_bytes)} {'would be freed' if dry_run else 'freed'}")


def garbage(runs: Sequence[Run], *, keep: int | None) -> Iterator[Garbage]:
    """Yield what can be removed; `runs` are all runs, the newest first. Without `keep`, no whole run is removed."""
    num_kept = len(runs) if keep is None else keep
    for run in runs[num_kept:]:
        if not run.is_running:
            yield Garbage(run.folder, f"older than the newest {keep}", run)
    finished = [run.started for run in runs if run.state == "finished"]
    for run in runs[1:num_kept]:  # the run started last always stays
        has_failed = run.state != "finished" and not run.is_running
        is_superseded = any(run.started < started for started in finished)
        training = run.stages.get("train_grpo")
        has_policy = training is not None and training.finished is not None  # which may exist only here
        if has_failed and is_superseded and not has_policy and (run.folder / ARTIFACTS).is_dir():
            yield Garbage(run.folder / ARTIFACTS, f"the run {run.state}, and a later one has finished")
    yield from _abandoned()


def _abandoned() -> Iterator[Garbage]:
    """Yield folders of unfinished work without a checkpoint, or of other code than this checkout has."""
    for folder in sorted(WORK.glob("*/[!.]*/")):
        step, fingerprint = last_step(folder), fingerprint_in(folder)
        if step is None:
            yield Garbage(folder, "has no checkpoint")
        elif fingerprint is None or fingerprint.get("files") != lineage.stage_files(folder.parent.name):
            yield Garbage(folder, f"step {step} of other code, which cannot be resumed")


def _remove(item: Garbage) -> bool:
    """Remove garbage and return True; return False if a process has locked the work meanwhile."""
    if item.run:
        remove_run(item.run)
        return True
    # Only folders of unfinished work have locks.
    with reserved(item.path) if item.path.name != ARTIFACTS else nullcontext(True) as is_free:
        if is_free:
            durable.discard(item.path)
        return is_free
