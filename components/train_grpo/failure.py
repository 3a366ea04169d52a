"""Why nothing can be said of a completion, and how a reward comes to fail."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from components.grading.verifier import Grade, Verdict
from components.rollout.sampler import Completion
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.train_grpo.rewards import Reward

_LARGEST = 1e15
"""Magnitude of a reward whose square still fits, in float32, into the sums over a rollout."""


@dataclass(frozen=True)
class Failure:
    """Why nothing can be said of a completion."""

    kind: str
    """What failed, and how: failures of one kind are counted together."""
    message: str
    """What exactly happened this time, in one line."""


def attempt(name: str, reward: Reward, problem: Problem, completion: Completion, grade: Grade) -> float | Failure:
    """Return what a completion is worth, or how the reward failed to say so.

    A reward has to be a finite number; only for what has no verdict may it be NaN. One that would end the process, as
    by sys.exit, ends the run with a PipelineError.
    """
    try:
        value = reward(problem, completion, grade)
        if isinstance(value, Real) and (math.isfinite(value) or grade.verdict is Verdict.UNSCORABLE):
            return float(value)
    except KeyboardInterrupt:
        raise
    except Exception as error:  # what people write may fail in any way, and one completion should not end the run
        return _raised(name, error)
    except BaseException as error:
        failure = _raised(name, error)
        raise PipelineError(
            f"train_grpo.reward.weights.{name}: {failure.message} for a completion of {problem.id}; a reward has to "
            "return a number, or raise an Exception for a completion that it cannot judge"
        ) from error
    what = f"reward {name} returned"
    return Failure(f"{what} no finite number", f"{what} {value!r:.100}, where a finite number is expected")


def too_large(name: str, weight: float, values: Sequence[float]) -> Failure | None:
    """Return how a reward fails by its size: by then the statistics of its group overflow, and nothing is learned."""
    largest = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
    if largest * max(1.0, abs(weight)) <= _LARGEST:
        return None
    what = f"reward {name} is {largest:g} in magnitude, with a weight of {weight:g}"
    return Failure(f"reward {name} is too large", f"{what}: more than {_LARGEST:g}, the statistics of a group overflow")


def _raised(name: str, error: BaseException) -> Failure:
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    last_line = traceback.format_exception_only(error)[-1].strip()
    where = f"{Path(innermost.filename).name}, line {innermost.lineno}"
    return Failure(f"reward {name} raised {type(error).__name__}", f"reward {name} raised {last_line} ({where})")
