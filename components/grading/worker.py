"""The process that grades for a Verifier: `python -m components.grading.worker SOCKET MODULE:FUNCTION DEADLINE_S`.

Each line from the socket is a submission as JSON, each line back its grade. A submission that takes too long or too
much memory ends the process, and how it ended tells the Verifier why: it may be in C code, where no exception arrives.
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

from components.grading.grade import Grade, grade, is_unit_tests
from components.grading.sandbox.confinement import limit
from components.shared.answer_policy import AnswerPolicy

READY = b"ready"
"""Sent when a submission can be graded, or the current one after all."""
PREPARING = b"preparing"
"""Sent before what is not to count as slow: importing libraries for the few submissions that need algebra, and running
code in the sandbox."""
OUT_OF_MEMORY = 12
"""Exit code of a worker whose submission took too much memory."""

_MAX_ADDRESS_SPACE = 1 << 30
# A library may catch the MemoryError of the limit above and go on with nonsense, so the memory in use counts too.
_MAX_MEMORY_KIB = 1 << 19
_MAX_REUSABLE_KIB = 1 << 18  # three times what the imports take: the next submission gets a new process
_MEMORY_CHECK_S = 0.02
"""A submission that computed for less cannot have filled much memory."""


class _NeedsAlgebraError(BaseException):
    """A library is to be imported; not an Exception, which the grader would catch."""


class _ImportGuard(MetaPathFinder):
    """Interrupts the first import of a slow library, whose time is not to count against a submission's deadline."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in {"sympy", "math_verify"}:
            sys.meta_path.remove(self)
            raise _NeedsAlgebraError


def main(descriptor: str, function: str, deadline_s: str) -> None:
    """Grade submissions from the socket until it is closed at the other end."""
    limit(resource.RLIMIT_AS, _MAX_ADDRESS_SPACE)
    limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    logging.disable()  # libraries warn about many an answer
    module, _, name = function.partition(":")
    grade_one = partial(_grade, getattr(import_module(module), name), float(deadline_s))
    sys.meta_path.insert(0, _ImportGuard())
    with socket.socket(fileno=int(descriptor)) as channel, contextlib.suppress(ConnectionError):
        channel.sendall(READY + b"\n")
        requests = channel.makefile("rb")
        while (request := requests.readline()).endswith(b"\n"):
            submission = json.loads(request)
            if is_unit_tests(submission[0]):
                channel.sendall(PREPARING + b"\n")
            try:
                reply = grade_one(*submission)
            except _NeedsAlgebraError:
                channel.sendall(PREPARING + b"\n")
                # Imports the libraries, and lets them build their tables.
                grade(r"x+\frac{1}{2}", r"\boxed{\frac{1}{2}+x}", AnswerPolicy.BOXED)
                channel.sendall(READY + b"\n")
                reply = grade_one(*submission)
            channel.sendall(reply + b"\n")


def _grade(
    function: Callable[[str, str, AnswerPolicy, str], Grade],
    deadline_s: float,
    gold: str,
    response: str,
    policy: str,
    question: str,
) -> bytes:
    """The grade of one submission, and whether this process has grown too large for another one."""
    started = time.process_time()
    # The kernel ends the process when it has computed for so long, even if nobody watches it any more.
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        graded = function(gold, response, AnswerPolicy(policy), question)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    used_kib = 0
    if time.process_time() - started > _MEMORY_CHECK_S:
        # Not getrusage(): its maximum is that of the parent process, where that is larger.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        used_kib = int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    if used_kib > _MAX_MEMORY_KIB:
        os._exit(OUT_OF_MEMORY)
    is_too_large = used_kib > _MAX_REUSABLE_KIB
    reply = [graded.verdict, graded.extracted, graded.reason, graded.tests_passed, is_too_large]
    return json.dumps(reply).encode("ascii")


if __name__ == "__main__":
    main(*sys.argv[1:])
