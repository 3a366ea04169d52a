"""What the processes of environments do: they make an environment for each trajectory, and step it."""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from components.environments.environment import Environment, Observation
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig, is_own
from components.workers.service import Service, is_out_of_memory

BUILT_IN = {
    "calculator": "components.environments.calculator:Calculator",
    "python": "components.environments.python:Python",
    "search": "components.environments.search:Search",
    "feedback": "components.environments.feedback:Feedback",
}
"""Classes whose objects are made with the config of tools; a `prepare` method is called with it before. They are not
imported here: a run uses one of them."""
TRIAL = "trial"
"""Request, without a session, to make one environment; the reply is what is wrong, and whether it is so here alone."""
_MAX_CHARACTERS = 65_536
_MAX_SHOWN_CHARACTERS = 300
_MAX_PARTS, _MAX_NAME_CHARACTERS = 50, 100
_MAX_REWARD = 1e15
"""Whose square still fits, in float32, into sums over a rollout."""
_SPARE_BYTES = 32 << 20
"""Memory that a worker has to have left before it makes its first environment."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""Where an object lies, in the text that objects have by default: it differs in each process."""
KEY = "train_sft.model.tools"


class UnavailableHereError(PipelineError):
    """An own environment needs a package, file or server that this machine may lack and another one have."""


class EnvironmentService(Service):
    """Steps environments; a session is a trajectory, begun with its problem, and a request is a turn of the model."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Import the environment; what is wrong with it is said in the trial."""
        self._tools = ToolsConfig.model_validate(config)
        self._error: PipelineError | None = None
        try:
            self._make = _maker(self._tools)
        except PipelineError as error:
            self._error = error

    def begin(self, start: Any) -> Environment:
        """Return an environment of a problem."""
        environment = self._make()
        try:
            environment.reset(Problem.model_validate(start))
        except BaseException:
            with suppress(Exception):  # what it holds, such as a connection, is freed all the same
                self.end(environment)
            raise
        return environment

    def answer(self, state: Environment | None, request: Any) -> Any:
        """Return the text of an observation, whether it is the last one, and its rewards."""
        if state is None:
            error = self._error or self._tried()
            return error and [str(error), isinstance(error, UnavailableHereError)]
        observation = _checked(state.step(request))
        return [observation.text, observation.done, dict(observation.rewards)]

    def end(self, state: Any) -> None:
        """Call the method of an environment that frees what it holds, where it has one."""
        getattr(state, "close", lambda: None)()

    def described(self, error: BaseException) -> str:
        """Return how an environment failed, and where."""
        if isinstance(error, _NonsenseError):
            return str(error)[:_MAX_SHOWN_CHARACTERS]
        place, line = error.__traceback__, 0
        while place:  # the innermost
            line, file, place = place.tb_lineno, place.tb_frame.f_code.co_filename, place.tb_next
        try:
            message = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n")[0]
            message = _ADDRESS.sub("0x...", message)[:_MAX_SHOWN_CHARACTERS]
        except Exception:  # its __str__ is the user's
            message = type(error).__name__
        return f"raised {message} ({Path(file).name}, line {line})" if line else f"raised {message}"

    def _tried(self) -> PipelineError | None:
        try:
            bytearray(_SPARE_BYTES)
            environment = self._make()
            _require_methods(environment, self._tools)
            with suppress(BaseException):  # what people write may fail in any way
                self.end(environment)
        except PipelineError as error:
            return error
        except BaseException as error:  # what people write may fail in any way
            if is_out_of_memory(error):
                gib = f"{self._tools.memory_gib:g} GiB"
                return PipelineError(f"{KEY}.memory_gib: {gib} do not suffice for one environment; set more")
            kind = UnavailableHereError if isinstance(error, ImportError | OSError) else PipelineError
            return kind(f"{KEY}.arguments: {self._tools.environment} cannot be made with them: {self.described(error)}")
        return None


