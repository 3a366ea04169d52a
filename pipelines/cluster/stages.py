"""The stages of a run and their pods, derived from the ids of Argo's nodes that Kubeflow Pipelines lists.

Kubeflow's API names no pod. As `child_tasks` of each task it lists the ids of the nodes that follow: `WORKFLOW-NUMBER`
with the FNV-1a hash of the node's path, such as `WORKFLOW(0).root(0).train-grpo(0).executor(1)`. Since 2.17 every node
is wrapped in retries, which number it; before, only the executor of a task with retries was. So paths are guessed: one
exists if the lists contain its id.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from graphlib import TopologicalSorter
from itertools import takewhile
from typing import Any

CACHED = "CACHED"
"""State of a stage that did not run, because the cache had its outputs."""
NOT_REACHED = "NOT_REACHED"
"""State of a stage that was skipped after another one failed."""
FINISHED = {"SUCCEEDED", "SKIPPED", "FAILED", "CANCELED", CACHED}
"""States of a run or a stage that never change again."""
DRIVER_TEMPLATE = "system-container-driver"
_MOST_ATTEMPTS = 32
_FNV_OFFSET = 0x811C9DC5
LONGEST_DESCRIPTION = 255
"""Characters that Kubeflow's database stores of the description of a run or a schedule."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run, with its progress and its pods."""

    name: str
    """Name in the graph, such as `train_grpo`."""
    title: str
    """Name on Kubeflow's page; tasks of the same stage have different ones, such as `evaluate sft`."""
    state: str | None = None
    """PENDING, RUNNING, SUCCEEDED ..., CACHED or NOT_REACHED; None if the run does not tell."""
    started: datetime | None = None
    ended: datetime | None = None
    pods: tuple[str, ...] = ()
    """Pods of its attempts, oldest first; if its driver, which prepares it, has failed, pods of the driver."""
    workflow: str = ""
    """The name of Argo's workflow."""


def stages(run: Any) -> list[Stage]:
    """Return all stages of a run: in order of their start, then skipped ones, then those that have not begun."""
    details = run.run_details.task_details if run.run_details else None
    graph = _Graph(run.pipeline_spec or {}, details or [])
    unsorted = graph.stages(graph.pipeline.get("root", {}), graph.roots)
    return sorted(unsorted, key=lambda stage: (stage.state is None, stage.started is None, stage.started))


def found_nothing_new(run: Any) -> bool:
    """Tell whether a run ended after preflight because code, data and config had not changed."""
    return any(stage.name == "prepare_data" and stage.state == "SKIPPED" for stage in stages(run))


def is_stopped(run: Any) -> bool:
    """Tell whether a run was stopped by a user, which Kubeflow may report as failed."""
    newest_first = [each.state for each in reversed(run.state_history or [])]
    since_last_start = takewhile(lambda state: state != "RUNNING", newest_first)  # a retry starts a run again
    return run.state == "CANCELED" or (run.state == "FAILED" and "CANCELING" in since_last_start)


def parameter(run: Any, name: str) -> Any:
    """Return a run's value of a parameter, or the pipeline's default: a run from the form only has changed ones."""
    parameters = (run.runtime_config.parameters if run.runtime_config else None) or {}
    if name in parameters:
        return parameters[name]
    spec = run.pipeline_spec or {}
    inputs = spec.get("pipeline_spec", spec).get("root", {}).get("inputDefinitions", {})
    return inputs.get("parameters", {}).get(name, {}).get("defaultValue")


def compiled_in(pipeline: Mapping[str, Any], name: str) -> Any:
    """Return the constant that a compiled pipeline passes to preflight as input `name`; None without such an input."""
    tasks = pipeline.get("root", {}).get("dag", {}).get("tasks", {})
    inputs = tasks.get("preflight", {}).get("inputs", {}).get("parameters", {})
    return inputs.get(name, {}).get("runtimeValue", {}).get("constant")


