"""Argo's workflow controller, as far as it decides what follows an attempt at a step.

As Argo 4.0 does it, for a step that is retried: `after` is its rule, which a test compares with recorded workflows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FAILED, ERROR, SUCCEEDED = "Failed", "Error", "Succeeded"
_RETRIED = {"Always": {FAILED, ERROR}, "OnFailure": {FAILED}, "OnError": {ERROR}}


@dataclass(frozen=True)
class RetryStrategy:
    """When a step is tried again."""

    limit: int | None
    policy: str = "OnFailure"
    """What is retried: a container that failed, an error such as a pod that was deleted, or both."""
    duration_s: float = 0
    factor: float = 1
    max_duration_s: float | None = None
    """From the start of the first attempt: no other begins later, and none runs on beyond it."""


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended."""

    started_s: float
    finished_s: float
    phase: str
    message: str = ""


@dataclass(frozen=True)
class End:
    """The step ends like this."""

    phase: str
    message: str


@dataclass(frozen=True)
class Retry:
    """The step is tried again then, and has to end by the deadline."""

    at_s: float
    deadline_s: float | None


def after(
    strategy: RetryStrategy, attempts: Sequence[Attempt], now_s: float, *, workflow_deadline_s: float | None = None
) -> End | Retry:
    """Return what follows the last of the attempts at a step; a workflow that is terminated has a deadline."""
    if attempts[-1].phase == SUCCEEDED:
        return End(SUCCEEDED, "")
    last, backoff_s = attempts[-1], strategy.duration_s * strategy.factor ** (len(attempts) - 1)
    deadline_s, at_s = None, last.finished_s + backoff_s
    why = ""
    if strategy.max_duration_s is not None:
        deadline_s = attempts[0].started_s + strategy.max_duration_s
    if workflow_deadline_s is not None and now_s > workflow_deadline_s:
        why = "retry exceeded workflow deadline"
    elif deadline_s is not None and now_s > deadline_s:
        why = "Max duration limit exceeded"
    elif deadline_s is not None and at_s > deadline_s:
        why = "Backoff would exceed max duration limit"
    elif last.phase not in _RETRIED[strategy.policy]:
        why = last.message
    elif strategy.limit is not None and len(attempts) > strategy.limit:
        why = "No more retries left"
    else:
        return Retry(at_s, deadline_s)
    return End(last.phase, why)
