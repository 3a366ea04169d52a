"""The grader's public face: verdicts on any number of responses, in processes of their own.

`Verifier` grades `Submission`s and returns a `Grade` with a `Verdict` for each. `grade` is the same for one submission
in this process, without limits. The formats behind it are in answer.py and unit_tests.py.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from components.grading.answer import has_reasoning
from components.grading.grade import Grade, Submission, Verdict, grade
from components.grading.pool import Pool
from components.grading.sandbox.run import require_sandbox
from components.grading.unit_tests import grade_code, is_unit_tests

__all__ = ["Grade", "Submission", "Verdict", "Verifier", "grade", "has_reasoning", "is_unit_tests", "require_sandbox"]

_MAX_WORKERS = 8  # they grade about as fast as this process can hand out


class Verifier(AbstractContextManager["Verifier"]):
    """Grades submissions in processes of their own; close it, or use it in a `with` block."""

    def __init__(self, *, num_workers: int | None = None, deadline_s: float = 1.0) -> None:
        num_workers = num_workers or _num_workers()
        self._pool = Pool(num_workers, deadline_s)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="code")

    def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
        """Return the grade of each submission, in their order; nothing in a submission makes it raise.

        Where the gold is unit tests, the response is code to be run in a sandbox; else it is mathematics, which is
        unscorable if it takes longer than the deadline. Any number of threads may call at once.
        """
        are_code = [is_unit_tests(each.gold) for each in submissions]
        code = [each for each, is_code in zip(submissions, are_code, strict=True) if is_code]
        mathematics = [each for each, is_code in zip(submissions, are_code, strict=True) if not is_code]
        code_grades = self._threads.map(lambda each: grade_code(each.gold, each.response), code)
        mathematics_grades = iter(self._pool(mathematics))
        return [next(code_grades if is_code else mathematics_grades) for is_code in are_code]

    def processor_s(self) -> float:
        """Return the processor time that the present workers have used."""
        return self._pool.processor_s()

    def close(self) -> None:
        """End the workers; calls in other threads raise."""
        self._pool.close()
        self._threads.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def _num_workers() -> int:
    """The cores that this process may use, shared with those that torchrun started beside it."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cores, _MAX_WORKERS))
