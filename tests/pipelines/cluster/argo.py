"""The tasks of a run in the words of Kubeflow Pipelines, which are those of Argo's nodes below it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
WORKFLOW = "grpo-post-training-x7k2p"


@dataclass(frozen=True)
class Stage:
    """What has become of a stage: its state, when, and the state of each attempt at it."""

    state: str
    attempts: Sequence[str] = ()
    started: str = "2026-11-22T10:00:00Z"
    ended: str | None = None


def pod(stage: str, attempt: int) -> str:
    """The name of the pod in which an attempt at a stage runs: the hash is the node's, the rest is not."""
    return f"{WORKFLOW}-system-container-impl-{_hash(stage, f'executor{attempt}')}"


def details(stages: Mapping[str, Stage]) -> list[Json]:
    """Every node of a run: drivers, graphs, retries and pods, each leading to what comes after it."""
    names = list(stages)
    nodes = [_node("root", f"{WORKFLOW}", "RUNNING", [f"{WORKFLOW}-{_hash(names[0], 'driver')}"] if names else [])]
    for number, name in enumerate(names):
        after = names[number + 1 : number + 2]
        nodes += _nodes(name, stages[name], [f"{WORKFLOW}-{_hash(each, 'driver')}" for each in after])
    return nodes


def _nodes(name: str, stage: Stage, after: list[str]) -> list[Json]:
    graph, retry = (f"{WORKFLOW}-{_hash(name, part)}" for part in ("graph", "retry"))
    times: Json = {"start_time": stage.started, "end_time": stage.ended or "1970-01-01T00:00:00Z"}
    driver_pod = f"{WORKFLOW}-system-container-driver-{_hash(name, 'driver')}"
    found = [_node(f"{name}-driver", driver_pod, "SUCCEEDED", [graph]), _node(name, graph, stage.state, [], **times)]
    attempts = [f"{WORKFLOW}-{_hash(name, f'executor{number}')}" for number in range(len(stage.attempts))]
    if attempts:
        found[1]["child_tasks"] = [{"pod_name": retry}]
        found.append(_node("executor", retry, stage.state, attempts, **times))
    for number, state in enumerate(stage.attempts):
        last = number == len(attempts) - 1
        found.append(_node(f"executor({number})", pod(name, number), state, after if last else [], **times))
    return found


def _node(display_name: str, pod_name: str, state: str, children: Sequence[str], **times: Any) -> Json:
    return {
        "display_name": display_name,
        "task_id": f"task-{pod_name}",
        "pod_name": pod_name,
        "state": state,
        "child_tasks": [{"pod_name": child} for child in children],
        "start_time": "2026-11-22T09:59:50Z",
        "end_time": "2026-11-22T10:00:00Z",
        **times,
    }


def _hash(*parts: str) -> str:
    return str(sum((number + 1) * ord(character) for number, character in enumerate("/".join(parts))) + 10**8)
