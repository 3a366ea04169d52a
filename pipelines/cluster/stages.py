"""The stages of a run and their pods, read from what Kubeflow Pipelines tells about Argo's nodes.

Kubeflow's API names no pod. It lists, as `child_tasks` of each task, the ids of the nodes that come after it:
`WORKFLOW-NUMBER`, where the number is the FNV-1a hash of the node's name, and the name is the path to the node, such as
`WORKFLOW(0).root(0).train-grpo(0).executor(1)`. Since 2.17 every node is wrapped in retries, which
number it; before, only the executor of a task with retries was. A path is tried by looking for its id in those lists.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from graphlib import TopologicalSorter
from itertools import takewhile
from typing import Any

CACHED = "CACHED"
"""State of a stage that did not run: the cache had its outputs."""
NOT_REACHED = "NOT_REACHED"
"""State of a stage that was skipped because another one had failed."""
FINISHED = {"SUCCEEDED", "SKIPPED", "FAILED", "CANCELED", CACHED}
"""States of a run or a stage that never change again."""
DRIVER_TEMPLATE = "system-container-driver"
_MOST_ATTEMPTS = 32
_FNV_OFFSET = 0x811C9DC5
LONGEST_DESCRIPTION = 255
"""Characters that Kubeflow's database has for the description of a run or a schedule."""


@dataclass(frozen=True)
class Stage:
    """How far a stage of a run is."""

    name: str
    """In the graph, such as `train_grpo`."""
    title: str
    """On the page; another one where a graph has several tasks of one stage, such as `evaluate sft`."""
    state: str | None = None
    """PENDING, RUNNING, SUCCEEDED ..., CACHED or NOT_REACHED; None where the run does not tell."""
    started: datetime | None = None
    ended: datetime | None = None
    pods: tuple[str, ...] = ()
    """Pods of its attempts, oldest first; those of its driver, which prepares it, where that failed."""
    workflow: str = ""
    """The name of Argo's workflow."""


def stages(run: Any) -> list[Stage]:
    """Return all stages of a run: those that have begun in the order in which they did, then those not reached."""
    graph = _Graph(run.pipeline_spec or {}, (run.run_details.task_details if run.run_details else None) or [])
    every = graph.stages(graph.pipeline.get("root", {}), graph.roots)
    return sorted(every, key=lambda stage: (stage.state is None, stage.started is None, stage.started))


def found_nothing_new(run: Any) -> bool:
    """Tell whether a run ended after preflight because code, data and config had not changed."""
    return any(stage.name == "prepare_data" and stage.state == "SKIPPED" for stage in stages(run))


def is_stopped(run: Any) -> bool:
    """Tell whether a run has ended because somebody stopped it; Kubeflow calls it failed."""
    history = [each.state for each in run.state_history or []]
    since_start = takewhile(lambda state: state != "RUNNING", reversed(history))  # the latest: a run can be retried
    return run.state == "CANCELED" or (run.state == "FAILED" and "CANCELING" in since_start)


def parameter(run: Any, name: str) -> Any:
    """Return the value of a parameter of a run, or the pipeline's default: a run from a form has what was changed."""
    parameters = (run.runtime_config.parameters if run.runtime_config else None) or {}
    if name in parameters:
        return parameters[name]
    spec = run.pipeline_spec or {}
    inputs = spec.get("pipeline_spec", spec).get("root", {}).get("inputDefinitions", {})
    return inputs.get("parameters", {}).get(name, {}).get("defaultValue")


def compiled_in(pipeline: Mapping[str, Any], name: str) -> Any:
    """Return what preflight of a pipeline always gets as the input `name`; None where it has no such input."""
    tasks = pipeline.get("root", {}).get("dag", {}).get("tasks", {})
    inputs = tasks.get("preflight", {}).get("inputs", {}).get("parameters", {})
    return inputs.get(name, {}).get("runtimeValue", {}).get("constant")


