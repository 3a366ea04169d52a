"""Runs, the stages of one, and schedules, as tables; and a run as it goes on, as lines."""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any

from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster import cron
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.logs import LOST, LOST_EVERY, failures, is_lost
from pipelines.cluster.schedules import listed
from pipelines.cluster.stages import CACHED, FINISHED, NOT_REACHED, StageStatus, planned, stages, was_stopped
from pipelines.run.journal import duration
from pipelines.run.screen import Screen, Style

_NUM_RUNS = 10
_ID_LENGTH = 8
_POLL_S = 10.0
_PATIENCE_S = 600.0
"""Longest time without an answer: a server that is restarted, a laptop that sleeps."""
_ENDINGS = {
    "SUCCEEDED": ("done in {}", Style.GREEN),
    "SKIPPED": ("skipped", Style.DIM),
    "FAILED": ("failed after {}", Style.RED),
    "CANCELED": ("stopped after {}", Style.YELLOW),
    CACHED: ("not run: the cache has its outputs", Style.DIM),
}


def of_runs(kubeflow: Kubeflow) -> list[str]:
    """Return a line for each of the newest runs."""
    runs = list(islice(kubeflow.runs(page_size=_NUM_RUNS), _NUM_RUNS))
    if not runs:
        return ["no runs yet; `grpo-pipeline submit` starts one"]
    header = ("run", "name", "state", "started (UTC)", "took")
    return _table([header, *(_run_row(run) for run in runs)])


def of_run(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return the state of a run and of its stages, and why it failed."""
    known = stages(run)
    lines = [f"{run.display_name}  {run.run_id}  {_state(run.state)}", kubeflow.url(run.run_id)]
    if known:
        lines += ["", *_table([("stage", "state", "started (UTC)", "took"), *(_stage_row(each) for each in known)])]
    elif not planned(run):
        lines += ["", "its stages are unknown: the pipeline version that it was started from has been deleted"]
    if is_lost(kubeflow, run):
        lines += ["", LOST]
    for reason, *more in failures(kubeflow, run):
        lines += ["", f"error: {reason}", *more]
    return lines


def of_schedules(kubeflow: Kubeflow) -> list[str]:
    """Return a line for each schedule that this program created."""
    schedules = listed(kubeflow)
    if not schedules:
        return ["no schedules; `grpo-pipeline schedule apply` creates one"]
    return _table([("schedule", "state", "cron", "meaning", "next"), *(_schedule_row(each) for each in schedules)])


def wait(
    kubeflow: Kubeflow,
    run_id: str,
    screen: Screen,
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Show a run until it has ended or no pod of it is left; return 0 if it succeeded and 1 if it did not."""
    progress = _Progress(screen)
    started = answered = now()
    for poll in count(1):
        try:
            run = kubeflow.run(run_id)
            answered = now()
        except RetryableError as error:
            if now() - answered > _PATIENCE_S:
                raise
            print(f"{error}; trying again", file=sys.stderr)
            sleep(_POLL_S)
            continue
        progress.show(run)
        if run.state in FINISHED:
            return _show_end(kubeflow, run, screen)
        if poll % LOST_EVERY == 0 and is_lost(kubeflow, run):
            screen.error(LOST)
            return 1
        progress.show_running(run, now() - started)
        sleep(_POLL_S)
    raise AssertionError("a run is waited for until it ends")


class _Progress:
    """Shows what has changed since the last time."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._begun: set[str] = set()
        self._ended: set[str] = set()

    def show(self, run: Any) -> None:
        """Show the stages that have begun or ended since the last time."""
        total = len(planned(run))
        for stage in stages(run):
            if stage.state not in ("PENDING", NOT_REACHED) and stage.name not in self._begun:
                self._begun.add(stage.name)
                self._screen.header(len(self._begun), total, stage.title)
            if stage.state in FINISHED and stage.name not in self._ended:
                self._ended.add(stage.name)
                ending, style = _ENDINGS[stage.state]
                self._screen.detail(f"{stage.title} {ending.format(duration(stage.seconds or 0.0))}", style)

    def show_running(self, run: Any, waited_s: float) -> None:
        """Draw the running stages and the time over the last line, on a terminal."""
        if self._screen.live:
            running = [stage.title for stage in stages(run) if stage.state == "RUNNING"]
            titles = ", ".join(running) or _state(run.state)
            print(f"\r\x1b[K      {titles}  {duration(waited_s)}", end="", flush=True)


def _show_end(kubeflow: Kubeflow, run: Any, screen: Screen) -> int:
    """Show how a run ended, and why where it failed."""
    if run.state == "SUCCEEDED":
        screen.show(f"succeeded  {kubeflow.url(run.run_id)}", Style.GREEN)
        return 0
    for reason, *more in failures(kubeflow, run):
        screen.error(reason, *more)
    screen.show(f"{'stopped' if was_stopped(run) else 'failed'}  {kubeflow.url(run.run_id)}", Style.RED)
    return 1


def _run_row(run: Any) -> tuple[str, ...]:
    ended = run.finished_at if run.state in FINISHED else None
    times = (_clock(run.created_at), _took(run.created_at, ended))
    return (run.run_id[:_ID_LENGTH], run.display_name, _state(run.state), *times)


def _stage_row(stage: StageStatus) -> tuple[str, ...]:
    took = "-" if stage.state == CACHED else _took(stage.started, stage.ended)
    return (stage.title, _state(stage.state), _clock(stage.started), took)


def _schedule_row(schedule: Any) -> tuple[str, ...]:
    text = schedule.trigger.cron_schedule.cron
    try:
        cron.check(text)
        meaning, next_time = cron.describe(text), cron.next_times(text, datetime.now(UTC), 1)[0]
    except PipelineError:
        meaning, next_time = "?", "?"
    is_enabled = schedule.status == "ENABLED"
    return (schedule.display_name, _state(schedule.status), text, meaning, next_time if is_enabled else "-")


def _state(state: str | None) -> str:
    return (state or "PENDING").lower().replace("_", " ")


def _clock(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M") if moment else "-"


def _took(started: datetime | None, ended: datetime | None) -> str:
    return duration((ended - started).total_seconds()) if started and ended else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines in which the columns are aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