def _maker(tools: ToolsConfig) -> Callable[[], Environment]:
    if is_own(tools.environment):
        return partial(_own_class(tools), **tools.arguments)
    kind = _attribute(BUILT_IN[tools.environment])
    if prepare := getattr(kind, "prepare", None):
        prepare(tools)  # what all workers share is read once, before they are forked
    return partial(kind, tools)


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute, None)


def _own_class(tools: ToolsConfig) -> Callable[..., Environment]:
    where, (module, _, name) = f"{KEY}.environment: {tools.environment}", tools.environment.partition(":")
    try:
        kind = _attribute(tools.environment)
    except (Exception, SystemExit) as error:  # the user's module runs here, and may fail in any way
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_elsewhere = missing is not None and not f"{module}.".startswith(f"{missing}.")
        raise (UnavailableHereError if is_elsewhere else PipelineError)(
            f"{where}: module {module} cannot be imported ({type(error).__name__}: {error}); "
            "put it into the folder in which the command is run or into PYTHONPATH, or install it"
        ) from None
    if not callable(kind):
        raise PipelineError(f"{where}: {module} has no class `{name}`")
    for method in ("reset", "step"):
        if not callable(getattr(kind, method, None)):
            raise PipelineError(f"{where}: has no method `{method}`; an environment has reset(problem) and step(text)")
    with suppress(ValueError):  # some classes in C have no signature
        _require_arguments(inspect.signature(kind), tools.arguments)
    made: Callable[..., Environment] = kind
    return made


def _require_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    try:
        signature.bind(**arguments)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [each.name for each in signature.parameters.values() if each.kind in kinds]
        unknown = [name for name in arguments if name not in names]
        key, what = (f"arguments.{unknown[0]}", "no such argument") if unknown else ("arguments", str(error))
        raise PipelineError(f"{KEY}.{key}: {what}; accepted: {', '.join(names) or 'none'}") from None


def _require_methods(environment: Environment, tools: ToolsConfig) -> None:
    for method, argument in (("reset", "problem"), ("step", "text")):
        with suppress(ValueError):  # some functions in C have no signature
            try:
                inspect.signature(getattr(environment, method)).bind(argument)
            except TypeError as error:
                raise PipelineError(
                    f"{KEY}.environment: {tools.environment}: its method `{method}` has to take one argument, "
                    f"`{argument}` ({error})"
                ) from None


class _NonsenseError(Exception):
    """An environment returned something other than an observation."""


def _checked(answer: object) -> Observation:
    """Return an observation with its text cut and its rewards as plain numbers; _NonsenseError where it is none."""
    if not isinstance(answer, Observation):
        raise _NonsenseError(f"step returned {_short(answer)}, where an Observation is expected")
    if not isinstance(answer.text, str):
        raise _NonsenseError(f"the text of an observation is {_short(answer.text)}, where text is expected")
    if not isinstance(answer.done, bool):
        raise _NonsenseError(f"done is {_short(answer.done)}, where True or False is expected")
    if not isinstance(answer.rewards, Mapping) or len(answer.rewards) > _MAX_PARTS:
        raise _NonsenseError(f"rewards are {_short(answer.rewards)}, where up to {_MAX_PARTS} by name are expected")
    rewards = {_name(name): _number(name, value) for name, value in answer.rewards.items()}
    # What is no valid text, such as half of a pair of surrogates, could not be tokenised.
    text = answer.text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return Observation(text, answer.done, rewards)


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        raise _NonsenseError(f"the name of a reward is {_short(name)}, where a short text is expected")
    return name


def _number(name: object, value: object) -> float:
    number = math.nan
    if isinstance(value, Real):
        with suppress(OverflowError):
            number = float(value)
    if not abs(number) <= _MAX_REWARD:
        raise _NonsenseError(f"the reward {name} is {_short(value)}, where a finite number is expected")
    return number


def _short(value: object) -> str:
    try:
        return _ADDRESS.sub("0x...", repr(value))[:100]
    except Exception:  # its __repr__ is the user's
        return f"a {type(value).__name__}"
