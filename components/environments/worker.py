"""The worker processes of environments: they create an environment for each trajectory, and step it."""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, cast

from components.environments.environment import Environment, Observation
from components.shared.custom_code import is_custom
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from components.workers.service import Service, is_out_of_memory

BUILT_IN = {
    "calculator": "components.environments.calculator:Calculator",
    "python": "components.environments.python:Python",
    "search": "components.environments.search:Search",
    "feedback": "components.environments.feedback:Feedback",
}
"""Classes that take the config, imported when they are used; `prepare(config)` is called before if a class has it."""
TRIAL = "trial"
"""Request, without a session, to create one environment; the reply is None, or an error and whether it is only here."""
_MAX_CHARACTERS = 65_536
_MAX_SHOWN_CHARACTERS = 300
_MAX_PARTS, _MAX_NAME_CHARACTERS = 50, 100
_MAX_REWARD = 1e15
"""Its square, summed over a rollout, still fits into a float32."""
_SPARE_BYTES = 32 << 20
"""Memory that a worker must have left before it creates its first environment."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""The address in the default `repr` of objects, which differs in each process."""
KEY = "train_sft.model.tools"


class UnavailableHereError(PipelineError):
    """A user's environment needs a package, file or server that this machine lacks; another one may have it."""


class EnvironmentService(Service):
    """Steps environments; a session is a trajectory, begun with its problem, and a request is a turn of the model."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Import the environment; if that fails, the reply to `TRIAL` says why."""
        self._tools = ToolsConfig.model_validate(config)
        self._error: PipelineError | None = None
        try:
            self._create = _constructor(self._tools)
        except PipelineError as error:
            self._error = error

    def begin(self, start: Any) -> Environment:
        """Return an environment of a problem."""
        environment = self._create()
        try:
            environment.reset(Problem.model_validate(start))
        except BaseException:
            with suppress(Exception):
                self.end(environment)  # frees its resources, such as connections
            raise
        return environment

    def answer(self, state: Environment | None, request: Any) -> Any:
        """Return the text of an observation, whether it is the last one, and its rewards."""
        if state is None:
            error = self._error or self._trial_error()
            return None if error is None else [str(error), isinstance(error, UnavailableHereError)]
        observation = _valid(state.step(request))
        return [observation.text, observation.done, dict(observation.rewards)]

    def end(self, state: Any) -> None:
        """Call the `close` method of an environment if it has one."""
        if hasattr(state, "close"):
            state.close()

    def described(self, error: BaseException) -> str:
        """Return how an environment failed, and in which file and line."""
        if isinstance(error, _InvalidObservationError):
            return str(error)[:_MAX_SHOWN_CHARACTERS]
        try:
            message = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n")[0]
            message = _ADDRESS.sub("0x...", message)[:_MAX_SHOWN_CHARACTERS]
        except Exception:  # its __str__ is the user's
            message = type(error).__name__
        place = error.__traceback__
        if place is None:
            return f"raised {message}"
        while place.tb_next:
            place = place.tb_next
        return f"raised {message} ({Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})"

    def _trial_error(self) -> PipelineError | None:
        """Create and close one environment; return why that failed, or None."""
        try:
            bytearray(_SPARE_BYTES)  # raises MemoryError if the limit leaves less
            environment = self._create()
            _require_methods(environment, self._tools)
            with suppress(BaseException):  # the user's code may raise anything
                self.end(environment)
        except PipelineError as error:
            return error
        except BaseException as error:  # the user's code may raise anything
            if is_out_of_memory(error):
                gib = f"{self._tools.memory_gib:g} GiB"
                return PipelineError(f"{KEY}.memory_gib: {gib} do not suffice for one environment; set more")
            kind = UnavailableHereError if isinstance(error, ImportError | OSError) else PipelineError
            return kind(f"{KEY}.arguments: {self._tools.environment} cannot be made with them: {self.described(error)}")
        return None


def _constructor(tools: ToolsConfig) -> Callable[[], Environment]:
    """Return a function that creates an environment; PipelineError if a user's class cannot be used."""
    if is_custom(tools.environment):
        return partial(_own_class(tools), **tools.arguments)
    built_in = _attribute(BUILT_IN[tools.environment])
    if hasattr(built_in, "prepare"):
        built_in.prepare(tools)  # before workers are forked
    return partial(built_in, tools)


