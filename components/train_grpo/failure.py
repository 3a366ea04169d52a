"""Why nothing can be said of a completion, and how a reward comes to fail."""

import math
import traceback
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from components.rollout.completion import Completion
from components.shared.grading.verdict import Grade, Verdict
from components.shared.problem import Problem
from components.train_grpo.rewards import Reward


@dataclass(frozen=True)
class Failure:
    """Why nothing can be said of a completion."""

    kind: str
    """What failed, and how: failures of one kind are counted together."""
    message: str
    """What exactly happened this time, in one line."""


def attempt(name: str, reward: Reward, problem: Problem, completion: Completion, grade: Grade) -> float | Failure:
    """Return what a completion is worth, or how the reward failed to say so.

    A reward has to be a finite number; only for what has no verdict may it be NaN.
    """
    try:
        value = reward(problem, completion, grade)
        if isinstance(value, Real) and (math.isfinite(value) or grade.verdict is Verdict.UNSCORABLE):
            return float(value)
    except Exception as error:  # what people write may fail in any way, and one completion should not end the run
        return _raised(name, error)
    what = f"reward {name} returned"
    return Failure(f"{what} no finite number", f"{what} {value!r:.100}, where a finite number is expected")


def _raised(name: str, error: Exception) -> Failure:
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    last_line = traceback.format_exception_only(error)[-1].strip()
    where = f"{Path(innermost.filename).name}, line {innermost.lineno}"
    return Failure(f"reward {name} raised {type(error).__name__}", f"reward {name} raised {last_line} ({where})")