class _Graph:
    """A run's pipeline with the nodes that Argo made for it; a node is named by its path."""

    def __init__(self, spec: Mapping[str, Any], details: Iterable[Any]) -> None:
        self.pipeline = spec.get("pipeline_spec", spec)
        kubernetes = (spec.get("platform_spec") or {}).get("platforms", {}).get("kubernetes", {})
        self._executors = kubernetes.get("deploymentSpec", {}).get("executors", {})
        self._details = {each.display_name: each for each in details}
        self._ids = {child.pod_name for each in details for child in each.child_tasks or []}
        self._workflow = next(iter(self._ids), "").rpartition("-")[0]
        attempts = self._attempts(self._workflow)
        self._is_numbered = bool(attempts)
        """Whether every node is wrapped in retries."""
        self.roots = self.below(attempts or [self._workflow], "root")

    def stages(self, graph: Mapping[str, Any], parents: list[str]) -> Iterator[Stage]:
        """Yield the stages of a graph below the nodes `parents`, and of nested graphs, after their dependencies."""
        tasks = graph.get("dag", {}).get("tasks", {})
        dependencies = {name: sorted(task.get("dependentTasks", [])) for name, task in sorted(tasks.items())}
        for name in TopologicalSorter(dependencies).static_order():
            component = self.pipeline["components"][tasks[name]["componentRef"]["name"]]
            parents_of_task = list(parents)
            for group in dependencies[name]:  # only a group with an exit task has this extra node
                parents_of_task += self.below(parents, f"{group}.onExit")
            if "dag" in component:
                yield from self.stages(component, self.below(parents_of_task, name))
            else:
                yield self._stage(name, tasks[name], component, parents_of_task)

    def below(self, parents: Iterable[str], name: str) -> list[str]:
        """Return the paths of existing nodes named `name` below other nodes; of a node with retries, its attempts."""
        paths: list[str] = []
        for path in (f"{parent}.{name}" for parent in parents):
            paths += self._attempts(path) or ([path] if self._exists(path) else [])
        return paths

    def _stage(self, name: str, task: Mapping[str, Any], component: Mapping[str, Any], parents: list[str]) -> Stage:
        """Return the stage of a task below the nodes `parents`."""
        detail, driver = self._details.get(name), self._details.get(f"{name}-driver")
        executors = self.below(self.below(parents, name), "executor")
        is_retried = "retryPolicy" in task
        attempts = executors
        if is_retried or self._is_numbered:  # then attempts end in a number, such as `(0)`; a skipped node has none
            attempts = [path for path in executors if path.endswith(")")]
        pods = self._pods(attempts, self._template(component, is_retried=is_retried))
        if driver is not None and driver.state == "FAILED":
            detail, pods = driver, self._pods(self.below(parents, f"{name}-driver"), DRIVER_TEMPLATE)
        state = detail.state if detail else None
        if detail and state in (None, "RUNTIME_STATE_UNSPECIFIED"):
            state = NOT_REACHED
        elif state == "SUCCEEDED" and executors and not attempts:
            state = CACHED
        started = ended = None
        if detail and state != NOT_REACHED:  # for such a stage, Kubeflow gives the time of the decision to skip it
            started, ended = _time(detail.start_time), _time(detail.end_time)
        title = task.get("taskInfo", {}).get("name", name).replace("-", "_")
        return Stage(name.replace("-", "_"), title, state, started, ended, pods, self._workflow)

    def _template(self, component: Mapping[str, Any], *, is_retried: bool) -> str:
        """Return the name that Kubeflow gives to the Argo template of a task's pods, which is part of their names."""
        metadata, prefix = self._executors.get(component["executorLabel"], {}).get("podMetadata"), ""
        if metadata is not None:
            prefix = f"metadata-{len(metadata.get('annotations', {}))}-{len(metadata.get('labels', {}))}-"
        return f"{prefix}{'retry-' if is_retried else ''}system-container-impl"

    def _pods(self, paths: Iterable[str], template: str) -> tuple[str, ...]:
        return tuple(f"{self._workflow}-{template}-{_hash(path)}" for path in paths)

    def _attempts(self, path: str) -> list[str]:
        """Return the paths of a node's attempts, `path(0)` to `path(31)`, that exist."""
        start = _hash(f"{path}(")  # the beginning is hashed only once, as that takes time
        endings = (f"{number})" for number in range(_MOST_ATTEMPTS))
        return [f"{path}({ending}" for ending in endings if self._exists(ending, start)]

    def _exists(self, path: str, start: int = _FNV_OFFSET) -> bool:
        """Tell whether the node of a path exists; `start` is the hash of what precedes `path` in it."""
        return f"{self._workflow}-{_hash(path, start)}" in self._ids


def _time(moment: datetime | None) -> datetime | None:
    """Return a time; None for the years 1 and 1970, which Kubeflow gives to events that have not happened."""
    return moment if moment and moment.year > 1970 else None


def _hash(path: str, start: int = _FNV_OFFSET) -> int:
    """Return the 32-bit FNV-1a hash with which Argo numbers a node; `start` is the hash of what precedes `path`."""
    number = start
    for byte in path.encode():
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number
