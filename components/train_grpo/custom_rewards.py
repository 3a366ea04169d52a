"""Calling what people write: rewards are found by name, tried in advance, and may fail in any way.

A custom reward is a function in any module, named in the params as `package.module:function`. Python finds the module
in the folder in which the command is run, in PYTHONPATH or among installed packages. This module is also a command,
which `import_errors` runs to try the imports in a process of its own.
"""

import inspect
import json
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.grading.verifier import Grade, Verdict
from components.shared.errors import PipelineError
from components.shared.lineage import Material, file_digest
from components.shared.problem import Problem

if TYPE_CHECKING:  # torch
    from components.rollout.sampler import Completion

RewardFunction = Callable[..., Any]

_DEADLINE_S = 120.0
_MARK = "rewards that cannot be loaded: "
"""Begins the line with the answer: modules may print what they like."""
_CUSTOM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.ASCII)
MAX_REWARD = 1e15
"""Magnitude of a weight, or of a weighted reward, whose square still fits, in float32, into sums over a rollout."""


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
    function: RewardFunction | None = getattr(module, function_name, None)
    if not callable(function):
        value = "" if function is None else f": it is {function!r:.80}"
        raise PipelineError(f"{where}: {module_name} ({module.__file__}) has no function `{function_name}`{value}")
    if not _takes_three(function):
        group = "completions, grades" if getattr(function, "compares_group", False) else "completion, grade"
        raise PipelineError(
            f"{where}: {function_name} ({module.__file__}) has to take three arguments: problem, {group}"
        )
    return function


def _takes_three(function: RewardFunction) -> bool:
    try:
        inspect.signature(function).bind(None, None, None)
    except ValueError:  # some functions in C have no signature
        return True
    except TypeError:
        return False
    return True


def reward_materials(names: Iterable[str]) -> dict[str, Material]:
    """Return the file of each custom reward among the names of rewards; none for one that is in no file."""
    files = {name: _file_of(name) for name in names if is_custom(name)}
    return {
        name: Material(sha256=file_digest(Path(file)), size_bytes=Path(file).stat().st_size)
        for name, file in files.items()
        if file and Path(file).is_file()
    }


def _file_of(name: str) -> str | None:
    try:
        return getattr(find_spec(name.partition(":")[0]), "origin", None)
    except Exception:  # from the user's package, which this imports; load_reward says what is wrong
        return None


@dataclass(frozen=True)
class Failure:
    """Why a completion has no reward."""

    kind: str
    """What failed, and how: failures of one kind are counted together."""
    message: str
    """What exactly happened this time, in one line."""


def ask(
    name: str,
    weight: float,
    function: RewardFunction,
    problem: Problem,
    completions_G: Sequence["Completion"],
    grades_G: Sequence[Grade],
) -> list[float | Failure]:
    """Return what each completion is worth, or how the reward failed.

    A reward has to be a finite number; NaN is allowed for what has no verdict. One that would end the process, as by
    sys.exit, ends the run with a PipelineError.
    """
    values: Sequence[Any]
    if getattr(function, "compares_group", False):
        values = _attempt(name, problem, lambda: list(function(problem, completions_G, grades_G)))
        if isinstance(values, Failure):
            return [values] * len(grades_G)
        if len(values) != len(grades_G):
            what = f"reward {name} returned a wrong number of values"
            return [Failure(what, f"{what}: {len(values)} for {len(grades_G)} completions")] * len(grades_G)
    else:
        pairs = zip(completions_G, grades_G, strict=True)
        values = [_attempt(name, problem, partial(function, problem, *pair)) for pair in pairs]
    return [_number(name, weight, value, grade) for value, grade in zip(values, grades_G, strict=True)]


def _attempt(name: str, problem: Problem, call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the Failure that describes what it raised."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what people write may fail in any way, and one completion should not end the run
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        last_line = traceback.format_exception_only(error)[-1].strip()
        what = f"reward {name} raised {last_line} ({Path(innermost.filename).name}, line {innermost.lineno})"
        if isinstance(error, Exception):
            return Failure(f"reward {name} raised {type(error).__name__}", what)
        raise PipelineError(
            f"train_grpo.reward.weights.{name}: {what} for a completion of {problem.id}; a reward has to return a "
            "number, or raise an Exception for a completion that it cannot score"
        ) from error


def _number(name: str, weight: float, value: Any, grade: Grade) -> float | Failure:
    """Return a reward as a float; one that is not finite, NaN without need, or too large has failed."""
    if isinstance(value, Failure):
        return value
    number = math.inf
    if isinstance(value, Real):
        with suppress(OverflowError):
            number = float(value)
    if math.isinf(number) or (math.isnan(number) and grade.verdict is not Verdict.UNSCORABLE):
        what = f"reward {name} returned"
        return Failure(f"{what} no finite number", f"{what} {value!r:.100}, where a finite number is expected")
    if abs(number) * max(1.0, abs(weight)) > MAX_REWARD:
        what = f"reward {name} is {abs(number):g} in magnitude, with a weight of {weight:g}: more than {MAX_REWARD:g}"
        return Failure(f"reward {name} is too large", f"{what}, the statistics of a group overflow")
    return number


def import_errors(names: Sequence[str], *, trained_here: bool) -> list[str]:
    """Return a line for each reward that cannot be loaded, tried in a process of its own: importing a module runs it.

    Unless training runs in this very environment, a missing package that a module imports is no error: the image that
    trains may have it.
    """
    if not names:
        return []
    command = [sys.executable, "-m", "components.train_grpo.custom_rewards", str(trained_here), *names]
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


def _import_all(trained_here: str, *names: str) -> Iterator[str]:
    for name in names:
        try:
            load_reward(name)
        except PipelineError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            is_own = missing is None or f"{name.partition(':')[0]}.".startswith(f"{missing}.")
            if is_own or trained_here == str(True):
                yield str(error)


if __name__ == "__main__":
    print(f"\n{_MARK}{json.dumps(list(_import_all(*sys.argv[1:])))}")
