"""The tasks of a run in the words of Kubeflow Pipelines 2.17.

As a real server has them: no task names its pod, each node is wrapped in retries, and what comes after a task is named
by the id of its node, of which the number is a hash of the path to the node.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
WORKFLOW = "grpo-post-training-x7k2p"
_ROOT = f"{WORKFLOW}(0).root(0)"
_NEVER = "0001-01-01T00:00:00Z"


@dataclass(frozen=True)
class Stage:
    """What has become of a stage."""

    state: str | None
    """None where it was left out."""
    attempts: int = 0
    """None of them where the cache had its outputs."""
    started: str = "2026-11-22T10:00:00Z"
    ended: str = _NEVER
    driver: str | None = "SUCCEEDED"
    """State of what prepares it."""


def pod(stage: str, attempt: int) -> str:
    """The name of the pod in which an attempt at a stage runs."""
    retry = "" if stage in ("preflight", "register") else "retry-"
    return f"{WORKFLOW}-metadata-0-2-{retry}system-container-impl-{number(f'{_path(stage)}(0).executor({attempt})')}"


def driver_pod(stage: str) -> str:
    """The name of the pod that prepares a stage."""
    return f"{WORKFLOW}-system-container-driver-{number(f'{_path(stage)}-driver(0)')}"


def details(stages: Mapping[str, Stage], workflow: str = WORKFLOW) -> list[Json]:
    """The tasks of a run, of which the first leads to every node."""
    paths = [f"{WORKFLOW}(0)", _ROOT]
    tasks: list[Json] = []
    for name, stage in stages.items():
        times = {"start_time": stage.started, "end_time": stage.ended}
        tasks.append({"display_name": name, "state": stage.state, **times})
        if stage.driver:
            tasks.append({"display_name": f"{name}-driver", "state": stage.driver, **times})
            paths.append(f"{_path(name)}-driver(0)")
        if stage.state:
            executor = f"{_path(name)}(0).executor"
            paths += [f"{_path(name)}(0)", executor, *(f"{executor}({attempt})" for attempt in range(stage.attempts))]
    nodes = [{"pod_name": f"{workflow}-{number(path.replace(WORKFLOW, workflow))}"} for path in paths]
    return [{"display_name": "root", "state": "RUNNING", "child_tasks": nodes}, *tasks]


def number(path: str) -> int:
    """Return the number that Argo gives to a node: the FNV-1a hash of its path, with 32 bits."""
    number = 2166136261
    for byte in path.encode():
        number = (number ^ byte) * 16777619 % 2**32
    return number


def _path(stage: str) -> str:
    return f"{_ROOT}.{stage}"
