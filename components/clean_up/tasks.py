"""The tasks of a run as their pods show them: the one place where the cluster itself keeps times and last words."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

from kubernetes import client

TASK_LABEL = "grpo-pipeline/task"
"""Label of each task's pod, with the name of the task."""
_RUN_LABEL = "pipeline/runid"
"""Label that Kubeflow gives every pod of a run."""
_CONTAINER = "main"
_TAIL_LINES = 200
_OTHERS = re.compile(r"\[|[IWEF]\d{4} |time=|Traceback|$")
"""How lines begin that are of Kubeflow and Argo, and not of the stage."""
_MEANINGS = {
    2: "something is to be corrected",
    3: "the gate is missed",
    4: "nothing is new",
    75: "may work the next time",
    137: "killed",
    143: "told to stop",
}
"""Exit codes with a meaning of their own."""


@dataclass(frozen=True)
class Task:
    """What became of one task."""

    name: str
    seconds: float | None
    """Of its container, where it has ended."""
    outcome: str
    failed: bool
    said: str
    """The last line that it said, or its error."""


def tasks_of(api: client.ApiClient, namespace: str, run_id: str) -> list[Task]:
    """Return the tasks of a run that have or had a pod, in the order of their pods; of retries the last.

    A task that was served from the cache, or not reached, has none.
    """
    core = client.CoreV1Api(api)
    pods = core.list_namespaced_pod(namespace, label_selector=f"{_RUN_LABEL}={run_id},{TASK_LABEL}").items
    pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
    newest = {pod.metadata.labels[TASK_LABEL]: pod for pod in pods}
    return [_task(name, pod, _last_words(core, namespace, pod)) for name, pod in newest.items()]


def _task(name: str, pod: Any, said: str) -> Task:
    container = next((each for each in pod.status.container_statuses or [] if each.name == _CONTAINER), None)
    ended = container.state.terminated if container else None
    if ended is None:
        return Task(name, None, pod.status.phase.lower(), pod.status.phase == "Failed", said)
    seconds = (ended.finished_at - ended.started_at).total_seconds()
    outcome = "done" if ended.exit_code == 0 else f"exit code {ended.exit_code}: {_meaning(ended)}"
    return Task(name, seconds, outcome, ended.exit_code != 0, said)


def _meaning(ended: Any) -> str:
    if ended.reason == "OOMKilled":
        return "out of memory"
    return _MEANINGS.get(ended.exit_code, ended.reason or "no reason given")


def _last_words(core: client.CoreV1Api, namespace: str, pod: Any) -> str:
    """The last line in which a stage speaks to people; of an error, that."""
    name = pod.metadata.name
    try:
        log = core.read_namespaced_pod_log(name, namespace, container=_CONTAINER, tail_lines=_TAIL_LINES)
    except client.ApiException:  # it has not started, or its log is gone: the rest of the summary stands without
        return ""
    lines = log.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "; ".join(itertools.takewhile(lambda line: not _OTHERS.match(line), lines[errors[-1] :]))
    said = [line for line in lines if re.match(r"[a-z_]+: .", line)]
    return said[-1] if said else ""
