"""The grader's public face: verdicts on any number of responses, in processes of their own.

`Verifier` grades `Submission`s and returns a `Grade` with a `Verdict` for each. `grade` is the same for one submission
in this process, without limits.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

from components.grading.extract import final_answer, has_reasoning
from components.grading.grade import Grade, Submission, Verdict, grade, is_unit_tests
from components.grading.pool import GRADE, Call, Dispatcher
from components.grading.reasons import Reason
from components.grading.sandbox.run import require_sandbox
from components.shared.environment import available_cores

__all__ = [
    "Grade",
    "Reason",
    "Submission",
    "Verdict",
    "Verifier",
    "final_answer",
    "grade",
    "has_reasoning",
    "is_unit_tests",
    "require_sandbox",
]

_MAX_WORKERS = 8  # they grade about as fast as this process can hand out


class Verifier(AbstractContextManager["Verifier"]):
    """Grades submissions in worker processes; close it, or use it in a `with` block. Any number of threads may call it.

    A thread of its own serves the workers. Callers share no lock with it: Ctrl-C may interrupt them at any instruction,
    and a lock of Python's `threading` or `concurrent.futures` could then stay locked for ever.
    """

    def __init__(self, *, num_workers: int | None = None, deadline_s: float = 1.0, function: str = GRADE) -> None:
        self._pid = os.getpid()
        self._calls: deque[Call] = deque()
        self._control, theirs = socket.socketpair()
        dispatcher = Dispatcher(num_workers or _num_workers(), deadline_s, function, self._calls, theirs)
        self._thread = threading.Thread(target=dispatcher.run, name="grading", daemon=True)
        self._thread.start()

    def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
        """Return the grade of each submission, in their order; nothing in a submission makes it raise.

        A comparison that computes for longer than the deadline is unscorable.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use the workers of its parent: make a new Verifier there")
        if not submissions:
            return []
        call = Call(submissions)
        self._calls.append(call)
        try:
            self._control.send(b"\0")
            outcome = call.outcome.get()
        except OSError:
            raise RuntimeError("the verifier is closed") from None
        finally:
            call.is_abandoned = True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the workers; calls in other threads raise."""
        if os.getpid() == self._pid:
            with suppress(OSError):  # closed before
                self._control.shutdown(socket.SHUT_WR)
            self._thread.join()
            self._control.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _num_workers() -> int:
    """The cores that this process may use, shared with those that torchrun started beside it."""
    cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cores, _MAX_WORKERS))
