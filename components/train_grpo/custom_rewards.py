"""Custom rewards: functions of the user's, named in the params as `package.module:function` (see rewards.py).

Python finds the module in the folder in which the command is run, in PYTHONPATH or among what is installed. This module
is also a command, which `import_errors` runs to try the imports in a process of its own.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from components.shared.errors import PipelineError

_DEADLINE_S = 120.0
_MARK = "rewards that cannot be loaded: "
"""Begins the line with the answer: modules may print what they like."""
_CUSTOM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.ASCII)


def is_custom(name: str) -> bool:
    """Return whether the name of a reward is that of a user's function, `package.module:function`."""
    return _CUSTOM.fullmatch(name) is not None


def load_reward(name: str) -> Callable[..., Any]:
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
    reward: Callable[..., Any] = function
    return reward


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
