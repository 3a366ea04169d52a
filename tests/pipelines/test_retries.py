"""What Argo makes of the retries of the compiled graphs: each attempt has all the time that its task may take."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.compiled import graph

RECORDED = Path("../shared/recordings/argo-4.0.8")
_DAY_S = 24 * 3600


@dataclass(frozen=True)
class Strategy:
    """A retry strategy of Argo, in seconds."""

    limit: int
    duration: float
    factor: float
    max_duration: float

    @classmethod
    def of(cls, task: dict[str, Any]) -> "Strategy":
        """What Kubeflow's backend makes of a task's retry policy, a number for each field."""
        policy = task.get("retryPolicy", {"maxRetryCount": 0})
        seconds = {
            name: float(policy.get(name, "0s").removesuffix("s")) for name in ("backoffDuration", "backoffMaxDuration")
        }
        return cls(
            policy["maxRetryCount"],
            seconds["backoffDuration"],
            policy.get("backoffFactor", 1),
            seconds["backoffMaxDuration"],
        )


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task, in seconds since the first began."""

    start: float
    deadline: float
    """When Argo ends it."""


def attempts(strategy: Strategy, lasts: float) -> Iterator[Attempt]:
    """The attempts that Argo makes at a task of which each fails after so long, or at its deadline.

    As its controller reckons: `maxDuration` counts from the start of the first attempt. It is the deadline of every
    later attempt, and there is none whose pause would end after it.
    """
    end_of_window = strategy.max_duration
    attempt = Attempt(0.0, math.inf)
    yield attempt
    for number in range(strategy.limit):
        start = min(attempt.start + lasts, attempt.deadline) + strategy.duration * strategy.factor**number
        if start > end_of_window:
            return
        attempt = Attempt(start, end_of_window)
        yield attempt


def limit_of(task: str) -> int:
    """Time after which Kubernetes ends a task."""
    return int(graph().settings(task)["activeDeadlineSeconds"])


def test_every_attempt_has_the_time_that_its_task_may_take() -> None:
    """Also the last of those that each wait a day for a node and then run into their time limit."""
    for name, task in graph().tasks.items():
        limit, strategy = limit_of(name), Strategy.of(task)
        found = list(attempts(strategy, limit + _DAY_S))
        assert len(found) == 1 + strategy.limit, name
        assert min(attempt.deadline - attempt.start for attempt in found) >= limit + _DAY_S, name


@pytest.mark.parametrize("after_s", [1, 9 * 60, 11 * 60])
def test_a_second_attempt_has_all_the_time_that_a_training_job_needs(after_s: int) -> None:
    """Whenever the first was lost: Argo must neither leave the second out nor end it, and the job with it."""
    for name in ("train-sft", "train-grpo"):
        _, second, *_ = attempts(Strategy.of(graph().tasks[name]), after_s)
        assert second.start >= after_s
        assert second.deadline - second.start >= limit_of(name)


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"{RECORDED} with what a real Argo did is not here")
def test_the_arithmetic_is_that_of_argo() -> None:
    """A launcher that was deleted after 81 s, of a task with a maximum duration of 600 s, as a real Argo retried it."""
    workflow = next(each for each in _recorded("workflows") if each["metadata"]["name"].endswith("-g57sp"))
    nodes = workflow["status"]["nodes"].values()
    failed = [node for node in nodes if _limit(node) == "3" and node["phase"] in ("Error", "Failed")]
    first, second = (
        next(node for node in failed if node["displayName"] == f"executor({number})") for number in range(2)
    )
    (deadline,) = {
        _time(variable["value"])
        for pod in _recorded("pods")
        if pod["metadata"].get("annotations", {}).get("workflows.argoproj.io/node-id") == second["id"]
        for container in pod["spec"]["containers"]
        for variable in container.get("env", [])
        if variable["name"] == "ARGO_DEADLINE"
    }
    began = _time(first["startedAt"])
    lasted = _time(first["finishedAt"]) - began
    _, expected = list(attempts(Strategy(3, 30, 2, 600), lasted))[:2]
    assert deadline - began == expected.deadline
    assert expected.start <= _time(second["startedAt"]) - began <= expected.start + 15
    assert "Max duration limit exceeded" in {node.get("message") for node in nodes}


def _recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def _limit(node: dict[str, Any]) -> str | None:
    parameters = {each["name"]: each.get("value") for each in node.get("inputs", {}).get("parameters", [])}
    return parameters.get("retry-max-count")


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
