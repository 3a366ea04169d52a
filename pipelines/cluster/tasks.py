"""The tasks of a run as Kubeflow Pipelines tells them, one for each stage of the graph."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

FINISHED = {"SUCCEEDED", "SKIPPED", "FAILED", "CANCELED"}
"""States of a run or a task that never change again."""
_EXECUTOR = re.compile(r"executor(\(\d+\))?")


@dataclass(frozen=True)
class Task:
    """A stage of a run."""

    name: str
    """In the graph, such as `train_grpo` or `evaluate_2`."""
    title: str
    """On the page, such as `evaluate sft`."""
    state: str
    """PENDING, RUNNING, SUCCEEDED ..."""
    started: datetime | None
    ended: datetime | None
    pods: tuple[str, ...]
    """Pods of its attempts, oldest first."""

    @property
    def seconds(self) -> float | None:
        """From start to end; None as long as it has not ended."""
        return (self.ended - self.started).total_seconds() if self.started and self.ended else None


def tasks(run: Any) -> list[Task]:
    """Return the stages of a run that have begun, in the order in which they did."""
    details = (run.run_details.task_details if run.run_details else None) or []
    titles = dict(_titles(run.pipeline_spec or {}))
    by_hash = {_hash(each.pod_name or each.task_id): each for each in details}
    found = [_task(each, titles, by_hash) for each in details if each.display_name in titles]
    return sorted(found, key=lambda task: (task.started is None, task.started, task.name))


def planned(run: Any) -> list[str]:
    """Return the titles of all stages of the graph, as far as the run tells."""
    return [title for _, title in _titles(run.pipeline_spec or {})]


def _titles(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each task that runs a container, with its title: those of the root, and of the graphs inside it."""
    spec = spec.get("pipeline_spec", spec)
    components = spec.get("components", {})
    graphs = [spec.get("root", {}), *components.values()]
    for graph in graphs:
        for name, task in graph.get("dag", {}).get("tasks", {}).items():
            inner = components.get(task.get("componentRef", {}).get("name"), {})
            if "dag" not in inner:
                yield name, task.get("taskInfo", {}).get("name", name).replace("-", "_")


def _task(detail: Any, titles: Mapping[str, str], by_hash: Mapping[str, Any]) -> Task:
    return Task(
        name=detail.display_name.replace("-", "_"),
        title=titles[detail.display_name],
        state=detail.state or "PENDING",
        started=_time(detail.start_time),
        ended=_time(detail.end_time),
        pods=tuple(_pods(detail, by_hash)),
    )


def _pods(detail: Any, by_hash: Mapping[str, Any]) -> Iterator[str]:
    """The pods in which a task's own code runs: below it, named executor, one for each attempt where it is retried."""
    for child in detail.child_tasks or []:
        inner = by_hash.get(_hash(child.pod_name))
        if inner is None or not _EXECUTOR.fullmatch(inner.display_name):
            continue  # its driver, or a task that comes after it
        attempts = list(_pods(inner, by_hash))
        yield from attempts or [inner.pod_name]


def _hash(name: str | None) -> str:
    """What the name of a pod and the id of its node share: the last part."""
    return (name or "").rpartition("-")[2]


def _time(moment: datetime | None) -> datetime | None:
    # What has not happened comes as 1970.
    return moment if moment and moment.year > 1970 else None
