"""Runs as a person sees them: listed, with their stages, as they go on, and stopped."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import Any

from components.shared.errors import PipelineError
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.logs import LOST, failures, is_lost, missing_images, poll
from pipelines.cluster.stages import CACHED, FINISHED, NOT_REACHED, parameter, stages
from pipelines.run.screen import Screen, Style, duration

_NUM_RUNS = 10
_ID_LENGTH = 8
_IMAGES_EVERY = 6
"""Polls of a run between checks whether its stages wait for images."""
_ENDINGS = {
    "SUCCEEDED": ("done in {}", Style.GREEN),
    "SKIPPED": ("skipped", Style.DIM),
    "FAILED": ("failed after {}", Style.RED),
    "CANCELED": ("stopped after {}", Style.YELLOW),
    CACHED: ("not run: the cache has its outputs", Style.DIM),
}


def listed(kubeflow: Kubeflow) -> list[str]:
    """Return a line for each of the newest runs."""
    runs = list(islice(kubeflow.runs(page_size=_NUM_RUNS), _NUM_RUNS))
    if not runs:
        return ["no runs yet; `grpo-pipeline submit` starts one"]
    rows = [("run", "name", "state", "started (UTC)", "took")]
    for run in runs:
        ended = run.finished_at if run.state in FINISHED else None
        times = (_clock(run.created_at), _took(run.created_at, ended))
        rows.append((run.run_id[:_ID_LENGTH], run.display_name, _state(run), *times))
    return table(rows)


def show(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return the state of a run and of its stages, and why it failed."""
    lines = [f"{run.display_name}  {run.run_id}  {_state(run)}", kubeflow.url(run.run_id)]
    rows = [("stage", "state", "started (UTC)", "took")]
    known = stages(run)
    for stage in (each for each in known if each.state):
        took = "-" if stage.state == CACHED else _took(stage.started, stage.ended)
        rows.append((stage.title, in_words(stage.state), _clock(stage.started), took))
    if len(rows) > 1:
        lines += ["", *table(rows)]
    elif not known:
        lines += ["", "its stages are unknown: the pipeline version that it was started from has been deleted"]
    if is_lost(kubeflow, run):
        lines += ["", LOST]
    lines += [line for image in missing_images(kubeflow, run) for line in ("", image)]
    for reason, *more in failures(kubeflow, run):
        lines += ["", f"error: {reason}", *more]
    return lines


def wait(kubeflow: Kubeflow, run_id: str, screen: Screen, clock: Any = time) -> int:
    """Show a run until it has ended; return 0 if it succeeded and 1 if it did not."""
    begun: set[str] = set()
    ended: set[str] = set()
    started = clock.monotonic()
    waited_for: set[str] = set()
    for number, run in enumerate(poll(kubeflow, run_id, clock), start=1):
        _show_changes(run, screen, begun, ended)
        for image in missing_images(kubeflow, run) if number % _IMAGES_EVERY == 0 else ():
            if image not in waited_for:
                waited_for.add(image)
                screen.detail(image, Style.YELLOW)
        if screen.live and run.state not in FINISHED:
            running = [stage.title for stage in stages(run) if stage.state == "RUNNING"]
            titles = ", ".join(running) or in_words(run.state)
            print(f"\r\x1b[K      {titles}  {duration(clock.monotonic() - started)}", end="", flush=True)
    if run.state == "SUCCEEDED":
        screen.show(f"succeeded  {kubeflow.url(run_id)}", Style.GREEN)
        return 0
    for reason, *more in failures(kubeflow, run):
        screen.error(reason, *more)
    screen.show(f"{_state(run)}  {kubeflow.url(run_id)}", Style.RED)
    return 1


def stop(kubeflow: Kubeflow, run: Any) -> Iterator[str]:
    """Stop a run, then remove its training jobs, which a step does not where it is killed within a second.

    Yields:
        A line about the run and about each job.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect
    from components.cluster.reaper import delete_run
    from components.preflight.form import OVERRIDES

    if run.state in FINISHED:
        yield f"{run.display_name}  had already ended: {_state(run)}"
    else:
        kubeflow.client.terminate_run(run.run_id)
        yield f"{run.display_name}  stopping"
    cluster = (parameter(run, OVERRIDES) or {}).get("cluster") or {}
    try:
        removed = delete_run(connect(), cluster.get("namespace") or kubeflow.namespace, run.run_id)
    except (PipelineError, ApiException, HTTPError) as error:
        reason = f"the Kubernetes API says {error.reason}" if isinstance(error, ApiException) else str(error)
        yield f"training jobs not removed; their steps or the reaper will remove them: {reason}"
    else:
        yield from (f"training job {name} removed" for name in removed)


def in_words(state: str | None) -> str:
    """Return a state of Kubeflow's as people write it."""
    return (state or "PENDING").lower().replace("_", " ")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines in which the columns are aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _show_changes(run: Any, screen: Screen, begun: set[str], ended: set[str]) -> None:
    """Show the stages that have begun or ended since the last time."""
    every = stages(run)
    for stage in every:
        if stage.state not in (None, "PENDING", NOT_REACHED) and stage.name not in begun:
            begun.add(stage.name)
            screen.header(len(begun), len(every), stage.title)
        if stage.state in FINISHED and stage.name not in ended:
            ended.add(stage.name)
            ending, style = _ENDINGS[stage.state]
            screen.detail(f"{stage.title} {ending.format(_took(stage.started, stage.ended))}", style)


def _state(run: Any) -> str:
    """Return the state of a run in words. Kubeflow calls a run failed that somebody has stopped."""
    history = [each.state for each in run.state_history or []]
    since_start = takewhile(lambda state: state != "RUNNING", reversed(history))  # the latest: a run can be retried
    is_stopped = run.state == "CANCELED" or (run.state == "FAILED" and "CANCELING" in since_start)
    return "stopped" if is_stopped else in_words(run.state)


def _clock(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M") if moment else "-"


def _took(started: datetime | None, ended: datetime | None) -> str:
    return duration((ended - started).total_seconds()) if started and ended else "-"
