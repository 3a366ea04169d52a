"""Runs, the stages of one, and schedules, as tables."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from components.shared.errors import PipelineError
from pipelines.cluster.cron import parse
from pipelines.cluster.cron_words import next_times, words
from pipelines.cluster.logs import LOST, failures, is_lost
from pipelines.cluster.runs import Cluster
from pipelines.cluster.schedules import listed
from pipelines.cluster.tasks import CACHED, FINISHED, Task, planned, tasks
from pipelines.run.journal import duration

_SHOWN = 10
_ID = 8


def of_runs(cluster: Cluster) -> list[str]:
    """Return a line for each of the newest runs."""
    runs = cluster.recent(_SHOWN)
    if not runs:
        return ["no runs yet; `grpo-pipeline submit` starts one"]
    header = ("run", "name", "state", "started (UTC)", "took")
    return _table([header, *(_run_row(run) for run in runs)])


def of_run(cluster: Cluster, run: Any) -> list[str]:
    """Return what has become of a run: its stages, and why it failed."""
    known = tasks(run)
    lines = [f"{run.display_name}  {run.run_id}  {_state(run.state)}", cluster.url(run.run_id)]
    if known:
        lines += ["", *_table([("stage", "state", "started (UTC)", "took"), *(_task_row(task) for task in known)])]
    elif not planned(run):
        lines += ["", "its stages are not known: the pipeline version that it was started from has been deleted"]
    if is_lost(cluster, run):
        lines += ["", LOST]
    for reason, *more in failures(cluster, run):
        lines += ["", f"error: {reason}", *more]
    return lines


def of_schedules(cluster: Cluster) -> list[str]:
    """Return a line for each schedule that was made here."""
    schedules = listed(cluster)
    if not schedules:
        return ["no schedules; `grpo-pipeline schedule apply` makes one"]
    return _table([("schedule", "state", "cron", "meaning", "next"), *(_schedule_row(each) for each in schedules)])


def _run_row(run: Any) -> tuple[str, ...]:
    ended = run.finished_at if run.state in FINISHED else None
    return (run.run_id[:_ID], run.display_name, _state(run.state), _clock(run.created_at), _took(run.created_at, ended))


def _task_row(task: Task) -> tuple[str, ...]:
    took = "-" if task.state == CACHED else _took(task.started, task.ended)
    return (task.title, _state(task.state), _clock(task.started), took)


def _schedule_row(schedule: Any) -> tuple[str, ...]:
    text = schedule.trigger.cron_schedule.cron
    try:
        cron = parse(text)
    except PipelineError:
        return (schedule.display_name, _state(schedule.status), text, "?", "?")
    following = next_times(cron, datetime.now(UTC), 1) if schedule.status == "ENABLED" else ["-"]
    return (schedule.display_name, _state(schedule.status), text, words(cron), following[0])


def _state(state: str | None) -> str:
    return (state or "PENDING").lower().replace("_", " ")


def _clock(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M") if moment else "-"


def _took(started: datetime | None, ended: datetime | None) -> str:
    return duration((ended - started).total_seconds()) if started and ended else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which the columns are aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
