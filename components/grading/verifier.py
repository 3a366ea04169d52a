"""The public interface of the grader: verdicts on any number of responses, in worker processes.

`Verifier` grades `Submission`s and returns a `Grade` with a `Verdict` for each. `grade` is the same for one submission
in this process, without limits.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

from components.grading.extract import final_answer, has_reasoning
from components.grading.grade import grade, is_unit_tests
from components.grading.sandbox.confinement import environment
from components.grading.sandbox.run import require_sandbox
from components.grading.verdicts import Grade, Reason, Submission, Verdict
from components.shared.environment import cores_per_rank
from components.shared.errors import PipelineError
from components.workers.fork_server import PoolConfig
from components.workers.pool import Failure, Pool

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

GRADE = "components.grading.grade:grade"
_MAX_WORKERS = 8  # together they grade about as fast as this process can send submissions
_MAX_ADDRESS_SPACE = 1 << 30
_MAX_WAIT_S = 300.0
"""Wall-clock time for a submission; the deadline is in processor time, and the sandbox has separate limits."""


class Verifier(AbstractContextManager["Verifier"]):
    """Grades submissions in worker processes; close it, or use it in a `with` block. Any thread may call it."""

    def __init__(self, *, num_workers: int | None = None, deadline_s: float = 1.0, function: str = GRADE) -> None:
        self._pid, self._deadline_s = os.getpid(), deadline_s
        self._pool = Pool(
            PoolConfig(
                service="components.grading.worker:GradingService",
                arguments=[function, deadline_s],
                num_workers=num_workers or min(cores_per_rank(), _MAX_WORKERS),
                memory_bytes=_MAX_ADDRESS_SPACE,
                timeout_s=_MAX_WAIT_S,
                environment=environment(),
                path=[folder for folder in sys.path if folder],
            )
        )

    def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
        """Return the grade of each submission, in their order; no submission can make it raise.

        A submission whose comparison exceeds the deadline is unscorable.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use the workers of its parent: make a new Verifier there")
        outcomes: SimpleQueue[tuple[int, Any, Failure | None]] = SimpleQueue()
        for index, each in enumerate(submissions):
            fields = (each.gold, each.response, each.policy, each.question)
            self._pool.submit(fields, lambda *outcome, index=index: outcomes.put((index, *outcome)))
        grades: dict[int, Grade] = {}
        for _ in submissions:
            index, reply, failure = outcomes.get()
            if failure:
                grades[index] = self._unscorable(failure)
            else:
                verdict, extracted, reason, tests_passed, detail = reply
                grades[index] = Grade(Verdict(verdict), extracted, Reason(reason), tests_passed, detail)
        return [grades[index] for index in range(len(submissions))]

    def close(self) -> None:
        """End the workers; calls in other threads raise."""
        if os.getpid() == self._pid:
            self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unscorable(self, failure: Failure) -> Grade:
        """Return the grade of a submission that got no reply; raise if the verifier is closed or no worker starts."""
        if failure.kind == "closed":
            raise RuntimeError("the verifier is closed")
        if failure.kind == "start":
            raise PipelineError(f"no answer can be graded: the process that grades {failure.text}")
        if failure.kind == "memory":
            reason, detail = Reason.MEMORY, "out of memory"
        elif failure.exit_code == -signal.SIGPROF or failure.kind == "time":
            reason, detail = Reason.TIME, f"took longer than {self._deadline_s:g} s"
        else:
            reason, detail = Reason.CRASH, failure.text
        return Grade(Verdict.UNSCORABLE, None, reason, detail=detail)
