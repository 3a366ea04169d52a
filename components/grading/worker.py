"""The process that grades for a Pool: `python -m components.grading.worker SOCKET MODULE:FUNCTION DEADLINE_S`.

Each line from the socket is a submission as JSON, each line back its grade. What takes too long or too much memory
ends the process, and how it ended tells the Pool why: it may be in C code, where no exception arrives.
"""

import contextlib
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

from components.grading.grade import Grade, grade
from components.shared.answer_policy import AnswerPolicy

READY = b"ready"
"""What is said when submissions, or the one that was sent already, can be graded."""
REHEARSING = b"rehearsing"
"""What is said when READY is not true any more: most submissions need no algebra, and this one does."""
OUT_OF_MEMORY = 12
"""Exit code of a worker whose submission took too much memory."""

_MAX_ADDRESS_SPACE = 1 << 30
# A library may catch the MemoryError of the limit above and go on with nonsense, so what was really used counts too.
_MAX_MEMORY_KIB = 1 << 19
_MAX_KEPT_KIB = 1 << 18  # thrice what the imports take: the next submission deserves a fresh heap
_NO_TIME_TO_SWELL_S = 0.02

_Grade = Callable[[str, str, AnswerPolicy], Grade]


class _NotRehearsedError(BaseException):
    """Algebra is asked for; no Exception, which the grader would take for its own."""


class _Stage(MetaPathFinder):
    """Stops the first import of a library that takes longer than many an answer, which is not to pay for it."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in {"sympy", "math_verify"}:
            sys.meta_path.remove(self)
            raise _NotRehearsedError


def main(descriptor: str, function: str, deadline_s: str) -> None:
    """Grade what comes from the socket until it is closed at the other end."""
    _limit(resource.RLIMIT_AS, _MAX_ADDRESS_SPACE)
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    logging.disable()  # libraries are startled by many an answer
    module, _, name = function.partition(":")
    judge = partial(_judge, getattr(import_module(module), name), float(deadline_s))
    sys.meta_path.insert(0, _Stage())
    with socket.socket(fileno=int(descriptor)) as channel, contextlib.suppress(ConnectionError):
        _say(channel, READY)
        requests = channel.makefile("rb")
        while (request := requests.readline()).endswith(b"\n"):
            submission = json.loads(request)
            try:
                reply = judge(*submission)
            except _NotRehearsedError:
                _say(channel, REHEARSING)
                _rehearse()
                _say(channel, READY)
                reply = judge(*submission)
            _say(channel, reply)


def _say(channel: socket.socket, line: bytes) -> None:
    channel.sendall(line + b"\n")


def _rehearse() -> None:
    """Import libraries, and let them build their tables."""
    grade(r"x+\frac{1}{2}", r"\boxed{\frac{1}{2}+x}", AnswerPolicy.BOXED)


def _judge(function: _Grade, deadline_s: float, gold: str, response: str, policy: str) -> bytes:
    """The grade of one submission, and whether this process has swollen over it."""
    started = time.process_time()
    # The kernel ends the process when it has computed for so long, whatever it is doing and whoever still watches.
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        judged = function(gold, response, AnswerPolicy(policy))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    used_kib = _peak_memory_kib() if time.process_time() - started > _NO_TIME_TO_SWELL_S else 0
    if used_kib > _MAX_MEMORY_KIB:
        os._exit(OUT_OF_MEMORY)
    reply = [judged.verdict, judged.extracted, judged.reason, used_kib > _MAX_KEPT_KIB]
    return json.dumps(reply).encode("ascii")


def _peak_memory_kib() -> int:
    # Not getrusage(): its maximum is that of the process this one was started from, where that is larger.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main(*sys.argv[1:])
