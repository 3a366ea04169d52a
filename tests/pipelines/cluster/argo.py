"""The tasks of a run in the words of Kubeflow Pipelines 2.17, which are those of Argo's nodes below it.

As a real server has them: no task names its pod, the ids of tasks say nothing, each node is wrapped in retries, and
what comes after a node is named by its id, of which the number is a hash of the path to the node.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
WORKFLOW = "grpo-post-training-x7k2p"
_GROUP = f"{WORKFLOW}(0).root(0).exit-handler-1(0)"
_HOOK = f"{WORKFLOW}(0).root(0).exit-handler-1.onExit(0)"
_NEVER = "0001-01-01T00:00:00Z"
_WITHOUT_RETRIES = ("preflight",)


@dataclass(frozen=True)
class Stage:
    """What has become of a stage: its state, when, and the state of each attempt at it."""

    state: str | None
    """None where it was left out."""
    attempts: Sequence[str] = ()
    """None of them where the cache had its outputs."""
    started: str = "2026-11-22T10:00:00Z"
    ended: str | None = None
    driver: str | None = "SUCCEEDED"
    """State of what prepares it."""


def pod(stage: str, attempt: int) -> str:
    """The name of the pod in which an attempt at a stage runs."""
    retry = "" if stage in _WITHOUT_RETRIES else "retry-"
    return f"{WORKFLOW}-metadata-0-2-{retry}system-container-impl-{number(f'{_path(stage)}(0).executor({attempt})')}"


def driver_pod(stage: str) -> str:
    """The name of the pod that prepares a stage."""
    return f"{WORKFLOW}-system-container-driver-{number(f'{_path(stage)}-driver(0)')}"


def details(stages: Mapping[str, Stage]) -> list[Json]:
    """Every node of a run: graphs, drivers, retries and pods, each leading to what comes after it."""
    names = list(stages)
    inside = [f"{_path(name)}-driver" for name in names if name != "clean-up"]
    root = f"{WORKFLOW}(0).root"
    group, hook = f"{root}(0).exit-handler-1", f"{root}(0).exit-handler-1.onExit"
    nodes = [
        *_retried(WORKFLOW, "RUNNING", [root]),
        *_retried(root, "RUNNING", [group]),
        _node(group, "RUNNING", [f"{group}(0)", hook]),
        _node(f"{group}(0)", "RUNNING", inside[:1]),
        *_retried(hook, "RUNNING", [f"{_path('clean-up')}-driver"]),
    ]
    for number, name in enumerate(names):
        nodes += _nodes(name, stages[name], inside[number + 1 : number + 2])
    return nodes


def _nodes(name: str, stage: Stage, after: list[str]) -> list[Json]:
    path = _path(name)
    times: Json = {"start_time": stage.started, "end_time": stage.ended or _NEVER}
    if stage.state is None:
        left_out = {"start_time": stage.started, "end_time": stage.started}
        driver = [_node(f"{path}-driver", None, [path], **left_out)]
        if stage.driver:
            driver = _retried(f"{path}-driver", stage.driver, [path])
        return [*driver, _node(path, None, after, **left_out)]
    executor = f"{path}(0).executor"
    attempts = [f"{executor}({number})" for number in range(len(stage.attempts))]
    return [
        *_retried(f"{path}-driver", "SUCCEEDED", [path]),
        *_retried(path, stage.state, [executor, *after], **times),
        _node(executor, stage.state if attempts else "SKIPPED", attempts, **times),
        *(_node(each, state, [], **times) for each, state in zip(attempts, stage.attempts, strict=True)),
    ]


def _retried(path: str, state: str, after: Sequence[str], **times: Any) -> list[Json]:
    return [_node(path, state, [f"{path}(0)"], **times), _node(f"{path}(0)", state, after, **times)]


def _node(path: str, state: str | None, after: Sequence[str], **times: Any) -> Json:
    return {
        "display_name": path.rpartition(".")[2] if not path.endswith(".onExit") else "exit-handler-1.onExit",
        "task_id": str(uuid.uuid4()),
        **({"state": state} if state else {}),
        "child_tasks": [{"pod_name": _id(each)} for each in after],
        "state_history": [{"update_time": "2026-11-22T09:59:50Z"}],
        "start_time": "2026-11-22T09:59:50Z",
        "end_time": "2026-11-22T10:00:00Z",
        **times,
    }


def _path(stage: str) -> str:
    return f"{_HOOK if stage == 'clean-up' else _GROUP}.{stage}"


def _id(path: str) -> str:
    return f"{WORKFLOW}-{number(path)}"


def number(path: str) -> int:
    """Return the number that Argo gives to a node: the FNV-1a hash of its path, with 32 bits."""
    number = 2166136261
    for byte in path.encode():
        number = (number ^ byte) * 16777619 % 2**32
    return number
