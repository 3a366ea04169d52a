"""Where a Verifier's workers come from: `python -m components.grading.worker SOCKET PARENT MODULE:FUNCTION DEADLINE_S`.

This process imports the grader once, and forks a worker for each socket that it is sent. From there, each line is a
list of submissions as JSON, which are graded one after the other, and each line back the grade of one. A submission
that takes too long or too much memory ends the worker, and how it ended tells the Verifier why: it may be in C code,
where no exception arrives.
"""

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import NoReturn

from components.grading.grade import Grade, is_unit_tests
from components.grading.sandbox.confinement import end_with_parent, limit
from components.shared.answer_policy import AnswerPolicy

FORK, IMPORT, REAP = b"fork", b"import", b"reap"
"""What the first process is asked for: a worker at the other end of the socket that comes with it; that the workers
after this one have the libraries for algebra; and the exit code of the worker whose process number follows."""
STARTED = b"started"
"""Sent by a worker before anything else, with its process number."""
READY, TOO_LARGE = b"ready", b"too large"
"""Sent when a worker is through with a list, or hands back what is left of it; a large process is not to be reused."""
NEEDS_ALGEBRA = b"needs algebra"
"""Sent in place of a grade by a worker that is without the libraries; it grades nothing any more."""
PREPARING = b"preparing"
"""Sent before what is not to count as slow: running code in the sandbox."""
OUT_OF_MEMORY, SHORT_OF_MEMORY = 12, 13
"""Exit codes of a worker whose submission took too much memory: its first one, or one after others that left some."""

_MAX_ADDRESS_SPACE = 1 << 30
# A library may catch the MemoryError of the limit above and go on with nonsense, so the memory in use counts too.
_MAX_MEMORY_KIB = 1 << 19
_MAX_REUSABLE_KIB = 1 << 18  # three times what the imports take: the next submission gets a new process
_MEMORY_CHECK_S = 0.02
"""A submission that computed for less cannot have filled much memory."""
_MAX_LIST_S = 0.01
"""After so long, the rest of a list may be graded sooner by another worker."""


class _NeedsAlgebraError(BaseException):
    """A library is to be imported; not an Exception, which the grader would catch."""


class _ImportGuard(MetaPathFinder):
    """Interrupts the import of a slow library, which is the first process's to import."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "sympy":
            raise _NeedsAlgebraError


def main(descriptor: str, parent: str, function: str, deadline_s: str) -> None:
    """Fork workers as asked for by the socket, until it is closed at its other end; they end with this process."""
    end_with_parent(int(parent))  # another process that it forked may hold the other end, and outlive it
    limit(resource.RLIMIT_AS, _MAX_ADDRESS_SPACE)
    limit(resource.RLIMIT_CORE, 0)
    # A program may be started with signals ignored; then the kernel would not end a worker, or not keep its exit code.
    for number in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    logging.disable()  # libraries warn about many an answer
    module, _, name = function.partition(":")
    grade_one = partial(_grade, getattr(import_module(module), name), float(deadline_s))
    sys.meta_path.insert(0, _ImportGuard())
    gc.freeze()  # what workers share with this process is not searched for garbage, which would copy it
    own_process = os.getpid()
    control = socket.socket(fileno=int(descriptor))
    while True:
        request, descriptors, *_ = socket.recv_fds(control, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not request:
            return
        command, _, process = request.partition(b" ")
        if command == IMPORT:
            _import_algebra()
        elif command == REAP:
            code = os.waitstatus_to_exitcode(os.waitpid(int(process), 0)[1])
            control.sendall(str(code).encode("ascii"))
        elif descriptors:
            with socket.socket(fileno=descriptors[0]) as channel:
                if not os.fork():
                    control.close()
                    end_with_parent(own_process)
                    _work(channel, grade_one)


def _import_algebra() -> None:
    """Import the libraries, and let them build their tables."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImportGuard)]
    from components.grading import algebra

    algebra.same_value(r"\sin{x}\cos{x}", r"\frac{\sin{2x}}{2}")
    algebra.same_relation(("y", "3-2x"), ("2x+y", "3"))
    gc.collect()
    gc.freeze()


def _work(channel: socket.socket, grade_one: Callable[..., tuple[bytes, bool]]) -> NoReturn:
    """Grade submissions from the socket until it is closed at the other end, then wait to be killed."""
    os.setsid()
    with contextlib.suppress(ConnectionError):
        channel.sendall(b"%s %d\n" % (STARTED, os.getpid()))
        _grade_lists(channel, grade_one)
    while True:  # a submission is to blame for a worker that ends by itself
        signal.pause()


def _grade_lists(channel: socket.socket, grade_one: Callable[..., tuple[bytes, bool]]) -> None:
    requests, is_first = channel.makefile("rb"), True
    while (request := requests.readline()).endswith(b"\n"):
        started = time.monotonic()
        submissions = json.loads(request)
        for position, submission in enumerate(submissions, 1):
            if is_unit_tests(submission[0]):
                channel.sendall(PREPARING + b"\n")
            try:
                reply, is_too_large = grade_one(is_first, position - 1, *submission)
            except _NeedsAlgebraError:
                channel.sendall(NEEDS_ALGEBRA + b"\n")
                return
            is_first = False
            is_last = is_too_large or position == len(submissions) or time.monotonic() > started + _MAX_LIST_S
            # Each at once, so that it is clear which one this process may die of.
            end = b"" if not is_last else TOO_LARGE + b"\n" if is_too_large else READY + b"\n"
            channel.sendall(reply + b"\n" + end)
            if is_last:
                break


def _grade(
    function: Callable[[str, str, AnswerPolicy, str], Grade],
    deadline_s: float,
    is_first: bool,
    position: int,
    gold: str,
    response: str,
    policy: str,
    question: str,
) -> tuple[bytes, bool]:
    """The grade of one submission of a list, and whether this process has grown too large for another one."""
    too_much_memory = OUT_OF_MEMORY if is_first else SHORT_OF_MEMORY
    started = time.process_time()
    # The kernel ends the process when it has computed for so long, even if nobody watches it any more.
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        graded = function(gold, response, AnswerPolicy(policy), question)
    except MemoryError:
        os._exit(too_much_memory)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    used_kib = 0
    if time.process_time() - started > _MEMORY_CHECK_S:
        # Not getrusage(): its maximum is that of the parent process, where that is larger.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        used_kib = int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    if used_kib > _MAX_MEMORY_KIB:
        os._exit(too_much_memory)
    reply = [position, graded.verdict, graded.extracted, graded.reason, graded.tests_passed, graded.detail]
    return json.dumps(reply).encode("ascii"), used_kib > _MAX_REUSABLE_KIB


if __name__ == "__main__":
    main(*sys.argv[1:])
