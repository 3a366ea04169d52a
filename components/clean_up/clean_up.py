"""The last task of a run on a cluster: nothing is left behind, and what became of the run can be read in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.clean_up.tasks import Task, tasks_of
from components.cluster.kube import connect, is_transient, own_namespace
from components.cluster.reaper import delete_run
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say
from components.shared.stage import exit_on_error
from components.shared.task import with_retries


@dataclass(frozen=True)
class Ending:
    """How a run ended, as Kubeflow tells its exit handler."""

    run_id: str
    state: str
    """SUCCEEDED, FAILED or CANCELLED."""
    error: str


def run(ending: Ending, namespace: str, page: str) -> None:
    """Do the clean-up as a Kubeflow task, with the summary written to `page` also where something went wrong."""
    with exit_on_error("clean_up"):
        removed: list[str] = []
        with_retries("clean_up", lambda: clean_up(ending, namespace, Path(page), removed))


def clean_up(ending: Ending, namespace: str, page: Path, removed: list[str]) -> None:
    """Remove what the run has left, then write the summary; `removed` names what attempts before have removed.

    Raises:
        PipelineError: The cluster refuses, so something may be left; the summary says so.
        RetryableError: The cluster does not answer, so something may be left; the summary says so.
    """
    tasks: list[Task] = []
    try:
        api = connect()
        removed += delete_run(api, namespace or own_namespace(), ending.run_id)
        tasks = tasks_of(api, own_namespace(), ending.run_id)
    except (client.ApiException, HTTPError, PipelineError) as error:
        _write(page, summary(ending, tasks, [f"It may be that something is left: {_reason(error)}"]))
        if isinstance(error, client.ApiException) and not is_transient(error):
            raise PipelineError(f"the cluster refuses: {_reason(error)}") from None
        raise RetryableError(f"the cluster does not answer: {_reason(error)}") from None
    left = [f"Removed: {', '.join(removed)}." if removed else "Nothing of the run was left in the cluster."]
    _write(page, summary(ending, tasks, left))
    say("clean_up", f"run {ending.run_id} {ending.state.lower()}; {len(removed)} objects removed")


def summary(ending: Ending, tasks: Sequence[Task], left: Sequence[str]) -> str:
    """Return the summary of a run as Markdown."""
    failed = [task for task in tasks if task.failed]
    lines = [f"# Run {ending.state.lower()}", "", f"Run {ending.run_id}.", *left, ""]
    lines += [f"**{task.name} failed: {task.outcome}.** {_cell(task.said)}" for task in failed]
    if ending.error:
        lines += ["", f"Kubeflow says: {_cell(ending.error)}"]
    if tasks:
        lines += ["", "| task | outcome | seconds | last words |", "|---|---|---|---|"]
        lines += [f"| {task.name} | {task.outcome} | {_seconds(task)} | {_cell(task.said)} |" for task in tasks]
        lines += ["", "Tasks that are not listed were served from the cache, or not reached."]
    return "\n".join([*lines, ""])


def _seconds(task: Task) -> str:
    return "" if task.seconds is None else f"{task.seconds:.0f}"


def _cell(text: str) -> str:
    """Text that cannot end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _reason(error: Exception) -> str:
    if isinstance(error, client.ApiException):
        return f"{error.status} {error.reason}"
    return str(error)


def _write(page: Path, text: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
