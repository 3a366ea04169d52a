"""A user's own reward: a function of problem, completion and grade, named in the params as `package.module:function`.

Python finds the module in the folder in which the command is run, in PYTHONPATH or among what is installed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from components.shared.errors import PipelineError


def load(name: str) -> Callable[..., Any]:
    """Return the function that `name` says, or a PipelineError that says what is missing."""
    module_name, _, function_name = name.partition(":")
    where = f"train_grpo.reward.weights.{name}"
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's module runs here, and may fail in any way
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
