"""What the stages of a run print, as long as Kubeflow keeps it: from their pods, or from its archive after them."""

import re
import time
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster import pods
from pipelines.cluster.nodes import DRIVER_TEMPLATE
from pipelines.cluster.runs import Cluster
from pipelines.cluster.tasks import CACHED, FINISHED, NOT_REACHED, Task, planned, tasks

_POLL_S = 3.0
_ERROR = "error: "
_OTHERS = re.compile(r"[EFIW]\d{4} \d\d:|time=|\[KFP |Error: exit status")
"""Beginnings of the lines that Kubeflow and Argo add to what a stage prints."""
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+\] (.*\S)", re.MULTILINE)
"""The line with which a program of Kubeflow's own ends."""
_STOPPED = "Error: exit status 143"
"""What Argo prints at the end of a container that ended by SIGTERM."""


def failures(cluster: Cluster, run: Any) -> list[list[str]]:
    """Return why each stage failed that did, in its own words where it left some: the reason, and lines with more."""
    found = [_failure(cluster, run, task) for task in tasks(run) if task.state == "FAILED"]
    if not found and run.error and run.error.message:
        return [[" ".join(run.error.message.split())]]
    return found


def _failure(cluster: Cluster, run: Any, task: Task) -> list[str]:
    if not task.pods:
        return [f"{task.title}: no pod of it ever began; see {cluster.url(run.run_id)}"]
    pod = task.pods[-1]
    try:
        text = pods.log(cluster, run, pod)
        reason = _driver_error(text, task) if DRIVER_TEMPLATE in pod else _error(text)
    except pods.NoLogError:
        return [f"{task.title}: {_no_log(cluster, run, task, pod)}"]
    except PipelineError as error:
        return [f"{task.title}: {error}"]
    if not reason and text.rstrip().endswith(_STOPPED):
        return [f"{task.title}: stopped from outside (SIGTERM): the run was ended, or the time of the stage was over"]
    return reason or [
        f"{task.title} ended without an error message; see `grpo-pipeline logs {run.run_id} --stage {task.name}`"
    ]


def _error(text: str) -> list[str]:
    """The last error that a stage printed, with the lines that belong to it."""
    lines = [line.strip() for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
    if not starts:
        return []
    first, *rest = lines[starts[-1] :]
    return [first.removeprefix(_ERROR), *takewhile(lambda line: line and not _OTHERS.match(line), rest)]


def _driver_error(text: str, task: Task) -> list[str]:
    """The last words of what prepares a stage, which is a program of Kubeflow's own."""
    return [f"{task.title}: could not be prepared: {words}" for words in _FATAL.findall(text)[-1:]]


LOST = "nothing of it runs any more: its pods are gone, and Kubeflow will never learn how it ended"
LOOK_EVERY = 12
"""Polls of a run that is waited for between looks at whether its pods are still there."""


def is_lost(cluster: Cluster, run: Any) -> bool:
    """Tell whether a run that Kubeflow takes for unfinished has no pod left, as where its workflow was deleted."""
    if run.state in FINISHED:
        return False
    begun = [task.pods[-1] for task in reversed(tasks(run)) if task.pods]
    try:
        return bool(begun) and all(pods.is_gone(cluster, pod) for pod in begun)
    except PipelineError:
        return False


def logs(cluster: Cluster, run: Any, stage: str | None) -> Iterator[str]:
    """Yield what the stages of a run have printed, or one of them, each under its title.

    Raises:
        PipelineError: There was nothing at all.
    """
    chosen, is_empty = _chosen(run, stage), True
    for task in chosen:
        if not task.pods and (stage or task.state != NOT_REACHED):
            yield from (_heading(task, 1), f"({_no_pod(task)})")
        for number, pod in enumerate(task.pods, start=1):
            yield _heading(task, number)
            try:
                yield from pods.log(cluster, run, pod).splitlines()
                is_empty = False
            except pods.NoLogError:
                yield f"({_no_log(cluster, run, task, pod)})"
    _refuse_if(is_empty, run, stage)


def follow(
    cluster: Cluster, run_id: str, stage: str | None, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield what the stages print, as they do, until the run or the stage has ended.

    Raises:
        PipelineError: There was nothing at all, or nothing is left of the run.
    """
    shown: dict[str, int] = {}
    current, is_empty = "", True
    for poll in count(1):
        run = cluster.get(run_id)
        for task in _chosen(run, stage):
            for number, pod in enumerate(task.pods, start=1):
                new = _new_lines(cluster, run, task, pod, shown)
                is_empty = is_empty and not new
                if new and pod != current:
                    yield _heading(task, number)
                    current = pod
                yield from new
        if _over(run, stage):
            return _refuse_if(is_empty, run, stage)
        if poll % LOOK_EVERY == 0 and is_lost(cluster, run):
            raise PipelineError(f"{run.display_name}: {LOST}")
        sleep(_POLL_S)


def _new_lines(cluster: Cluster, run: Any, task: Task, pod: str, shown: dict[str, int]) -> list[str]:
    """The lines that a pod has printed since the last time; none where its log cannot be had for the moment."""
    if shown.get(pod) == -1:
        return []
    try:
        lines = pods.log(cluster, run, pod).splitlines(keepends=True)
    except (pods.NoLogError, RetryableError):
        return []
    over = task.state in FINISHED or run.state in FINISHED
    whole = lines if over or not lines or lines[-1].endswith("\n") else lines[:-1]
    new = whole[max(0, shown.get(pod, 0)) :]
    shown[pod] = -1 if over else len(whole)
    return [line.rstrip("\r\n") for line in new]


def _over(run: Any, stage: str | None) -> bool:
    states = [task.state for task in _chosen(run, stage)] if stage else []
    return run.state in FINISHED or (bool(states) and all(state in FINISHED for state in states))


def _chosen(run: Any, stage: str | None) -> list[Task]:
    """The stages asked for, which may be named as in the graph or as on the page."""
    begun = tasks(run)
    if stage is None:
        return begun
    wanted = stage.replace("-", "_")
    if wanted not in {*planned(run), *(task.name for task in begun)}:
        raise PipelineError(f"{stage}: no such stage; there are {', '.join(planned(run))}")
    return [task for task in begun if wanted in (task.name, task.title)]


def _no_pod(task: Task) -> str:
    reasons = {CACHED: "it did not run: the cache has its outputs", NOT_REACHED: "it was not reached"}
    return reasons.get(task.state, "no pod of it has begun")


def _no_log(cluster: Cluster, run: Any, task: Task, pod: str) -> str:
    """Why there is no log of a pod."""
    reason = pods.warning(cluster, pod)
    if reason:
        return f"its pod printed nothing: {reason}"
    if task.state in FINISHED or run.state in FINISHED:
        return "its log is gone: Kubeflow has removed the pod, and the log was not archived"
    return "its pod has not printed anything yet"


def _refuse_if(is_empty: bool, run: Any, stage: str | None) -> None:
    if is_empty:
        raise PipelineError(f"{run.display_name}: no log of {stage or 'any stage'} to be read")


def _heading(task: Task, attempt: int) -> str:
    return f"==> {task.title}" + (f", attempt {attempt}" if len(task.pods) > 1 else "") + " <=="
