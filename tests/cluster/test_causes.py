"""Which of several signs is taken for the cause of a failure."""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest

from components.cluster.failures import SilentRankError, failure_reason
from components.shared.errors import PipelineError, RetryableError

JOB = {
    "metadata": {"name": "grpo-1"},
    "status": {
        "conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"}]
    },
}


def _pod(name: str, *, condition: str = "", **terminated: Any) -> dict[str, Any]:
    """A pod whose container has ended, or that was disrupted."""
    status: dict[str, Any] = {}
    if terminated:
        status["containerStatuses"] = [{"state": {"terminated": terminated}}]
    if condition:
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": condition, "message": "by the scheduler"}
        status["conditions"] = [disrupted]
    return {"metadata": {"name": name}, "spec": {}, "status": status}


@dataclass(frozen=True)
class Sign:
    """What there may be to see of a failure, and what the cause is where it is the only one."""

    said: str
    kind: type[PipelineError]
    pods: tuple[dict[str, Any], ...] = ()
    tails: dict[str, list[str]] = field(default_factory=dict)
    error: PipelineError | None = None


SIGNS = {
    "memory": Sign("out of memory", PipelineError, pods=(_pod("a", reason="OOMKilled", exitCode=137),)),
    "mistake": Sign("a key is wrong", PipelineError, error=PipelineError("a key is wrong")),
    "node": Sign("was disrupted", RetryableError, pods=(_pod("b", condition="PreemptionByScheduler"),)),
    "loss of another": Sign("rank 7 did not come", RetryableError, error=RetryableError("rank 7 did not come")),
    "log": Sign("Watchdog", RetryableError, tails={"c": ["Watchdog caught collective operation timeout"]}),
    "silence": Sign("rank 1 was killed", RetryableError, error=SilentRankError("rank 1 was killed")),
    "exit code": Sign("ended with exit code 2", PipelineError, pods=(_pod("d", exitCode=2),)),
    "job": Sign("jobset failed", RetryableError),
}
"""From what no rank can say of itself to mere consequences: the first of those that are there is the cause."""
ONE_ERROR = {"mistake", "loss of another", "silence"}
"""Ranks leave one error between them."""


@pytest.mark.parametrize(
    ("first", "second"),
    [pair for pair in combinations(SIGNS, 2) if not set(pair) <= ONE_ERROR],
    ids=lambda name: name.replace(" ", "-"),
)
def test_the_cause_is_told_from_its_consequences(first: str, second: str) -> None:
    """Whichever of the two is seen besides: what has happened first, and says what to do, is named."""
    signs = [SIGNS[first], SIGNS[second]]
    pods = [pod for sign in reversed(signs) for pod in sign.pods]
    tails = {where: lines for sign in signs for where, lines in sign.tails.items()}
    found = failure_reason(JOB, pods, tails, next((sign.error for sign in signs if sign.error), None))
    assert signs[0].said in str(found)
    assert isinstance(found, RetryableError) == (signs[0].kind is RetryableError)


@pytest.mark.parametrize("name", SIGNS)
def test_a_deadline_goes_before_all_signs_of_it(name: str) -> None:
    """When the time is over pods are killed, ranks lose one another, and none of that is the cause."""
    over = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": ""}
    sign = SIGNS[name]
    found = failure_reason({**JOB, "status": {"conditions": [over]}}, list(sign.pods), sign.tails, sign.error)
    assert "training_timeout_s" in str(found)
    assert not isinstance(found, RetryableError)
