"""The tasks of a run as Kubeflow Pipelines tells them, one for each stage of the graph."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipelines.cluster.nodes import Leaf, leaves

CACHED = "CACHED"
"""State of a stage that did not run: the cache had its outputs."""
NOT_REACHED = "NOT_REACHED"
"""State of a stage that was left out because another one had failed."""
FINISHED = {"SUCCEEDED", "SKIPPED", "FAILED", "CANCELED", CACHED}
"""States of a run or a task that never change again."""


@dataclass(frozen=True)
class Task:
    """A stage of a run."""

    name: str
    """In the graph, such as `train_grpo` or `evaluate_2`."""
    title: str
    """On the page, such as `evaluate sft`."""
    state: str
    """PENDING, RUNNING, SUCCEEDED ..., CACHED or NOT_REACHED."""
    started: datetime | None
    ended: datetime | None
    pods: tuple[str, ...]
    """Pods of its attempts, oldest first; those that prepare it where that failed."""

    @property
    def seconds(self) -> float | None:
        """From start to end; None as long as it has not ended."""
        return (self.ended - self.started).total_seconds() if self.started and self.ended else None


def tasks(run: Any) -> list[Task]:
    """Return the stages of a run that have begun, in the order in which they did, and then those left out."""
    details = (run.run_details.task_details if run.run_details else None) or []
    by_name = {each.display_name: each for each in details}
    known = (_task(leaf, by_name) for leaf in leaves(run.pipeline_spec or {}, details))
    found = [task for task in known if task is not None]
    return sorted(found, key=lambda task: (task.started is None, task.started))


def was_stopped(run: Any) -> bool:
    """Tell whether somebody ended a run; Kubeflow calls it failed then."""
    return run.state == "CANCELED" or any(each.state == "CANCELING" for each in run.state_history or [])


def planned(run: Any) -> list[str]:
    """Return the titles of all stages of the graph, as far as the run tells."""
    return [leaf.title for leaf in leaves(run.pipeline_spec or {}, [])]


def _task(leaf: Leaf, by_name: dict[str, Any]) -> Task | None:
    """What the run tells of a stage; None if nothing yet."""
    detail, driver = by_name.get(leaf.name), by_name.get(f"{leaf.name}-driver")
    is_unprepared = driver is not None and driver.state == "FAILED"
    shown = driver if is_unprepared else detail
    if shown is None:
        return None
    state = _state(shown, leaf)
    # A task that is left out has the time at which that was decided.
    has_begun = state != NOT_REACHED
    return Task(
        name=leaf.name.replace("-", "_"),
        title=leaf.title,
        state=state,
        started=_time(shown.start_time) if has_begun else None,
        ended=_time(shown.end_time) if has_begun else None,
        pods=leaf.driver_pods if is_unprepared else leaf.pods,
    )


def _state(detail: Any, leaf: Leaf) -> str:
    if detail.state is None or detail.state == "RUNTIME_STATE_UNSPECIFIED":
        return NOT_REACHED
    return CACHED if detail.state == "SUCCEEDED" and leaf.has_no_attempt else str(detail.state)


def _time(moment: datetime | None) -> datetime | None:
    # What has not happened comes as the year 1 or 1970.
    return moment if moment and moment.year > 1970 else None
