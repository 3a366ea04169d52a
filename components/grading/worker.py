"""The service of a Verifier's workers: grading within limits of time and memory.

A comparison may hang in C code, which neither a Python signal handler nor a thread can interrupt. So the kernel ends
the worker once a submission has used up its processor time; wall-clock time would make verdicts depend on the load.
"""

import logging
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from components.grading.verdicts import Grade
from components.shared.answer_policy import AnswerPolicy
from components.workers.service import Service

_MAX_MEMORY_KIB = 1 << 19  # checked as well as the address space: a library may catch a MemoryError and go on
_MAX_REUSABLE_KIB = 1 << 18  # three times what the imports take; a larger process is replaced
_MEMORY_CHECK_S = 0.02  # a submission that computed for less cannot have filled much memory


class GradingService(Service):
    """Grades submissions: a request has the fields of a `Submission`, and the reply those of its `Grade`."""

    def __init__(self, function: str, deadline_s: float) -> None:
        """Import a function such as `grade` by `module:name`, and call its module's `prepare`, if it has one."""
        logging.disable()  # libraries warn about many answers
        module, _, name = function.partition(":")
        self._function = getattr(import_module(module), name)
        getattr(import_module(module), "prepare", lambda: None)()
        self._deadline_s, self._used_kib = deadline_s, 0

    def answer(self, state: None, request: Any) -> Any:
        """Return the fields of a grade; raise MemoryError if grading used too much memory."""
        gold, response, policy, question = request
        started = time.process_time()
        # After this processor time the kernel ends the process, since nothing handles its signal SIGPROF.
        signal.setitimer(signal.ITIMER_PROF, self._deadline_s)
        try:
            graded: Grade = self._function(gold, response, AnswerPolicy(policy), question)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if time.process_time() - started > _MEMORY_CHECK_S:  # quick submissions use little memory
            # getrusage() would report the parent's maximum if that is larger.
            status = Path("/proc/self/status").read_text(encoding="ascii")
            self._used_kib = int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
        if self._used_kib > _MAX_MEMORY_KIB:
            raise MemoryError
        return [graded.verdict, graded.extracted, graded.reason, graded.tests_passed, graded.detail]

    def is_used_up(self) -> bool:
        """Tell whether this process has grown too large for another submission."""
        return self._used_kib > _MAX_REUSABLE_KIB
