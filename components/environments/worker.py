"""The processes of environments: `python -m components.environments.worker SOCKET PARENT CONFIG`.

    pool (pool.py) -> fork server -> supervisors -> workers -> what an environment starts

The fork server imports the environment once, and forks a worker for each socket that it is sent. Between the two stands
a supervisor: it ends when the worker ends or its parent does, and kills all that the worker has started.

Each line to a worker is a request as JSON, and each line back a reply. A worker keeps the environments of the
trajectories that it has begun; one that it does not have is replayed from the turns that come with the request.
"""

import ctypes
import errno
import gc
import importlib
import inspect
import json
import math
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
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
"""Classes whose objects are made with the config of tools; a `prepare` method is called with it before. They are not
imported here: a run uses one of them."""
READY = b"ready"
"""Reply of the fork server once the environment is imported, and to `TRY`; in its place comes an error as JSON."""
TRY, FORK, END = b"try", b"fork", b"end"
"""Requests to the fork server: make one environment, as a trial; fork a worker at the other end of the socket that
comes with the request; end the worker whose number follows, and reply with its exit code."""
HEARTBEAT = b"alive"
"""Sent by a worker for each past turn that it has replayed."""
MAX_MESSAGE_BYTES = 2000
_MAX_CHARACTERS = 65_536
_MAX_SHOWN_CHARACTERS = 300
_MAX_PARTS, _MAX_NAME_CHARACTERS = 50, 100
_MAX_REWARD = 1e15
"""Whose square still fits, in float32, into sums over a rollout."""

_SPARE_BYTES = 32 << 20
"""Memory that a worker has to have left before it makes its first environment."""
_MAX_KILL_S = 5.0
"""Time in which killed processes end; one of another user cannot be killed."""
_SIGNAL_EXIT_CODE = 128
"""Added to the number of the signal that ended a process, as shells do."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""Where an object lies, in the text that objects have by default: it differs in each process."""

_KEY = "train_sft.model.tools"
_libc = ctypes.CDLL(None, use_errno=True)
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # options of prctl


class _UnavailableHereError(PipelineError):
    """An own environment needs a package, file or server that this machine may lack and another one have."""


def main(descriptor: str, parent: str, config: str) -> None:
    """Import the environment and serve requests until the socket is closed at its other end; then end all workers."""
    end_with_parent(int(parent))  # another process that it forked may hold the other end, and outlive it
    _adopt_orphans()
    control = socket.socket(fileno=int(descriptor))
    tools = ToolsConfig.model_validate_json(config)
    try:
        make = _maker(tools)
    except PipelineError as error:
        control.sendall(_message(error))
        return
    control.sendall(READY)
    gc.collect()
    gc.freeze()  # what workers share with this process is not searched for garbage, which would copy it
    _serve(control, make, tools)
    _kill_children()


def _serve(control: socket.socket, make: Callable[[], Environment], tools: ToolsConfig) -> None:
    supervisors: set[int] = set()
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not request:
            break
        command, _, number = request.partition(b" ")
        if command == TRY:
            control.sendall(_try(make, tools, control))
        elif command == END:
            control.sendall(str(_end(int(number), supervisors)).encode("ascii"))
        elif descriptors:
            with socket.socket(fileno=descriptors[0]) as channel:
                supervisors.add(_fork(partial(_work, channel, make, tools), control))
    for supervisor in supervisors:
        os.kill(supervisor, signal.SIGTERM)
    for supervisor in supervisors:
        os.waitpid(supervisor, 0)


