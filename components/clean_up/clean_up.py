"""The last task of a run on a cluster: it removes what is left of the run, and summarises how the run ended."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster.kube import connect, error_message, is_transient, own_namespace
from components.cluster.reaper import delete_run
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.stage import exit_on_error, with_retries

TASK_LABEL = "grpo-pipeline/task"
"""Label of each task's pod: the name of the task."""
_RUN_LABEL = "pipeline/runid"
"""Label that Kubeflow gives every pod of a run."""
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
"""Exit codes with a meaning of their own."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, as Kubeflow tells its exit handler."""

    run_id: str
    state: str
    """SUCCEEDED, FAILED or CANCELLED."""
    error: str


@dataclass(frozen=True)
class Task:
    """How a task ended."""

    name: str
    seconds: float | None
    """Running time of its container, once that has ended."""
    outcome: str
    failed: bool
    last_line: str
    """The last line that the stage printed for people, or its error."""


def run(ending: Ending, namespace: str, page: str) -> None:
    """Clean up as a Kubeflow task; the summary is written to `page` also where something went wrong."""
    with exit_on_error("clean_up"):
        removed: list[str] = []
        with_retries("clean_up", lambda: clean_up(ending, namespace, Path(page), removed))


def clean_up(ending: Ending, namespace: str, page: Path, removed: list[str]) -> None:
    """Remove what is left of the run, then write the summary; `removed` has the names of what was removed before.

    Raises:
        PipelineError: The cluster refuses; the summary says that something may be left.
        RetryableError: The cluster does not answer; the summary says that something may be left.
    """
    tasks: list[Task] = []
    try:
        api = connect()
        removed += delete_run(api, namespace or own_namespace(), ending.run_id)
        tasks = _tasks_of(api, own_namespace(), ending.run_id)
    except (client.ApiException, HTTPError, PipelineError) as error:
        reason = str(error) if isinstance(error, PipelineError) else error_message(error)
        _write(page, _summary(ending, tasks, f"Training jobs of the run may be left in the cluster: {reason}"))
        if isinstance(error, client.ApiException) and not is_transient(error):
            raise PipelineError(f"the cluster refuses: {reason}") from None
        raise RetryableError(f"the cluster does not answer: {reason}") from None
    left = f"Removed: {', '.join(removed)}." if removed else "Nothing of the run was left in the cluster."
    _write(page, _summary(ending, tasks, left))
    say("clean_up", f"run {ending.run_id} {ending.state.lower()}; {len(removed)} objects removed")


def _summary(ending: Ending, tasks: Sequence[Task], left: str) -> str:
    """Return the summary of a run as Markdown."""
    lines = [f"# Run {ending.state.lower()}", "", f"Run {ending.run_id}.", left, ""]
    lines += [f"**{task.name} failed: {task.outcome}.** {_cell(task.last_line)}" for task in tasks if task.failed]
    if ending.error:
        lines += ["", f"Error from Kubeflow: {_cell(ending.error)}"]
    if tasks:
        lines += ["", "| task | outcome | seconds | last line |", "|---|---|---|---|"]
        for task in tasks:
            seconds = "" if task.seconds is None else f"{task.seconds:.0f}"
            lines.append(f"| {task.name} | {task.outcome} | {seconds} | {_cell(task.last_line)} |")
        lines += ["", "Tasks that are not listed were taken from the cache, or not reached."]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Return text that cannot end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _write(page: Path, text: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def _tasks_of(api: client.ApiClient, namespace: str, run_id: str) -> list[Task]:
    """Return the tasks of a run that have a pod, in the order of their pods; of retries, the last.

    A task that was taken from the cache, or not reached, has none.
    """
    core = client.CoreV1Api(api)
    pods = core.list_namespaced_pod(namespace, label_selector=f"{_RUN_LABEL}={run_id},{TASK_LABEL}").items
    pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
    newest = {pod.metadata.labels[TASK_LABEL]: pod for pod in pods}
    return [_task(name, pod, _last_line(core, namespace, pod)) for name, pod in newest.items()]


def _task(name: str, pod: Any, last_line: str) -> Task:
    container = next((each for each in pod.status.container_statuses or [] if each.name == _CONTAINER), None)
    ended = container.state.terminated if container else None
    if ended is None:
        return Task(name, None, pod.status.phase.lower(), pod.status.phase == "Failed", last_line)
    seconds = (ended.finished_at - ended.started_at).total_seconds()
    meaning = _MEANINGS.get(ended.exit_code, ended.reason or "no reason given")
    if ended.reason == "OOMKilled":
        meaning = "out of memory"
    outcome = f"exit code {ended.exit_code}: {meaning}" if ended.exit_code else "done"
    return Task(name, seconds, outcome, ended.exit_code != 0, last_line)


def _last_line(core: client.CoreV1Api, namespace: str, pod: Any) -> str:
    """Return the last line that a stage printed for people; the whole error, where there is one."""
    name = pod.metadata.name
    try:
        log = core.read_namespaced_pod_log(name, namespace, container=_CONTAINER, tail_lines=_TAIL_LINES)
    except client.ApiException:  # it has not started, or its log is gone: the summary does without
        return ""
    lines = log.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "; ".join(itertools.takewhile(lambda line: not _FOREIGN_LINE.match(line), lines[errors[-1] :]))
    printed = [line for line in lines if re.match(r"[a-z_]+: .", line)]
    return printed[-1] if printed else ""
