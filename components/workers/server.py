"""The processes of a pool: `python -m components.workers.server SOCKET PARENT MODULE:FUNCTION ARGUMENTS MEMORY_BYTES`.

    pool (pool.py) -> fork server -> supervisors -> workers -> what they start

The fork server builds the service once, and forks a worker for each socket that it receives. Between the two runs a
supervisor: when the worker or the fork server ends, it kills everything that the worker started, and ends too.

Each line to a worker is a request as JSON, and each line back a reply. A worker keeps the states of its sessions; a
request for another session comes with the session's start and past requests, which the worker replays.
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
"""Sent by the fork server once the service is built."""
FORK, END = b"fork", b"end"
"""Requests to the fork server: fork a worker that uses the socket sent along; or end the worker whose process ID
follows, and reply with its exit code."""
HEARTBEAT = b"alive"
"""Sent by a worker after each past request that it replayed."""
_MAX_KILL_S = 5.0  # longest wait for killed processes to end; a process of another user cannot be killed
_SIGNAL_EXIT_CODE = 128  # added to the number of the signal that ended a process, as shells do
_SET_CHILD_SUBREAPER = 36  # of prctl
_libc = ctypes.CDLL(None, use_errno=True)


def main(descriptor: str, parent: str, function: str, arguments: str, memory_bytes: str) -> None:
    """Build the service, and serve requests until the other end of the socket is closed."""
    end_with_parent(int(parent))  # a process forked by the parent may hold the other end open and outlive it
    _adopt_orphans()
    limit(resource.RLIMIT_CORE, 0)
    # Inherited settings may ignore or block the signals of a worker's time limit (SIGPROF) and of its end (SIGCHLD).
    for number in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    control = socket.socket(fileno=int(descriptor))
    module, _, name = function.partition(":")
    service = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    gc.collect()
    gc.freeze()  # garbage collection in a worker would write to, and so copy, the memory shared with this process
    control.sendall(READY)
    _serve(control, partial(_work, service, int(memory_bytes)))
    _kill_children()


def _serve(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Fork and end workers, which run `work`, until the other end of the socket is closed; then end all of them."""
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
    """Run `work` in a new process; return the process ID of its supervisor, which ends with the same exit code."""
    server = os.getpid()
    if supervisor := os.fork():
        return supervisor
    try:
        control.close()
        _supervise(work, server)
    finally:  # reached only if _supervise fails
        os._exit(1)


def _supervise(work: Callable[[], object], server: int) -> NoReturn:
    """Run `work` in a forked process, kill what it leaves behind, and exit with its exit code.

    SIGTERM, which the kernel also sends when the fork server ends, kills the forked process at once.
    """
    supervisor, worker = os.getpid(), 0

    def on_sigterm(*_: object) -> None:
        if not worker:
            os._exit(1)
        _kill(worker)  # the loop below then ends

    signal.signal(signal.SIGTERM, on_sigterm)
    end_with_parent(server, signal.SIGTERM)
    _adopt_orphans()
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(supervisor)
        os.setsid()
        work()
        os._exit(0)  # skips exit handlers that the service may have registered
    os.closerange(3, 1 << 16)  # so that the worker's socket closes when the worker ends
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != worker:
        os.waitpid(ended.si_pid, 0)  # reap an adopted orphan
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill(worker)  # kills its process group, while the unreaped worker still holds the group's ID
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    _kill_children()
    os._exit(code if code >= 0 else _SIGNAL_EXIT_CODE - code)


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(supervisor: int, supervisors: set[int]) -> int:
    """Kill a supervisor's worker and all that it started; return the worker's exit code, negative for a signal."""
    if supervisor not in supervisors:
        return -signal.SIGKILL
    os.kill(supervisor, signal.SIGTERM)
    status = os.waitpid(supervisor, 0)[1]
    supervisors.remove(supervisor)
    if os.WIFSIGNALED(status):  # the supervisor was killed before it could kill what the worker started
        _kill_children(but=supervisors)
        return -os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return code if code <= _SIGNAL_EXIT_CODE else _SIGNAL_EXIT_CODE - code


def _kill_children(but: AbstractSet[int] = frozenset()) -> None:
    """Kill all child processes except those in `but`, again and again: a killed child's children become ours."""
    until = time.monotonic() + _MAX_KILL_S
    while (children := _children() - but) and time.monotonic() < until:
        for child in children:
            _kill(child)
            os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)


def _children() -> set[int]:
    return {int(child) for path in Path("/proc/self/task").glob("*/children") for child in path.read_bytes().split()}


def _kill(process: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(OSError):  # not a group leader, or of another user
            kill(process, signal.SIGKILL)


# The worker.


def _work(service: Service, memory_bytes: int, channel: socket.socket) -> None:
    """Answer requests until the other end of the socket is closed, or the service says that the process is used up."""
    limit(resource.RLIMIT_AS, memory_bytes)
    worker, states = os.getpid(), dict[int, Any]()

    def send(line: bytes) -> None:
        if os.getpid() != worker:  # a process that the service itself forked: only the worker may reply
            os._exit(0)
        channel.sendall(line + b"\n")

    with suppress(ConnectionError):
        send(b"%d" % os.getppid())  # its supervisor, through which it is ended
        for line in channel.makefile("rb"):
            message = json.loads(line)
            for ended in message["ended"]:
                _free(service, states.pop(ended, None))
            reply: list[Any] = [None, None, False, False]
            if "request" in message:
                reply = _answer(service, states, message, partial(send, HEARTBEAT))
            send(json.dumps([message["number"], *reply]).encode("ascii"))
            must_exit = reply[-1]
            if must_exit:
                return


def _answer(service: Service, states: dict[int, Any], message: dict[str, Any], beat: Callable[[], None]) -> list[Any]:
    """Answer a request, after replaying the past of its session if this process lacks the state.

    Return the reply, the failure text, whether memory ran out, and whether this process must exit. A failure ends the
    session.
    """
    session = message["session"]
    state = states.pop(session, None)  # put back below unless the answer fails
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