def _message(error: PipelineError) -> bytes:
    text = str(error)[: MAX_MESSAGE_BYTES // 6]  # characters become up to six bytes
    return json.dumps([text, isinstance(error, _UnavailableHereError)]).encode("ascii")


def _maker(tools: ToolsConfig) -> Callable[[], Environment]:
    """Return a function that makes an environment; PipelineError where none can be made here."""
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
        raise (_UnavailableHereError if is_elsewhere else PipelineError)(
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


def _try(make: Callable[[], Environment], tools: ToolsConfig, control: socket.socket) -> bytes:
    """Make one environment in a process with the limits of a worker; return READY, or what is wrong as JSON."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            supervisor = _fork(partial(_try_here, theirs, make, tools), control)
        message = ours.recv(MAX_MESSAGE_BYTES)
    code = _end(supervisor, {supervisor})
    ending = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    key = f"{_KEY}.environment: {tools.environment}"
    return message or _message(
        PipelineError(f"{key}: making one ended its process {ending}; set a larger memory_gib if it needs more memory")
    )


def _try_here(channel: socket.socket, make: Callable[[], Environment], tools: ToolsConfig) -> None:
    reply, gib = READY, f"{tools.memory_gib:g} GiB"
    out_of_memory = _message(PipelineError(f"{_KEY}.memory_gib: {gib} do not suffice for one environment; set more"))
    try:
        limit(resource.RLIMIT_AS, int(tools.memory_gib * 2**30))
        bytearray(_SPARE_BYTES)
        environment = make()
        _require_methods(environment, tools)
        _close(environment)
    except MemoryError:
        reply = out_of_memory
    except PipelineError as error:
        reply = _message(error)
    except BaseException as error:  # what people write may fail in any way
        kind = _UnavailableHereError if isinstance(error, ImportError | OSError) else PipelineError
        reply = _message(kind(f"{_KEY}.arguments: {tools.environment} cannot be made with them: {_described(error)}"))
    channel.sendall(reply)


def _require_methods(environment: Environment, tools: ToolsConfig) -> None:
    for method, argument in (("reset", "problem"), ("step", "text")):
        with suppress(ValueError):  # some functions in C have no signature
            try:
                inspect.signature(getattr(environment, method)).bind(argument)
            except TypeError as error:
                raise PipelineError(
                    f"{_KEY}.environment: {tools.environment}: its method `{method}` has to take one argument, "
                    f"`{argument}` ({error})"
                ) from None


# Processes and their ends.


def _fork(work: Callable[[], object], control: socket.socket) -> int:
    """Have work done in a process of its own; return the number of its supervisor, which ends with the same code."""
    server = os.getpid()
    if supervisor := os.fork():
        return supervisor
    try:
        control.close()
        _supervise(work, server)
    finally:
        os._exit(1)


def _supervise(work: Callable[[], object], server: int) -> NoReturn:
    """Fork a process for some work, kill what it leaves behind, and end with its exit code.

    SIGTERM, which comes when the fork server ends as well, kills it at once.
    """
    supervisor, worker = os.getpid(), 0

    def end(*_: object) -> None:
        if not worker:
            os._exit(1)
        _kill(worker)

    signal.signal(signal.SIGTERM, end)
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != server:  # it has ended before
        os._exit(1)
    _adopt_orphans()
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(supervisor)
        os.setsid()
        limit(resource.RLIMIT_CORE, 0)
        work()
        os._exit(0)  # without what an environment may have registered to run at exit
    os.closerange(3, 1 << 16)  # its socket is to be closed once the worker ends
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != worker:
        os.waitpid(ended.si_pid, 0)  # an orphan that it has adopted
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill(worker)  # its process group, before its number is free
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    _kill_children()
    os._exit(code if code >= 0 else _SIGNAL_EXIT_CODE - code)


def _adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(supervisor: int, supervisors: set[int]) -> int:
    """Kill a worker with all that it has started, and return its exit code: its own, where it had ended before."""
    if supervisor not in supervisors:
        return -signal.SIGKILL
    os.kill(supervisor, signal.SIGTERM)
    status = os.waitpid(supervisor, 0)[1]
    supervisors.remove(supervisor)
    if os.WIFSIGNALED(status):  # it was killed before it could kill what the worker had started
        _kill_children(but=supervisors)
        return -os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return code if code <= _SIGNAL_EXIT_CODE else _SIGNAL_EXIT_CODE - code


def _kill_children(but: AbstractSet[int] = frozenset()) -> None:
    """Kill all child processes except some; theirs are adopted as they end, and killed too."""
    until = time.monotonic() + _MAX_KILL_S
    while (strays := _children() - but) and time.monotonic() < until:
        for stray in strays:
            _kill(stray)
            os.waitpid(stray, os.WNOHANG)
        time.sleep(0.001)


def _children() -> set[int]:
    return {int(child) for path in Path("/proc/self/task").glob("*/children") for child in path.read_bytes().split()}


def _kill(process: int) -> None:
    """Kill a child process, with its process group where it leads one."""
    for kill in (os.killpg, os.kill):
        with suppress(OSError):  # it leads no group, or runs as another user
            kill(process, signal.SIGKILL)


# The worker.


def _work(channel: socket.socket, make: Callable[[], Environment], tools: ToolsConfig) -> None:
    """Serve requests until the socket is closed at its other end, or the memory is used up."""
    limit(resource.RLIMIT_AS, int(tools.memory_gib * 2**30))
    worker = os.getpid()
    channel.sendall(b"%d\n" % os.getppid())
    episodes: dict[int, Environment] = {}
    must_exit = False

    def send_heartbeat() -> None:
        if os.getpid() != worker:  # the environment has forked, in a turn that is replayed
            os._exit(0)
        channel.sendall(HEARTBEAT + b"\n")

    with suppress(ConnectionError):
        for line in channel.makefile("rb"):
            request = json.loads(line)
            for ended in request["ended"]:
                _close(episodes.pop(ended, None))
            reply: list[Any] = ["", False, {}, None]
            if "text" in request:
                reply, must_exit = _answer(request, episodes, make, send_heartbeat)
            if os.getpid() != worker:  # the environment has forked
                return
            channel.sendall(json.dumps([request["number"], must_exit, *reply]).encode("ascii") + b"\n")
            if must_exit:
                return


def _close(environment: Environment | None) -> None:
    """Call the method of an environment that frees what it holds, where it has one."""
    with suppress(BaseException):  # what people write may fail in any way
        getattr(environment, "close", lambda: None)()


def _answer(
    request: dict[str, Any],
    episodes: dict[int, Environment],
    make: Callable[[], Environment],
    send_heartbeat: Callable[[], None],
) -> tuple[list[Any], bool]:
    """Return the text, whether the trajectory is done, its rewards and a failure; and whether memory is used up."""
    environment = episodes.pop(request["episode"], None)
    try:
        if environment is None:
            environment = make()
            environment.reset(Problem.model_validate(request["problem"]))
            for text in request["past"]:
                environment.step(text)
                send_heartbeat()
        observation = _checked(environment.step(request["text"]))
    except BaseException as error:  # what people write may fail in any way
        _close(environment)
        return ["", True, {}, _described(error)], _is_out_of_memory(error)
    episodes[request["episode"]] = environment
    return [observation.text, observation.done, dict(observation.rewards), None], False


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


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


def _described(error: BaseException) -> str:
    """Return how an environment failed, in the same words each time that it is replayed."""
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


if __name__ == "__main__":
    main(*sys.argv[1:])
