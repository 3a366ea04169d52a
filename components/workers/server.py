"""The processes of a pool: `python -m components.workers.server SOCKET PARENT MODULE:FUNCTION ARGUMENTS MEMORY_BYTES`.

    pool (pool.py) -> fork server -> supervisors -> workers -> what they start

The fork server makes the service once, and forks a worker for each socket that it is sent. Between the two stands a
supervisor: it ends when the worker ends or its parent does, and kills all that the worker has started.

Each line to a worker is a request as JSON, and each line back a reply. A worker keeps the states of the sessions that
it has begun; one that it does not have is begun anew from what comes with the request.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from components.workers.limits import end_with_parent, limit
from components.workers.service import Service, is_out_of_memory

READY = b"ready"
"""Sent by the fork server once the service is made."""
FORK, END = b"fork", b"end"
"""Requests to the fork server: fork a worker at the other end of the socket that comes with the request; end the worker
whose number follows, and reply with its exit code."""
HEARTBEAT = b"alive"
"""Sent by a worker for each past request that it has been through."""
_MAX_KILL_S = 5.0
"""Time in which killed processes end; one of another user cannot be killed."""
_SIGNAL_EXIT_CODE = 128
"""Added to the number of the signal that ended a process, as shells do."""
_SET_CHILD_SUBREAPER = 36  # of prctl
_libc = ctypes.CDLL(None, use_errno=True)


def main(descriptor: str, parent: str, function: str, arguments: str, memory_bytes: str) -> None:
    """Make the service and serve requests until the socket is closed at its other end; then end all workers."""
    end_with_parent(int(parent))  # another process that it forked may hold the other end, and outlive it
    _adopt_orphans()
    limit(resource.RLIMIT_CORE, 0)
    # A program may be started with signals ignored; then the ends of workers would not be known.
    for number in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    control = socket.socket(fileno=int(descriptor))
    module, _, name = function.partition(":")
    service = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    gc.collect()
    gc.freeze()  # what workers share with this process is not searched for garbage, which would copy it
    control.sendall(READY)
    _serve(control, partial(_work, service, int(memory_bytes)))
    _kill_children()


def _serve(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    supervisors: set[int] = set()
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not request:
            break
        command, _, number = request.partition(b" ")
        if command == END:
            control.sendall(str(_end(int(number), supervisors)).encode("ascii"))
        elif descriptors:
            with socket.socket(fileno=descriptors[0]) as channel:
                supervisors.add(_fork(partial(work, channel), control))
    for supervisor in supervisors:
        os.kill(supervisor, signal.SIGTERM)
    for supervisor in supervisors:
        os.waitpid(supervisor, 0)


# Processes and their ends.


def _fork(work: Callable[[], object], control: socket.socket) -> int:
    """Start work in a new process; return the number of its supervisor, which ends with the same exit code."""
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
    end_with_parent(server, signal.SIGTERM)
    _adopt_orphans()
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(supervisor)
        os.setsid()
        work()
        os._exit(0)  # without what the service may have registered to run at exit
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
    for kill in (os.killpg, os.kill):
        with suppress(OSError):  # it leads no group, or runs as another user
            kill(process, signal.SIGKILL)


# The worker.


def _work(service: Service, memory_bytes: int, channel: socket.socket) -> None:
    """Answer requests until the socket is closed at its other end, or the process is used up."""
    limit(resource.RLIMIT_AS, memory_bytes)
    worker, states = os.getpid(), dict[int, Any]()

    def send(line: bytes) -> None:
        if os.getpid() != worker:  # the service has forked
            os._exit(0)
        channel.sendall(line + b"\n")

    with suppress(ConnectionError):
        send(b"%d" % os.getppid())
        for line in channel.makefile("rb"):
            message = json.loads(line)
            for ended in message["ended"]:
                _free(service, states.pop(ended, None))
            reply: list[Any] = [None, None, False, False]
            if "request" in message:
                reply = _answer(service, states, message, partial(send, HEARTBEAT))
            send(json.dumps([message["number"], *reply]).encode("ascii"))
            if reply[-1]:  # it is to end
                return


def _answer(service: Service, states: dict[int, Any], message: dict[str, Any], beat: Callable[[], None]) -> list[Any]:
    """Answer a request, after its session's past where this process does not have the state; a failure ends the state.

    Return the reply, the failure, whether memory is used up, and whether this process is to end.
    """
    session = message["session"]
    state = states.pop(session, None)  # put back unless the answer fails
    try:
        if state is None and session is not None:
            state = service.begin(message["start"])
            for past in message["past"]:
                service.answer(state, past)
                beat()
        reply = service.answer(state, message["request"])
    except BaseException as error:  # what people write may fail in any way
        _free(service, state)
        is_out = is_out_of_memory(error)
        return [None, service.described(error), is_out, is_out]
    if session is not None:
        states[session] = state
    return [reply, None, False, service.is_used_up()]


def _free(service: Service, state: Any) -> None:
    if state is not None:
        with suppress(BaseException):  # what people write may fail in any way
            service.end(state)


if __name__ == "__main__":
    main(*sys.argv[1:])
