"""Custom rewards: loading them by name, trying them before a run, and calling them, as they may fail in any way.

A custom reward is a function in any module, named in the params as `package.module:function`. Python finds the module
in the folder in which the command is run, in PYTHONPATH or among installed packages.
"""

import inspect
import json
import math
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from components.grading.verifier import Grade, Verdict
from components.shared.custom_code import import_problem, raised_at
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.progress import say, say_line

RewardFunction = Callable[..., Any]

_TRIAL_DEADLINE_S = 120.0
_SLOW_S = 20.0
"""Time after which a warning names a reward that has not returned."""
MARK = "rewards that cannot be used: "
"""Beginning of the line with the result of a trial: custom modules may print other lines."""
MAX_REWARD = 1e15
"""Largest magnitude of a reward: in float32, sums of its square over a rollout do not overflow."""


def is_slow(function: RewardFunction) -> bool:
    """Return whether a reward waits, such as for a server, and is called concurrently (slow_rewards.py)."""
    return inspect.iscoroutinefunction(function) or getattr(function, "runs_in_thread", False)


def load_reward(name: str, *, supervision: str | None = None) -> RewardFunction:
    """Return the function that `name` names; PipelineError if it cannot be imported, or not be called as a reward.

    With `supervision`, as in `reward.supervision`, also if it rewards steps and the supervision has none.
    """
    module_name, _, function_name = name.partition(":")
    where = f"train_grpo.reward.weights.{name}"
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module runs here, and may fail in any way
        raise PipelineError(f"{where}: {import_problem(module_name, error)}") from error
    function: RewardFunction | None = getattr(module, function_name, None)
    if not callable(function):
        value = "" if function is None else f": it is {function!r:.80}"
        raise PipelineError(f"{where}: {module_name} ({module.__file__}) has no function `{function_name}`{value}")
    signature = None
    with suppress(Exception):  # functions in C have none, and a decorator may take other arguments than what it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    try:
        if signature:
            signature.bind("problem", "completion", "grade")
    except TypeError as error:
        takes = "a reward takes a problem, a completion (or a list, or steps) and a grade"
        raise PipelineError(f"{where}: {function_name} ({module.__file__}): {error}; {takes}") from None
    if is_slow(function) and getattr(function, "judges_steps", False):
        raise PipelineError(
            f"{where}: {function_name} ({module.__file__}) rewards steps: it can be neither an `async def` nor threaded"
        )
    if supervision == "outcome" and getattr(function, "judges_steps", False):
        remedy = "set it to process (lines) or turn"
        raise PipelineError(f"train_grpo.reward.supervision: {name} rewards each step; {remedy}")
    return function


@dataclass(frozen=True)
class Failure:
    """Why a completion has no reward."""

    kind: str
    """What failed, and how; failures of the same kind are counted together."""
    message: str
    """The details of this failure, in one line."""
    is_nan: bool = False
    """Whether the reward returned NaN for a completion that the grader could score."""


def values_of(
    name: str,
    function: RewardFunction,
    problem: Problem,
    scored_G: Sequence[Any],
    slow_answers: Iterator[Any],
    *,
    deadline_s: float,
) -> list[tuple[float, ...] | Failure]:
    """Return the values of a reward for each completion: one for every step, or a single one; a Failure if it failed.

    A slow reward has been called already: its values are the next of `slow_answers`. A reward that would end the
    process, as by sys.exit, raises a PipelineError instead; one that takes longer than `deadline_s` ends the run.
    """
    compares_group = getattr(function, "compares_group", False)
    grades_G = [scored.grade for scored in scored_G]
    inputs_G: list[Any] = [scored.completion for scored in scored_G]
    num_steps_G = None
    if getattr(function, "judges_steps", False):
        inputs_G = [[step.text for step in scored.steps] for scored in scored_G]
        num_steps_G = [len(texts) for texts in inputs_G]
    calls = [(inputs_G, grades_G)] if compares_group else list(zip(inputs_G, grades_G, strict=True))
    if is_slow(function):
        values = list(islice(slow_answers, len(calls)))
    else:
        folder = Path.cwd()
        try:
            with _watched(name, problem, deadline_s):
                values = [_attempt(name, function, problem, *arguments) for arguments in calls]
        finally:
            os.chdir(folder)  # a reward may change it, and paths of a run may be relative
    return to_rewards(name, values[0] if compares_group else values, grades_G, num_steps_G)


def to_rewards(
    name: str, values: Any, grades_G: Sequence[Grade], num_steps_G: Sequence[int] | None = None
) -> list[tuple[float, ...] | Failure]:
    """Return the rewards of each completion of a group from what a reward function returned, or a Failure.

    There must be one value for each completion or, with `num_steps_G`, for each of its steps: a finite number, or NaN
    for an unscorable completion.
    """
    values_G = _check_count(name, values, len(grades_G), "completions")
    if isinstance(values_G, Failure):
        return [values_G] * len(grades_G)
    if num_steps_G is None:
        values_G = [each if isinstance(each, Failure) else [each] for each in values_G]
    else:
        values_G = [_check_count(name, *pair, "steps") for pair in zip(values_G, num_steps_G, strict=True)]
    return [_numbers(name, each, grade) for each, grade in zip(values_G, grades_G, strict=True)]


