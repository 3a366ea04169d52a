"""A user's own reward: a function of problem, completion and grade, named in the params as `package.module:function`.

Python finds the module in the folder in which the command is run, in PYTHONPATH or among what is installed.
`unusable` runs this module to see whether rewards can be loaded.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from components.shared.errors import PipelineError

_DEADLINE_S = 120.0
_MARK = "rewards that cannot be loaded: "
"""Begins the line with the answer: modules may print what they like."""


def load(name: str) -> Callable[..., Any]:
    """Return the function that `name` says, or a PipelineError that says what is missing."""
    module_name, _, function_name = name.partition(":")
    where = f"train_grpo.reward.weights.{name}"
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module runs here, and may fail in any way
        raise PipelineError(
            f"{where}: module {module_name} cannot be imported ({type(error).__name__}: {error}); "
            "it has to be in the folder in which the command is run, in PYTHONPATH, or installed"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        instead = "" if function is None else f", but {function!r:.80}"
        raise PipelineError(f"{where}: {module_name} ({module.__file__}) has no function `{function_name}`{instead}")
    found: Callable[..., Any] = function
    return found


def unusable(names: Sequence[str], *, trained_here: bool) -> list[str]:
    """Return a line for each reward that cannot be loaded; tried in a process of its own, as modules run when imported.

    Unless training runs in this very environment, a package that a module imports and that is not installed is no
    fault: the image that trains may have it.
    """
    if not names:
        return []
    command = [
        sys.executable,
        "-m",
        "components.train_grpo.own_reward",
        "here" if trained_here else "elsewhere",
        *names,
    ]
    where = f"train_grpo.reward.weights: importing {', '.join(names)}"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return [f"{where} takes longer than {_DEADLINE_S:g} s"]
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        ending = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [f"{where} crashed the interpreter: {ending}"]
    lines: list[str] = json.loads(answers[-1].removeprefix(_MARK))
    return lines


def _trial(place: str, *names: str) -> list[str]:
    lines = []
    for name in names:
        try:
            load(name)
        except PipelineError as error:
            if place == "here" or not _lacks_another_package(error.__cause__, name):
                lines.append(str(error))
    return lines


def _lacks_another_package(cause: BaseException | None, name: str) -> bool:
    if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
        return False
    module_name = name.partition(":")[0]
    return not f"{module_name}.".startswith(f"{cause.name}.")


if __name__ == "__main__":
    print(f"\n{_MARK}{json.dumps(_trial(*sys.argv[1:]))}")
