"""The worker processes of environments: they create an environment for each trajectory, and step it."""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any

from components.environments.environment import Environment, Observation
from components.shared.custom_code import import_problem, is_custom, raised_at
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
"""Classes whose argument is the config; they are imported when they are used. If a class has a method `prepare`, it is
called with the config before workers are forked."""
TRIAL = "trial"
"""Request without a session: create an environment. The reply is None, or [error, whether only this machine has it]."""
_MAX_CHARACTERS = 65_536
_MAX_SHOWN_CHARACTERS = 300
_MAX_REWARDS, _MAX_NAME_CHARACTERS = 50, 100
_MAX_REWARD = 1e15
"""Its square, summed over a rollout, still fits into a float32."""
_SPARE_BYTES = 32 << 20
"""Memory that a worker must have left before it creates its first environment."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""The address in the default `repr` of objects, which differs in each process."""
KEY = "train_sft.model.tools"
"""Key of the environment's config, for messages."""


class UnavailableHereError(PipelineError):
    """A user's environment needs a package, file or server that this machine lacks; another one may have it."""


class EnvironmentService(Service):
    """Steps environments; a session is a trajectory, begun with its problem, and a request is a turn of the model."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Import the environment; if that fails, the reply to `TRIAL` says why."""
        self._tools = tools = ToolsConfig.model_validate(config)
        self._create: Callable[[], Environment]
        self._import_error: PipelineError | None = None
        try:
            if is_custom(tools.environment):
                self._create = partial(_own_class(tools), **tools.arguments)
            else:
                built_in = _attribute(BUILT_IN[tools.environment])
                if hasattr(built_in, "prepare"):
                    built_in.prepare(tools)
                self._create = partial(built_in, tools)
        except PipelineError as error:
            self._import_error = error

    def begin(self, start: Any) -> Environment:
        """Return a new environment, reset to the problem `start`."""
        environment = self._create()
        try:
            environment.reset(Problem.model_validate(start))
        except BaseException:
            with suppress(Exception):
                self.end(environment)  # frees its resources, such as connections
            raise
        return environment

    def answer(self, state: Environment | None, request: Any) -> Any:
        """Return the observation after a turn, [text, done, rewards]; without an environment, the reply to `TRIAL`."""
        if state is None:
            error = self._import_error or self._trial_error()
            return None if error is None else [str(error), isinstance(error, UnavailableHereError)]
        observation = _validated(state.step(request))
        return [observation.text, observation.done, dict(observation.rewards)]

    def end(self, state: Any) -> None:
        """Call the `close` method of an environment if it has one."""
        if hasattr(state, "close"):
            state.close()

    def described(self, error: BaseException) -> str:
        """Return how an environment failed, with file and line where it is known."""
        if isinstance(error, _InvalidObservationError):
            return str(error)[:_MAX_SHOWN_CHARACTERS]
        try:
            message = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n")[0]
            message = _ADDRESS.sub("0x...", message)[:_MAX_SHOWN_CHARACTERS]
        except Exception:  # its __str__ is the user's
            message = type(error).__name__
        return f"raised {message}{raised_at(error)}"

    def _trial_error(self) -> PipelineError | None:
        """Create and close one environment; return None, or why that failed."""
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


def _attribute(name: str) -> Any:
    """Return the object with the name `package.module:attribute`; None if the module has no such attribute."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute, None)


def _own_class(tools: ToolsConfig) -> Callable[..., Environment]:
    """Return a user's class; PipelineError if it cannot be imported, or does not accept the arguments of the config."""
    where = f"{KEY}.environment: {tools.environment}"
    module, _, name = tools.environment.partition(":")
    try:
        own_class: Callable[..., Environment] = _attribute(tools.environment)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        kind: type[PipelineError] = PipelineError
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not f"{module}.".startswith(f"{missing}."):  # a package that the user's module imports
            kind = UnavailableHereError
        raise kind(f"{where}: {import_problem(module, error)}") from None
    if not callable(own_class):
        raise PipelineError(f"{where}: {module} has no class `{name}`")
    with suppress(ValueError):  # some classes in C have no signature
        _require_arguments(inspect.signature(own_class), tools.arguments)
    return own_class


def _require_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raise PipelineError unless a class with this signature accepts the arguments."""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [each.name for each in signature.parameters.values() if each.kind in kinds]
        unknown = [name for name in arguments if name not in names]
        wrong = f"arguments.{unknown[0]}: no such argument" if unknown else f"arguments: {error}"
        raise PipelineError(f"{KEY}.{wrong}; accepted: {', '.join(names) or 'none'}") from None


def _require_methods(environment: Environment, tools: ToolsConfig) -> None:
    """Raise PipelineError unless an environment has the methods reset(problem) and step(text)."""
    where = f"{KEY}.environment: {tools.environment}"
    for name, argument in (("reset", "problem"), ("step", "text")):
        method = getattr(environment, name, None)
        if not callable(method):
            raise PipelineError(f"{where}: has no method `{name}`; an environment has reset(problem) and step(text)")
        try:
            inspect.signature(method).bind(argument)
        except ValueError:  # some functions in C have no signature
            continue
        except TypeError as error:
            raise PipelineError(
                f"{where}: its method `{name}` has to take one argument, `{argument}` ({error})"
            ) from None


class _InvalidObservationError(Exception):
    """An environment returned something other than an observation."""


def _validated(result: object) -> Observation:
    """Return what `step` returned, with its text cut and its rewards as floats; _InvalidObservationError if invalid."""
    if not isinstance(result, Observation):
        raise _InvalidObservationError(f"step returned {_short(result)}, where an Observation is expected")
    text, done, rewards = result.text, result.done, result.rewards
    if not isinstance(text, str):
        raise _InvalidObservationError(f"the text of an observation is {_short(text)}, where text is expected")
    if not isinstance(done, bool):
        raise _InvalidObservationError(f"done is {_short(done)}, where True or False is expected")
    if not isinstance(rewards, Mapping) or len(rewards) > _MAX_REWARDS:
        raise _InvalidObservationError(
            f"rewards are {_short(rewards)}, where up to {_MAX_REWARDS} by name are expected"
        )
    # Text that is not valid Unicode, such as one half of a surrogate pair, cannot be tokenised.
    text = text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return Observation(text, done, {name: _reward(name, value) for name, value in rewards.items()})


def _reward(name: object, value: object) -> float:
    """Return a reward as a float; _InvalidObservationError if its name or its value is invalid."""
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        raise _InvalidObservationError(f"the name of a reward is {_short(name)}, where a short text is expected")
    reward = math.nan
    if isinstance(value, Real):
        with suppress(OverflowError):
            reward = float(value)
    if not abs(reward) <= _MAX_REWARD:  # not `>`, which NaN would pass
        raise _InvalidObservationError(f"the reward {name} is {_short(value)}, where a finite number is expected")
    return reward


def _short(value: object) -> str:
    """Return the beginning of a value's `repr` for a message."""
    try:
        return _ADDRESS.sub("0x...", repr(value))[:100]
    except Exception:  # its __repr__ is the user's
        return f"a {type(value).__name__}"
