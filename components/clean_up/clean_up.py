"""The last task of a run on a cluster: it removes what is left of the run, and summarises how the run ended."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kubernetes import client

from components.cluster.kube import RetryPolicy, connect, own_namespace
from components.cluster.reaper import delete_run
from components.shared.errors import PipelineError
from components.shared.progress import say
from components.shared.stage import exit_on_error, with_retries

_RUN_LABEL, _TASK_LABEL = "pipeline/runid", "grpo-pipeline/task"
"""Labels of a task's pod: the run's, which Kubeflow sets, and the name of the task."""
_Task = tuple[str, str, str, str]
"""A line of the summary: the name of a task, its outcome, its running time in seconds, and its last line."""
_CONTAINER = "main"
_TAIL_LINES = 200
_FOREIGN_LINE = re.compile(r"\[|[IWEF]\d{4} |time=|Traceback|$")
"""How lines of Kubeflow and Argo begin, unlike those of a stage."""
_MEANINGS = {
    2: "something has to be corrected",
    3: "the gate was not passed",
    4: "nothing new to register",
    75: "transient, may work the next time",
    137: "killed",
    143: "stopped on request",
}


class Ending(NamedTuple):
    """How a run ended, as Kubeflow tells its exit handler."""

    run_id: str
    state: str
    """SUCCEEDED, FAILED or CANCELLED."""
    error: str


def run(ending: Ending, namespace: str, page: str) -> None:
    """Clean up as a Kubeflow task; the summary is written to `page` also where something went wrong."""
    with exit_on_error("clean_up"):
        removed: list[str] = []
        with_retries("clean_up", lambda: clean_up(ending, namespace, Path(page), removed))


def clean_up(ending: Ending, namespace: str, page: Path, removed: list[str]) -> None:
    """Remove what is left of the run, then write the summary, which says where something may be left.

    `removed` has the names of what earlier attempts removed. Raises as `RetryPolicy`.
    """
    once, run_id = RetryPolicy(limit_s=0), ending.run_id
    tasks: list[_Task] = []
    left = ""
    try:
        api, own = connect(), own_namespace()
        removed += once.call("remove training jobs", lambda: delete_run(api, namespace or own, run_id))
        left = f"Removed: {', '.join(removed)}." if removed else "Nothing of the run was left in the cluster."
        tasks = once.call("list the tasks of the run", lambda: _tasks_of(api, own, run_id))
    except PipelineError as error:
        left = left or f"Training jobs of the run may be left in the cluster: {error}"
        raise
    finally:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_summary(ending, tasks, left), encoding="utf-8")
    say("clean_up", f"run {run_id} {ending.state.lower()}; {len(removed)} objects removed")


def _summary(ending: Ending, tasks: Sequence[_Task], left: str) -> str:
    """Return the summary of a run as Markdown."""
    lines = [f"# Run {ending.state.lower()}", "", f"Run {ending.run_id}.", left, ""]
    for name, outcome, _, last_line in tasks:
        if outcome.startswith(("exit code", "failed")):
            lines.append(f"**{name} failed: {outcome}.** {last_line}")
    if ending.error:
        lines += ["", f"Error from Kubeflow: {_cell(ending.error)}"]
    if tasks:
        lines += ["", "| task | outcome | seconds | last line |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(task)} |" for task in tasks]
        lines += ["", "Tasks that are not listed were taken from the cache, or not reached."]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Return text that cannot end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _tasks_of(api: client.ApiClient, namespace: str, run_id: str) -> list[_Task]:
    """Return the tasks of a run that have a pod, in the order of their pods; of retries, the last."""
    core = client.CoreV1Api(api)
    pods = core.list_namespaced_pod(namespace, label_selector=f"{_RUN_LABEL}={run_id},{_TASK_LABEL}").items
    pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
    newest = {pod.metadata.labels[_TASK_LABEL]: pod for pod in pods}
    return [(name, *_outcome(pod), _cell(_last_line(core, pod))) for name, pod in newest.items()]


def _outcome(pod: Any) -> tuple[str, str]:
    """Return how the container of a task ended, and after how many seconds."""
    states = [each.state for each in pod.status.container_statuses or [] if each.name == _CONTAINER]
    ended = states[0].terminated if states else None
    if ended is None:
        return pod.status.phase.lower(), ""
    is_memory = ended.reason == "OOMKilled"
    meaning = "out of memory" if is_memory else _MEANINGS.get(ended.exit_code, ended.reason or "no reason given")
    outcome = f"exit code {ended.exit_code}: {meaning}" if ended.exit_code else "done"
    return outcome, f"{(ended.finished_at - ended.started_at).total_seconds():.0f}"


def _last_line(core: client.CoreV1Api, pod: Any) -> str:
    """Return the last line that a stage printed for people; the whole error, where there is one."""
    name, namespace = pod.metadata.name, pod.metadata.namespace
    try:
        log = core.read_namespaced_pod_log(name, namespace, container=_CONTAINER, tail_lines=_TAIL_LINES)
    except client.ApiException:  # it has not started, or its log is gone: the summary does without
        return ""
    lines = log.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "; ".join(itertools.takewhile(lambda line: not _FOREIGN_LINE.match(line), lines[errors[-1] :]))
    return next((line for line in reversed(lines) if re.match(r"[a-z_]+: .", line)), "")
