"""Calling what people write: rewards are found by name, tried in advance, and may fail in any way.

A custom reward is a function in any module, named in the params as `package.module:function`. Python finds the module
in the folder in which the command is run, in PYTHONPATH or among installed packages. This module is also a command,
which `import_errors` runs to try the imports in a process of its own.
"""

import json
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.grading.verifier import Grade, Verdict
from components.shared.errors import PipelineError
from components.shared.problem import Problem

if TYPE_CHECKING:  # torch
    from components.rollout.sampler import Completion

RewardFunction = Callable[..., Any]
_ValueT = TypeVar("_ValueT")

_DEADLINE_S = 120.0
_MARK = "rewards that cannot be loaded: "
"""Begins the line with the answer: modules may print what they like."""
_CUSTOM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.ASCII)
_LARGEST = 1e15
"""Magnitude of a reward whose square still fits, in float32, into the sums over a rollout."""


def is_custom(name: str) -> bool:
    """Return whether the name of a reward is that of a user's function, `package.module:function`."""
    return _CUSTOM.fullmatch(name) is not None


def load_reward(name: str) -> RewardFunction:
    """Return the function that `name` stands for; PipelineError if there is none."""
    module_name, _, function_name = name.partition(":")
    where = f"train_grpo.reward.weights.{name}"
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module runs here, and may fail in any way
        raise PipelineError(
            f"{where}: module {module_name} cannot be imported ({type(error).__name__}: {error}); "
            "put it into the folder in which the command is run or into PYTHONPATH, or install it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        value = "" if function is None else f": it is {function!r:.80}"
        raise PipelineError(f"{where}: {module_name} ({module.__file__}) has no function `{function_name}`{value}")
    reward: RewardFunction = function
    return reward


@dataclass(frozen=True)
class Failure:
    """Why a completion has no reward."""

    kind: str
    """What failed, and how: failures of one kind are counted together."""
    message: str
    """What exactly happened this time, in one line."""


def ask(
    name: str,
    function: RewardFunction,
    problem: Problem,
    completions_G: Sequence["Completion"],
    grades_G: Sequence[Grade],
) -> list[float | Failure]:
    """Return what each completion is worth, or how the reward failed.

    A reward has to be a finite number; NaN is allowed for what has no verdict. One that would end the process, as by
    sys.exit, ends the run with a PipelineError.
    """
    if getattr(function, "compares_group", False):
        values = _attempt(name, problem, lambda: list(function(problem, completions_G, grades_G)))
        if not isinstance(values, Failure) and len(values) != len(grades_G):
            what = f"reward {name} returned a wrong number of values"
            values = Failure(what, f"{what}: {len(values)} for {len(grades_G)} completions")
        values_G = [values] * len(grades_G) if isinstance(values, Failure) else values
    else:
        calls = [partial(function, problem, *pair) for pair in zip(completions_G, grades_G, strict=True)]
        values_G = [_attempt(name, problem, call) for call in calls]
    return [_number(name, value, grade) for value, grade in zip(values_G, grades_G, strict=True)]


def _attempt(name: str, problem: Problem, call: Callable[[], _ValueT]) -> _ValueT | Failure:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except Exception as error:  # what people write may fail in any way, and one completion should not end the run
        return _raised(name, error)
    except BaseException as error:
        raise PipelineError(
            f"train_grpo.reward.weights.{name}: {_raised(name, error).message} for a completion of {problem.id}; a "
            "reward has to return a number, or raise an Exception for a completion that it cannot score"
        ) from error


def _number(name: str, value: Any, grade: Grade) -> float | Failure:
    """Return a reward as a float; one that is no finite number, or NaN without need, failed."""
    if isinstance(value, Failure):
        return value
    if isinstance(value, Real):
        with suppress(OverflowError):
            number = float(value)
            if math.isfinite(number) or grade.verdict is Verdict.UNSCORABLE:
                return number
    what = f"reward {name} returned"
    return Failure(f"{what} no finite number", f"{what} {value!r:.100}, where a finite number is expected")


def too_large(name: str, weight: float, values: "tuple[float, ...] | Failure") -> Failure | None:
    """Return how a reward fails by its size: the statistics of its group would overflow, and nothing be learned."""
    if isinstance(values, Failure):
        return None
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


def import_errors(names: Sequence[str], *, trained_here: bool) -> list[str]:
    """Return a line for each reward that cannot be loaded, tried in a process of its own: importing a module runs it.

    Unless training runs in this very environment, a missing package that a module imports is no error: the image that
    trains may have it.
    """
    if not names:
        return []
    place = "here" if trained_here else "elsewhere"
    command = [sys.executable, "-m", "components.train_grpo.custom_rewards", place, *names]
    where = f"train_grpo.reward.weights: importing {', '.join(names)}"
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return [f"{where} takes longer than {_DEADLINE_S:g} s"]
    answers = [line for line in process.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        ending = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return [f"{where} crashed the interpreter: {ending}"]
    lines: list[str] = json.loads(answers[-1].removeprefix(_MARK))
    return lines


def _import_all(place: str, *names: str) -> list[str]:
    lines = []
    for name in names:
        try:
            load_reward(name)
        except PipelineError as error:
            if place == "here" or not _misses_another_package(error.__cause__, name):
                lines.append(str(error))
    return lines


def _misses_another_package(cause: BaseException | None, name: str) -> bool:
    if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
        return False
    module_name = name.partition(":")[0]
    return not f"{module_name}.".startswith(f"{cause.name}.")


if __name__ == "__main__":
    print(f"\n{_MARK}{json.dumps(_import_all(*sys.argv[1:]))}")
