"""Shows the runs of a cluster, shows a run until it has ended, and stops runs."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from components.report.formatting import duration
from components.shared.errors import PipelineError
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.logs import LOST, activity, failures, is_lost, outcome, poll
from pipelines.cluster.stages import (
    CACHED,
    FINISHED,
    NOT_REACHED,
    Stage,
    compiled_in,
    found_nothing_new,
    is_stopped,
    parameter,
    stages,
)
from pipelines.run.screen import Screen, Style
from pipelines.tables import aligned

_NUM_RUNS = 10
_ACTIVITY_S = 30.0
"""Time between requests for the activity of running stages, while a run is shown until it has ended."""
_ID_LENGTH = 8
_ENDINGS = {
    "SUCCEEDED": ("done in {}", Style.GREEN),
    "SKIPPED": ("skipped", Style.DIM),
    "FAILED": ("failed after {}", Style.RED),
    "CANCELED": ("stopped after {}", Style.YELLOW),
    CACHED: ("not run: the cache has its outputs", Style.DIM),
}


def listed(kubeflow: Kubeflow) -> list[str]:
    """Return a line for each of the newest runs."""
    from components.preflight.form import SKIP_IF_UNCHANGED

    runs = list(islice(kubeflow.runs(page_size=_NUM_RUNS), _NUM_RUNS))
    if not runs:
        return ["no runs yet; `grpo-pipeline submit` starts one"]
    rows = [("run", "name", "state", "started (UTC)", "took")]
    for run in runs:
        if run.state == "SUCCEEDED" and parameter(run, SKIP_IF_UNCHANGED):
            run = kubeflow.run(run.run_id)  # noqa: PLW2901 - a list of runs has no stages
        ended = run.finished_at if run.state in FINISHED else None
        times = (_clock(run.created_at), _took(run.created_at, ended))
        rows.append((run.run_id[:_ID_LENGTH], run.display_name, _state(run), *times))
    return aligned(rows).splitlines()


def show(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return lines with the state of a run and of its stages, and its activity, its outcome or the reason it failed."""
    lines = [f"{run.display_name}  {run.run_id}  {_state(run)}", kubeflow.url(run.run_id)]
    rows = [("stage", "state", "started (UTC)", "took")]
    known = stages(run)
    for stage in (each for each in known if each.state):
        took = "-" if stage.state == CACHED else _took(stage.started, stage.ended)
        attempt = f" (attempt {len(stage.pods)})" if len(stage.pods) > 1 else ""
        rows.append((stage.title, in_words(stage.state) + attempt, _clock(stage.started), took))
    if len(rows) > 1:
        lines += ["", *aligned(rows).splitlines()]
    elif not known:
        lines += ["", "its stages are unknown: the pipeline version that it was started from has been deleted"]
    if is_lost(kubeflow, run):
        summary = [LOST]
    else:
        summary = outcome(kubeflow, run) if run.state == "SUCCEEDED" else activity(kubeflow, run)
    lines += ["", *summary] if summary else []
    for reason, *more in failures(kubeflow, run):
        lines += ["", f"error: {reason}", *more]
    return lines


def wait(kubeflow: Kubeflow, run_id: str, screen: Screen, clock: Any = time) -> int:
    """Show a run until it has ended; return 0 if it succeeded and 1 if it did not."""
    shown: dict[str, str] = {}
    shown_activity: list[str] = []
    requested_s = clock.monotonic()
    for run in poll(kubeflow, run_id, clock):
        _show_stages(screen, stages(run), shown)
        now = clock.monotonic()
        if run.state not in FINISHED and now - requested_s >= _ACTIVITY_S:
            current_activity = activity(kubeflow, run)
            for line in current_activity:
                if line not in shown_activity:
                    screen.detail(line, Style.DIM)
            shown_activity, requested_s = current_activity, now
    if run.state == "SUCCEEDED":
        for line in outcome(kubeflow, run):
            screen.detail(line)
        screen.show(f"succeeded  {kubeflow.url(run_id)}", Style.GREEN)
        return 0
    for reason, *more in failures(kubeflow, run):
        screen.error(reason, *more)
    screen.show(f"{_state(run)}  {kubeflow.url(run_id)}", Style.RED)
    return 1


def stop(kubeflow: Kubeflow, run: Any) -> Iterator[str]:
    """Stop a run, then remove training jobs that steps leave if they are killed; yield a line about each."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect, error_message
    from components.cluster.reaper import delete_run
    from components.preflight.form import OVERRIDES, PRESET, overrides_of
    from components.shared.config import laid_over

    if run.state in FINISHED:
        yield f"{run.display_name}  had already ended: {_state(run)}"
    else:
        kubeflow.client.terminate_run(run.run_id)
        yield f"{run.display_name}  stopping"
    spec = run.pipeline_spec or {}
    preset = compiled_in(spec.get("pipeline_spec", spec), PRESET) or {}
    try:
        overrides = overrides_of({OVERRIDES: parameter(run, OVERRIDES) or ""})
        cluster = laid_over(preset, overrides).get("cluster") or {}
        removed = delete_run(connect(), cluster.get("namespace") or kubeflow.namespace, run.run_id)
    except (PipelineError, ApiException, HTTPError) as error:
        reason = str(error) if isinstance(error, PipelineError) else error_message(error)
        yield f"training jobs not removed; their steps or the reaper will remove them: {reason}"
    else:
        yield from (f"training job {name} removed" for name in removed)


def in_words(state: str | None) -> str:
    """Return a state of Kubeflow's as people write it."""
    return (state or "PENDING").lower().replace("_", " ")


def _show_stages(screen: Screen, every: Sequence[Stage], shown: dict[str, str]) -> None:
    """Show stages that have begun or ended, or begun another attempt; `shown` has the last text about each."""
    for stage in every:
        if stage.state in (None, "PENDING", NOT_REACHED):
            continue
        if stage.name not in shown:
            shown[stage.name] = ""
            screen.header(len(shown), len(every), stage.title)
        text, style = "", Style.YELLOW
        if stage.state in FINISHED:
            ending, style = _ENDINGS[stage.state]
            text = ending.format(_took(stage.started, stage.ended))
        elif len(stage.pods) > 1:
            text = f"attempt {len(stage.pods)}"
        if text and text != shown[stage.name]:
            screen.detail(f"{stage.title} {text}", style)
        shown[stage.name] = text


def _state(run: Any) -> str:
    if found_nothing_new(run):
        return "nothing new"
    return "stopped" if is_stopped(run) else in_words(run.state)


def _clock(moment: datetime | None) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M") if moment else "-"


def _took(started: datetime | None, ended: datetime | None) -> str:
    return duration((ended - started).total_seconds()) if started and ended else "-"
