import signal
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from components.cluster.failures import SilentRankError, error_of_ranks, failure_reason, queueing_problem
from components.cluster.job import Job, RankFailure
from components.cluster.kube import Json
from components.shared.errors import PipelineError, RetryableError, is_failed_allocation

FAILED = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"}
JOB = {"metadata": {"name": "grpo-1"}, "status": {"conditions": [FAILED]}}


def _pod(name: str, *, disruption: str = "", **terminated: Any) -> dict[str, Any]:
    """A pod whose container has ended, or that was disrupted."""
    status: dict[str, Any] = {}
    if terminated:
        status["containerStatuses"] = [{"state": {"terminated": terminated}}]
    if disruption:
        target = {"type": "DisruptionTarget", "status": "True", "reason": disruption, "message": "by the scheduler"}
        status["conditions"] = [target]
    return {"metadata": {"name": name}, "spec": {}, "status": status}


@dataclass(frozen=True)
class Sign:
    """A sign of a failure, and the error where it is the only one."""

    message: str
    is_final: bool = False
    pods: tuple[dict[str, Any], ...] = ()
    tails: dict[str, list[str]] = field(default_factory=dict)
    error: PipelineError | None = None


SIGNS = {
    "memory": Sign("out of memory", True, pods=(_pod("a", reason="OOMKilled", exitCode=137),)),
    "mistake": Sign("a key is wrong", True, error=PipelineError("a key is wrong")),
    "disruption": Sign("was disrupted", pods=(_pod("b", disruption="PreemptionByScheduler"),)),
    "lost-peer": Sign("rank 7 did not come", error=RetryableError("rank 7 did not come")),
    "log": Sign("Watchdog", tails={"c": ["Watchdog caught collective operation timeout"]}),
    "silence": Sign("rank 1 was killed", error=SilentRankError("rank 1 was killed")),
    "exit-code": Sign("ended with exit code 2", True, pods=(_pod("d", exitCode=2),)),
    "job": Sign("jobset failed"),
}
"""From causes that no rank can report to mere consequences: the first is the reason."""
ONE_ERROR = {"mistake", "lost-peer", "silence"}


@pytest.mark.parametrize(("first", "second"), [pair for pair in combinations(SIGNS, 2) if not set(pair) <= ONE_ERROR])
def test_cause_goes_before_consequences(first: str, second: str) -> None:
    """Of any two signs, the one that says what to do is reported."""
    signs = [SIGNS[first], SIGNS[second]]
    pods = [pod for sign in reversed(signs) for pod in sign.pods]
    tails = {where: lines for sign in signs for where, lines in sign.tails.items()}
    reason = failure_reason(JOB, pods, tails, next((sign.error for sign in signs if sign.error), None))
    assert signs[0].message in str(reason)
    assert isinstance(reason, RetryableError) == (not signs[0].is_final)


@pytest.mark.parametrize("code", [75, 143])
def test_a_pod_that_a_signal_has_ended_may_be_started_again(code: int) -> None:
    """A node that goes away sends the same signal as a person; after its deadline, a job is not started again."""
    assert isinstance(failure_reason(JOB, [_pod("d", exitCode=code)], {}, None), RetryableError)
    over = {"conditions": [{**FAILED, "reason": "DeadlineExceeded"}]}
    reason = failure_reason({**JOB, "status": over}, [_pod("d", exitCode=code)], {}, None)
    assert "training_timeout_s" in str(reason)
    assert not isinstance(reason, RetryableError)


NO_QUOTA = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "4 more needed"}
RESERVED = {**NO_QUOTA, "status": "True", "reason": "QuotaReserved"}
EVICTED = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for a workload"}
CHECKS = [
    {"name": "new-nodes", "state": "Pending", "message": "creating 2 nodes"},
    {"name": "budget", "state": "Ready", "message": ""},
]


@pytest.mark.parametrize(
    ("status", "position", "line"),
    [
        ({"conditions": [NO_QUOTA]}, 2, "position 3 in its ClusterQueue; Pending: 4 more needed"),
        ({"conditions": [{**EVICTED, "status": "False"}, NO_QUOTA]}, None, "Pending: 4 more needed"),
        ({"conditions": [RESERVED], "admissionChecks": CHECKS}, None, "new-nodes is Pending: creating 2 nodes"),
        (None, None, "Kueue has not noticed it yet"),
    ],
)
def test_what_a_job_waits_for_is_one_line(status: Json | None, position: int | None, line: str) -> None:
    """Its position and Kueue's own words, as far as Kueue tells them."""
    assert queueing_problem(None if status is None else {"status": status}, position) == line


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of two ranks that has been written."""
    job = Job(tmp_path / "launch", "", config={}, folders={}, outputs={}, num_processes=2, grace_s=1)
    job.write()
    return job


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (1, "ended with exit code 1 without reporting an error"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_a_rank_that_reports_nothing_is_named_with_how_it_ended(job: Job, code: int, how: str) -> None:
    """Whatever its exit code or signal, and the same run may be started again."""
    job.write_failures(0, [RankFailure(1, code, 0)])
    error = error_of_ranks(job)
    assert str(error) == f"rank 1 {how}; start the same run again to resume from the last checkpoint"
    assert isinstance(error, RetryableError)


def test_error_of_a_rank_goes_before_its_report_that_another_is_lost(job: Job) -> None:
    """The first to fail may be the one that lost the other."""
    job.write_outcome(0, {"error": "rank 1 did not come", "exit_code": 75})
    job.write_failures(0, [RankFailure(0, 75, 1)])
    assert isinstance(error_of_ranks(job), RetryableError)
    assert str(error_of_ranks(job)) == "rank 1 did not come"
    job.write_outcome(1, {"error": "the data are no data", "exit_code": 2})
    assert str(error_of_ranks(job)) == "the data are no data"


def test_kind_of_an_error_does_not_depend_on_the_log_below_it(job: Job) -> None:
    """A warning about memory in the log of a rank makes no other error one of memory."""
    job.log(1).write_text("warning: may run out of memory\nKeyError: 'x'\n")
    for message, is_memory in (("KeyError: 'x'", False), ("OutOfMemoryError: CUDA out of memory. Tried 2 GiB", True)):
        job.write_outcome(1, {"error": message, "exit_code": 1})
        error = error_of_ranks(job)
        assert error is not None
        assert "may run out of memory" in str(error)
        assert is_failed_allocation(error) == is_memory
