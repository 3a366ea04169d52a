"""The stages of a run and their pods, read from what Kubeflow Pipelines tells about Argo's nodes.

Kubeflow's API names no pod. It lists, as `child_tasks` of each task, the ids of the nodes that come after it:
`WORKFLOW-NUMBER`, where the number is the FNV-1a hash of the node's name, and the name is the path to the node, such as
`WORKFLOW(0).root(0).exit-handler-1(0).train-grpo(0).executor(1)`. Since 2.17 every node is wrapped in retries, which
number it; before, only the executor of a task with retries was. A path is tried by looking for its id in those lists.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

CACHED = "CACHED"
"""State of a stage that did not run: the cache had its outputs."""
NOT_REACHED = "NOT_REACHED"
"""State of a stage that was skipped because another one had failed."""
FINISHED = {"SUCCEEDED", "SKIPPED", "FAILED", "CANCELED", CACHED}
"""States of a run or a stage that never change again."""
DRIVER_TEMPLATE = "system-container-driver"
_MOST_ATTEMPTS = 32


@dataclass(frozen=True)
class StageStatus:
    """How far a stage of a run is."""

    name: str
    """In the graph, such as `train_grpo` or `evaluate_2`."""
    title: str
    """On the page, such as `evaluate sft`."""
    state: str
    """PENDING, RUNNING, SUCCEEDED ..., CACHED or NOT_REACHED."""
    started: datetime | None
    ended: datetime | None
    pods: tuple[str, ...]
    """Pods of its attempts, oldest first; those of its driver, which prepares it, where that failed."""

    @property
    def seconds(self) -> float | None:
        """From start to end; None until it has ended."""
        return (self.ended - self.started).total_seconds() if self.started and self.ended else None


@dataclass(frozen=True)
class Leaf:
    """A task of the pipeline that runs a container."""

    name: str
    """In the graph, such as `evaluate-2`."""
    title: str
    pods: tuple[str, ...] = ()
    """Of its attempts, oldest first."""
    driver_pods: tuple[str, ...] = ()
    """Of the attempts to prepare it."""
    has_no_attempt: bool = False
    """Whether its container was reached and never started: not yet, or never because the cache has its outputs."""


def stages(run: Any) -> list[StageStatus]:
    """Return the stages of a run that have begun, in the order in which they did, and then those not reached."""
    details = (run.run_details.task_details if run.run_details else None) or []
    by_name = {each.display_name: each for each in details}
    known = (_status(leaf, by_name) for leaf in leaves(run.pipeline_spec or {}, details))
    return sorted(
        (stage for stage in known if stage is not None), key=lambda stage: (stage.started is None, stage.started)
    )


def planned(run: Any) -> list[str]:
    """Return the titles of all stages of the graph, as far as the run tells."""
    return [leaf.title for leaf in leaves(run.pipeline_spec or {}, [])]


def was_stopped(run: Any) -> bool:
    """Tell whether somebody stopped a run; Kubeflow calls it failed then."""
    return run.state == "CANCELED" or any(each.state == "CANCELING" for each in run.state_history or [])


def leaves(spec: Mapping[str, Any], details: Iterable[Any]) -> Iterator[Leaf]:
    """Yield every task of a pipeline that runs a container, with its pods as far as the details of a run tell them."""
    graph = _Graph(spec.get("pipeline_spec", spec), spec.get("platform_spec") or {}, _Nodes(details))
    yield from graph.leaves(graph.pipeline.get("root", {}), graph.nodes.roots)


def _status(leaf: Leaf, by_name: Mapping[str, Any]) -> StageStatus | None:
    """Return what the run tells of a stage; None if nothing yet."""
    detail, driver = by_name.get(leaf.name), by_name.get(f"{leaf.name}-driver")
    is_unprepared = driver is not None and driver.state == "FAILED"
    detail = driver if is_unprepared else detail
    if detail is None:
        return None
    state = str(detail.state)
    if detail.state in (None, "RUNTIME_STATE_UNSPECIFIED"):
        state = NOT_REACHED
    elif state == "SUCCEEDED" and leaf.has_no_attempt:
        state = CACHED
    # A task that is not reached has the time at which that was decided.
    started, ended = (None, None) if state == NOT_REACHED else (_time(detail.start_time), _time(detail.end_time))
    pods = leaf.driver_pods if is_unprepared else leaf.pods
    return StageStatus(leaf.name.replace("-", "_"), leaf.title, state, started, ended, pods)


def _time(moment: datetime | None) -> datetime | None:
    # What has not happened has the year 1 or 1970.
    return moment if moment and moment.year > 1970 else None


class _Nodes:
    """The nodes of a workflow that exist."""

    def __init__(self, details: Iterable[Any]) -> None:
        self._ids = {child.pod_name for each in details for child in each.child_tasks or []}
        self.workflow = next(iter(self._ids), "").rpartition("-")[0]
        attempts = self._attempts(self.workflow)
        self.is_numbered = bool(attempts)
        """Whether every node is wrapped in retries."""
        roots = [f"{name}.root" for name in attempts or [self.workflow]]
        self.roots = [each for root in roots for each in self._attempts(root) or [root]]

    def below(self, parents: Iterable[str], name: str) -> list[str]:
        """Return paths of the nodes of a name below others: those of its attempts where it is wrapped in retries."""
        paths = [f"{parent}.{name}" for parent in parents]
        return [each for path in paths for each in self._attempts(path) or filter(self._exists, [path])]

    def pods(self, paths: Iterable[str], template: str) -> tuple[str, ...]:
        """Return the names of the pods of nodes."""
        return tuple(f"{self.workflow}-{template}-{_hash(path)}" for path in paths)

    def _attempts(self, path: str) -> list[str]:
        start = _hash(f"{path}(")  # once: it is what costs time
        endings = (f"{number})" for number in range(_MOST_ATTEMPTS))
        return [f"{path}({ending}" for ending in endings if self._is_id(_hash(ending, start))]

    def _exists(self, path: str) -> bool:
        return self._is_id(_hash(path))

    def _is_id(self, number: int) -> bool:
        return f"{self.workflow}-{number}" in self._ids


@dataclass(frozen=True)
class _Graph:
    """A pipeline: graphs inside graphs, and where their tasks are among the nodes."""

    pipeline: Mapping[str, Any]
    platform: Mapping[str, Any]
    nodes: _Nodes

    def leaves(self, graph: Mapping[str, Any], parents: list[str]) -> Iterator[Leaf]:
        """Yield the tasks of a graph and of those inside it."""
        for name, task in _ordered(graph.get("dag", {}).get("tasks", {})):
            component = self.pipeline.get("components", {}).get(task.get("componentRef", {}).get("name"), {})
            # The exit task of a group is below a node of its own.
            hooks = (self.nodes.below(parents, f"{group}.onExit") for group in task.get("dependentTasks", []))
            places = [*parents, *(hook for each in hooks for hook in each)]
            if "dag" in component:
                yield from self.leaves(component, self.nodes.below(places, name))
            else:
                yield self._leaf(name, task, component, places)

    def _leaf(self, name: str, task: Mapping[str, Any], component: Mapping[str, Any], places: list[str]) -> Leaf:
        executors = self.nodes.below(self.nodes.below(places, name), "executor")
        is_retried = "retryPolicy" in task
        # Where there are retries, a node without a number is none of them: the retries as such, or what was skipped.
        pods = [each for each in executors if each.endswith(")") or not (is_retried or self.nodes.is_numbered)]
        return Leaf(
            name=name,
            title=task.get("taskInfo", {}).get("name", name).replace("-", "_"),
            pods=self.nodes.pods(pods, self._template(component, is_retried=is_retried)),
            driver_pods=self.nodes.pods(self.nodes.below(places, f"{name}-driver"), DRIVER_TEMPLATE),
            has_no_attempt=bool(executors) and not pods,
        )

    def _template(self, component: Mapping[str, Any], *, is_retried: bool) -> str:
        """Return the name of the template of a task's container, as Kubeflow's compiler puts it together."""
        executors = self.platform.get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {})
        metadata = executors.get("executors", {}).get(component.get("executorLabel"), {}).get("podMetadata")
        counts = (len((metadata or {}).get(kind, {})) for kind in ("annotations", "labels"))
        prefix = "" if metadata is None else "metadata-{}-{}-".format(*counts)
        return f"{prefix}{'retry-' if is_retried else ''}system-container-impl"


def _ordered(tasks: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the tasks of a graph, each after those that it depends on."""

    def depth(name: str) -> int:
        needed = (each for each in tasks[name].get("dependentTasks", []) if each in tasks)
        return 1 + max(map(depth, needed), default=0)

    return sorted(tasks.items(), key=lambda each: (depth(each[0]), each[0]))


def _hash(path: str, start: int = 0x811C9DC5) -> int:
    """Return the FNV-1a hash with 32 bits, by which Argo numbers a node; `start` is the hash of what comes before."""
    number = start
    for byte in path.encode():
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number
