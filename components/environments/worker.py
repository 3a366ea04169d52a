"""Where environments run: `python -m components.environments.worker SOCKET PARENT CONFIG`.

This process imports the environment once, and forks a worker for each socket that it is sent. From there, each line is
a turn of one trajectory as JSON, and each line back what its environment answers. A worker keeps the environments of
the trajectories that it has begun; one that it does not have is played again from the turns that come with the request.
"""

import gc
import importlib
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any, NoReturn

from components.environments.environment import Environment, Observation
from components.grading.sandbox.confinement import end_with_parent, limit
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig, is_own

BUILT_IN = {
    "calculator": "components.environments.calculator:Calculator",
    "python": "components.environments.python:Python",
    "search": "components.environments.search:Search",
    "feedback": "components.environments.feedback:Feedback",
}
"""Each is made with the config of tools; what it has as `prepare` is called with it before. Not imported here: a run
uses one of them."""
READY = b"ready"
"""Sent when the environment can be made; in its place comes an error as JSON."""
FORK, END = b"fork", b"end"
"""What the first process is asked for: a worker at the other end of the socket that comes with it; the end of the
worker whose process number follows, which is answered by its exit code."""
ALIVE = b"alive"
"""Sent by a worker for each turn that it has played again."""
MAX_MESSAGE_BYTES = 2000
_MAX_CHARACTERS = 65_536
_MAX_SHOWN_CHARACTERS = 300
_MAX_PARTS, _MAX_NAME_CHARACTERS = 50, 100
_MAX_REWARD = 1e15
"""Whose square still fits, in float32, into sums over a rollout."""

_KEY = "train_sft.model.tools"


class _MissingPackageError(PipelineError):
    """A package that an own environment imports is not installed here."""


def main(descriptor: str, parent: str, config: str) -> None:
    """Fork workers as asked for by the socket, until it is closed at its other end; they end with this process."""
    end_with_parent(int(parent))  # another process that it forked may hold the other end, and outlive it
    control = socket.socket(fileno=int(descriptor))
    tools = ToolsConfig.model_validate_json(config)
    try:
        make = _maker(tools)
    except PipelineError as error:
        message = str(error)[: MAX_MESSAGE_BYTES // 6]  # characters become up to six bytes
        control.sendall(json.dumps([message, isinstance(error, _MissingPackageError)]).encode("ascii"))
        return
    control.sendall(READY)
    gc.collect()
    gc.freeze()  # what workers share with this process is not searched for garbage, which would copy it
    own_process = os.getpid()
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not request:
            return
        command, _, process = request.partition(b" ")
        if command == END:
            control.sendall(str(_end(int(process))).encode("ascii"))
        elif descriptors:
            with socket.socket(fileno=descriptors[0]) as channel:
                if not os.fork():
                    control.close()
                    end_with_parent(own_process)
                    limit(resource.RLIMIT_AS, int(tools.memory_gib * 2**30))
                    limit(resource.RLIMIT_CORE, 0)
                    _work(channel, make)


def _maker(tools: ToolsConfig) -> Callable[[], Environment]:
    """Return what makes an environment; PipelineError where it cannot be made here."""
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
    where, (module, _, name) = f"{_KEY}.environment: {tools.environment}", tools.environment.partition(":")
    try:
        kind = _attribute(tools.environment)
    except (Exception, SystemExit) as error:  # the user's module runs here, and may fail in any way
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_elsewhere = missing is not None and not f"{module}.".startswith(f"{missing}.")
        raise (_MissingPackageError if is_elsewhere else PipelineError)(
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
        raise PipelineError(f"{_KEY}.{key}: {what}; accepted: {', '.join(names) or 'none'}") from None


def _end(process: int) -> int:
    """Kill a worker with what it has started, and return its exit code: its own, where it had ended before."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _work(channel: socket.socket, make: Callable[[], Environment]) -> NoReturn:
    """Answer turns from the socket until it is closed at the other end."""
    os.setsid()
    own_process = os.getpid()
    channel.sendall(b"%d\n" % own_process)
    episodes: dict[int, Environment] = {}
    with suppress(ConnectionError):
        for line in channel.makefile("rb"):
            request = json.loads(line)
            for ended in request["ended"]:
                episodes.pop(ended, None)
            reply, is_worn = _answer(request, episodes, make, partial(channel.sendall, ALIVE + b"\n"))
            if os.getpid() != own_process:  # the environment has forked
                os._exit(0)
            channel.sendall(json.dumps([request["step"], is_worn, *reply]).encode("ascii") + b"\n")
            if is_worn:
                break
    os._exit(0)  # without what an environment may have registered to run at exit


def _answer(
    request: dict[str, Any],
    episodes: dict[int, Environment],
    make: Callable[[], Environment],
    say_alive: Callable[[], None],
) -> tuple[list[Any], bool]:
    """The text, whether the trajectory is done, its rewards and how the environment failed; whether to end after it."""
    episode, is_worn = request["episode"], False
    try:
        environment = episodes.pop(episode, None)
        if environment is None:
            environment = make()
            environment.reset(Problem.model_validate(request["problem"]))
            for text in request["past"]:
                say_alive()
                environment.step(text)
            say_alive()
        observation = _checked(environment.step(request["text"]))
        episodes[episode] = environment
    except BaseException as error:  # what people write may fail in any way
        is_worn = isinstance(error, MemoryError)
        environment = None
        return ["", True, {}, _described(error)], is_worn
    return [observation.text, observation.done, dict(observation.rewards), None], is_worn


class _NonsenseError(Exception):
    """An environment answered what is no observation."""


def _checked(answer: object) -> Observation:
    """An answer with its text cut, and its rewards as plain numbers."""
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
        return f"{value!r:.100}"
    except Exception:  # its __repr__ is the user's
        return f"a {type(value).__name__}"


def _described(error: BaseException) -> str:
    if isinstance(error, _NonsenseError):
        return str(error)[:_MAX_SHOWN_CHARACTERS]
    place, line = error.__traceback__, 0
    while place:  # the innermost
        line, file, place = place.tb_lineno, place.tb_frame.f_code.co_filename, place.tb_next
    try:
        message = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n")[0][:_MAX_SHOWN_CHARACTERS]
    except Exception:  # its __str__ is the user's
        message = type(error).__name__
    return f"raised {message} ({os.path.basename(file)}, line {line})" if line else f"raised {message}"  # noqa: PTH119


if __name__ == "__main__":
    main(*sys.argv[1:])