def _check_count(name: str, values: Any, count: int, of_what: str) -> Any:
    """Return `values` if it is a Failure or a list of `count` values, else a Failure."""
    if isinstance(values, Failure) or (isinstance(values, list) and len(values) == count):
        return values
    if not isinstance(values, list):
        begin = f"reward {name} returned"
        return Failure(f"{begin} no list", f"{begin} {values!r:.100}, where a list of numbers is expected")
    kind = f"reward {name} returned a wrong number of values"
    return Failure(kind, f"{kind}: {len(values)} for {count} {of_what}")


@contextmanager
def _watched(name: str, problem: Problem, deadline_s: float) -> Iterator[None]:
    """Warn of a reward that does not return, and end the process after the deadline: no call can be interrupted."""
    done = threading.Event()

    def watch() -> None:
        if done.wait(min(_SLOW_S, deadline_s)):
            return
        say("train_grpo", f"warning: reward {name} has been computing for {_SLOW_S:g} s, for problem {problem.id}")
        # Ranks of a job do not end here: a barrier has the same deadline, and names the missing rank.
        if not done.wait(deadline_s - _SLOW_S) and "RANK" not in os.environ:
            what = f"train_grpo.reward.weights.{name} did not return within engine.deadline_s ({deadline_s:g} s)"
            say_line(f"error: {what}, for problem {problem.id}", sys.stderr)
            os._exit(PipelineError.exit_code)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _attempt(name: str, function: RewardFunction, problem: Problem, *arguments: Any) -> Any:
    """Return what a reward returns, or a Failure if it raises an Exception."""
    returns_list = getattr(function, "compares_group", False) or getattr(function, "judges_steps", False)
    try:
        value = function(problem, *arguments)
        return list(value) if returns_list and isinstance(value, Iterable) else value
    except KeyboardInterrupt:
        raise
    except Exception as error:  # one completion should not end the run
        return failure_of(name, error)
    except BaseException as error:
        raise PipelineError(
            f"train_grpo.reward.weights.{name}: {failure_of(name, error).message} for a completion of {problem.id}; a "
            "reward has to return a number, or raise an Exception for a completion that it cannot score"
        ) from error


def failure_of(name: str, error: BaseException) -> Failure:
    """Return the Failure of a reward that raised `error`, with the line of the user's code."""
    last_line = " ".join(traceback.format_exception_only(error)[-1].split())
    begin = f"reward {name} raised"
    return Failure(f"{begin} {type(error).__name__}", f"{begin} {last_line}{raised_at(error)}")


def _numbers(name: str, values: Any, grade: Grade) -> tuple[float, ...] | Failure:
    """Return the values of a completion as floats, or its first Failure."""
    if isinstance(values, Failure):
        return values
    numbers = []
    for value in values:
        number = _number(name, value, grade)
        if isinstance(number, Failure):
            return number
        numbers.append(number)
    return tuple(numbers)


def _number(name: str, value: Any, grade: Grade) -> float | Failure:
    """Return a value as a float; a Failure if it is infinite, too large, or NaN for a completion with a verdict."""
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch
        value = value.item()
    number = math.inf  # stands for what is no number, or too large for a float
    if isinstance(value, Real | Decimal):
        with suppress(OverflowError):
            number = float(value)
    if math.isinf(number) or (math.isnan(number) and grade.verdict is not Verdict.UNSCORABLE):
        begin = f"reward {name} returned"
        message = f"{begin} {value!r:.100}, where a finite number is expected"
        return Failure(f"{begin} no finite number", message, is_nan=math.isnan(number))
    if abs(number) > MAX_REWARD:
        kind = f"reward {name} is too large"
        return Failure(kind, f"{kind}: {number:g}; the statistics of a group overflow above {MAX_REWARD:g}")
    return number


def reward_errors(
    names: Sequence[str],
    *,
    supervision: str,
    trained_here: bool,
    judge: Mapping[str, Any] | None = None,
    problem: Problem | None = None,
) -> list[str]:
    """Return a line for each reward that cannot be used, tried in a separate process: importing a module runs its code.

    If training runs in this environment (`trained_here`), each reward is called once, about a problem, and so is a
    judge (reward_trial.py). Otherwise a missing package is no error: the training image may have it.
    """
    if not names and not (judge and trained_here):
        return []
    values = problem.model_dump(mode="json") if problem else None
    settings = {"supervision": supervision, "trained_here": trained_here, "judge": judge, "problem": values}
    request = json.dumps({"names": list(names), **settings})
    where = f"train_grpo.reward.weights: trying {', '.join([*names, *(['judge'] if judge else [])])}"
    try:
        process = subprocess.run(
            [sys.executable, "-m", "components.train_grpo.reward_trial", request],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TRIAL_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return [f"{where} takes longer than {_TRIAL_DEADLINE_S:g} s"]
    answers = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    if not answers:
        ending = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return [f"{where} crashed the interpreter: {ending}"]
    lines: list[str] = json.loads(answers[-1].removeprefix(MARK))
    return lines