def _attribute(name: str) -> Any:
    """Return the object with the name `package.module:attribute`; None if the module has no such attribute."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute, None)


def _own_class(tools: ToolsConfig) -> Callable[..., Environment]:
    """Return a user's class; PipelineError if it is not there, or lacks a method or argument."""
    where, (module, _, name) = f"{KEY}.environment: {tools.environment}", tools.environment.partition(":")
    try:
        own_class = _attribute(tools.environment)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_own_module = missing is None or f"{module}.".startswith(f"{missing}.")  # not a package that it imports
        kind = PipelineError if is_own_module else UnavailableHereError
        raise kind(
            f"{where}: module {module} cannot be imported ({type(error).__name__}: {error}); "
            "put it into the folder in which the command is run or into PYTHONPATH, or install it"
        ) from None
    if not callable(own_class):
        raise PipelineError(f"{where}: {module} has no class `{name}`")
    for method in ("reset", "step"):
        if not callable(getattr(own_class, method, None)):
            raise PipelineError(f"{where}: has no method `{method}`; an environment has reset(problem) and step(text)")
    with suppress(ValueError):  # some classes in C have no signature
        _require_arguments(inspect.signature(own_class), tools.arguments)
    return cast(Callable[..., Environment], own_class)


def _require_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raise PipelineError if a class does not accept the arguments of the config."""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [each.name for each in signature.parameters.values() if each.kind in kinds]
        unknown = [name for name in arguments if name not in names]
        wrong = f"arguments.{unknown[0]}: no such argument" if unknown else f"arguments: {error}"
        raise PipelineError(f"{KEY}.{wrong}; accepted: {', '.join(names) or 'none'}") from None


def _require_methods(environment: Environment, tools: ToolsConfig) -> None:
    """Raise PipelineError if a method of an environment does not take one argument."""
    for method, argument in (("reset", "problem"), ("step", "text")):
        with suppress(ValueError):  # some functions in C have no signature
            try:
                inspect.signature(getattr(environment, method)).bind(argument)
            except TypeError as error:
                raise PipelineError(
                    f"{KEY}.environment: {tools.environment}: its method `{method}` has to take one argument, "
                    f"`{argument}` ({error})"
                ) from None


class _InvalidObservationError(Exception):
    """An environment returned something other than an observation."""


def _valid(answer: object) -> Observation:
    """Return an observation, its text cut and its rewards as floats; _InvalidObservationError if it is not valid."""
    if not isinstance(answer, Observation):
        raise _InvalidObservationError(f"step returned {_short(answer)}, where an Observation is expected")
    text, done, rewards = answer.text, answer.done, answer.rewards
    if not isinstance(text, str):
        raise _InvalidObservationError(f"the text of an observation is {_short(text)}, where text is expected")
    if not isinstance(done, bool):
        raise _InvalidObservationError(f"done is {_short(done)}, where True or False is expected")
    if not isinstance(rewards, Mapping) or len(rewards) > _MAX_PARTS:
        raise _InvalidObservationError(f"rewards are {_short(rewards)}, where up to {_MAX_PARTS} by name are expected")
    # Text that is not valid Unicode, such as one half of a surrogate pair, cannot be tokenised.
    text = text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return Observation(text, done, {_name(name): _number(name, value) for name, value in rewards.items()})


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        raise _InvalidObservationError(f"the name of a reward is {_short(name)}, where a short text is expected")
    return name


def _number(name: object, value: object) -> float:
    number = math.nan
    if isinstance(value, Real):
        with suppress(OverflowError):
            number = float(value)
    if not abs(number) <= _MAX_REWARD:  # not `>`, which NaN would pass
        raise _InvalidObservationError(f"the reward {name} is {_short(value)}, where a finite number is expected")
    return number


def _short(value: object) -> str:
    try:
        return _ADDRESS.sub("0x...", repr(value))[:100]
    except Exception:  # its __repr__ is the user's
        return f"a {type(value).__name__}"