class _Graph:
    def __init__(self, spec: Mapping[str, Any], details: Iterable[Any]) -> None:
        self.pipeline = spec.get("pipeline_spec", spec)
        kubernetes = (spec.get("platform_spec") or {}).get("platforms", {}).get("kubernetes", {})
        self._executors = kubernetes.get("deploymentSpec", {}).get("executors", {})
        self._details = {each.display_name: each for each in details}
        self._ids = {child.pod_name for each in details for child in each.child_tasks or []}
        self._name = next(iter(self._ids), "").rpartition("-")[0]
        self._is_numbered = bool(self._attempts(self._name))
        """Whether every node is wrapped in retries."""
        self.roots = self.below(self._attempts(self._name) or [self._name], "root")

    def stages(self, graph: Mapping[str, Any], parents: list[str]) -> Iterator[Stage]:
        """Yield the stages of a graph and of those inside it, each after those that it depends on."""
        tasks = graph.get("dag", {}).get("tasks", {})
        depends = {name: sorted(task.get("dependentTasks", [])) for name, task in sorted(tasks.items())}
        for name in TopologicalSorter(depends).static_order():
            component = self.pipeline["components"][tasks[name]["componentRef"]["name"]]
            # The exit task of a group is below a node of its own.
            hooks = (self.below(parents, f"{group}.onExit") for group in depends[name])
            places = [*parents, *(hook for each in hooks for hook in each)]
            if "dag" in component:
                yield from self.stages(component, self.below(places, name))
            else:
                yield self._stage(name, tasks[name], component, places)

    def below(self, parents: Iterable[str], name: str) -> list[str]:
        """Return paths of the nodes of a name below others: those of its attempts where it is wrapped in retries."""
        paths = [f"{parent}.{name}" for parent in parents]
        return [each for path in paths for each in self._attempts(path) or filter(self._exists, [path])]

    def _stage(self, name: str, task: Mapping[str, Any], component: Mapping[str, Any], places: list[str]) -> Stage:
        detail, driver = self._details.get(name), self._details.get(f"{name}-driver")
        executors = self.below(self.below(places, name), "executor")
        is_retried = "retryPolicy" in task
        # Where there are retries, a node without a number is none of them: the retries as such, or what was skipped.
        attempts = [each for each in executors if each.endswith(")") or not (is_retried or self._is_numbered)]
        pods = self._pods(attempts, self._template(component, is_retried=is_retried))
        if driver is not None and driver.state == "FAILED":
            detail, pods = driver, self._pods(self.below(places, f"{name}-driver"), DRIVER_TEMPLATE)
        state = detail.state if detail else None
        if detail and state in (None, "RUNTIME_STATE_UNSPECIFIED"):
            state = NOT_REACHED
        elif state == "SUCCEEDED" and executors and not attempts:
            state = CACHED
        # A task that is not reached has the time at which that was decided.
        times = (detail.start_time, detail.end_time) if detail and state != NOT_REACHED else (None, None)
        started, ended = map(_time, times)
        title = task.get("taskInfo", {}).get("name", name).replace("-", "_")
        return Stage(name.replace("-", "_"), title, state, started, ended, pods, self._name)

    def _template(self, component: Mapping[str, Any], *, is_retried: bool) -> str:
        metadata = self._executors.get(component["executorLabel"], {}).get("podMetadata")
        counts = (len((metadata or {}).get(kind, {})) for kind in ("annotations", "labels"))
        prefix = "" if metadata is None else "metadata-{}-{}-".format(*counts)
        return f"{prefix}{'retry-' if is_retried else ''}system-container-impl"

    def _pods(self, paths: Iterable[str], template: str) -> tuple[str, ...]:
        return tuple(f"{self._name}-{template}-{_hash(path)}" for path in paths)

    def _attempts(self, path: str) -> list[str]:
        start = _hash(f"{path}(")  # once: it is what costs time
        endings = (f"{number})" for number in range(_MOST_ATTEMPTS))
        return [f"{path}({ending}" for ending in endings if self._exists(ending, start)]

    def _exists(self, path: str, start: int = _FNV_OFFSET) -> bool:
        return f"{self._name}-{_hash(path, start)}" in self._ids


def _time(moment: datetime | None) -> datetime | None:
    # What has not happened has the year 1 or 1970.
    return moment if moment and moment.year > 1970 else None


def _hash(path: str, start: int = _FNV_OFFSET) -> int:
    """Return the FNV-1a hash with 32 bits, by which Argo numbers a node; `start` is the hash of what comes before."""
    number = start
    for byte in path.encode():
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number
