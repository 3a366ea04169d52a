"""What the stages of a run print, as long as Kubeflow keeps it: from their pods, or from its archive after them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from components.shared.errors import PipelineError
from pipelines.cluster.explained import explained
from pipelines.cluster.runs import Cluster
from pipelines.cluster.tasks import FINISHED, Task, planned, tasks

_LOG = "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log"
_POLL_S = 3.0


def read(cluster: Cluster, run_id: str, pod: str) -> str:
    """Return what a pod has printed so far; RetryableError where it has not begun."""
    with explained(cluster.endpoint, missing=f"{pod}: its log is gone"):
        answer = cluster.client._run_api.api_client.call_api(
            _LOG,
            "GET",
            path_params={"run_id": run_id, "node_id": pod},
            auth_settings=["Bearer"],
            _return_http_data_only=True,
            _preload_content=False,  # a log is no JSON
        )
        text: str = answer.data.decode("utf-8", errors="replace")
    return text


def last_error(cluster: Cluster, run_id: str, task: Task) -> str | None:
    """Return the line in which a stage says why it failed, if it has."""
    try:
        lines = read(cluster, run_id, task.pods[-1]).splitlines() if task.pods else []
    except PipelineError:
        return None
    errors = [line.strip() for line in lines if line.lstrip().startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None


def logs(cluster: Cluster, run: Any, stage: str | None) -> Iterator[str]:
    """Yield what the stages of a run have printed, or one of them, each under its title."""
    for task in _chosen(run, stage):
        for number, pod in enumerate(task.pods, start=1):
            yield _heading(task, number)
            try:
                yield from read(cluster, run.run_id, pod).splitlines()
            except PipelineError as error:
                yield f"({error})"


def follow(
    cluster: Cluster, run_id: str, stage: str | None, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield what the stages print, as they do, until the run or the stage has ended."""
    shown: dict[str, int] = {}
    current = ""
    while True:
        run = cluster.get(run_id)
        for task in _chosen(run, stage):
            for number, pod in enumerate(task.pods, start=1):
                new = _new_lines(cluster, run, task, pod, shown)
                if new and pod != current:
                    yield _heading(task, number)
                    current = pod
                yield from new
        if _over(run, stage):
            return
        sleep(_POLL_S)


def _new_lines(cluster: Cluster, run: Any, task: Task, pod: str, shown: dict[str, int]) -> list[str]:
    """The lines that a pod has printed since the last time; none where its log cannot be had for the moment."""
    if shown.get(pod) == -1:
        return []
    try:
        lines = read(cluster, run.run_id, pod).splitlines(keepends=True)
    except PipelineError:
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


def _heading(task: Task, attempt: int) -> str:
    return f"==> {task.title}" + (f", attempt {attempt}" if len(task.pods) > 1 else "") + " <=="
