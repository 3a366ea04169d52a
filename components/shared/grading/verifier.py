"""Verdicts on responses, many at a time."""

from collections.abc import Sequence
from types import TracebackType

from components.shared.grading.grade import grade
from components.shared.grading.submission import Submission
from components.shared.grading.verdict import Grade


class Verifier:
    """Grades submissions."""

    def __init__(self, *, num_workers: int | None = None, deadline_s: float = 1.0) -> None:
        self._deadline_s = deadline_s
        self._num_workers = num_workers

    def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
        """Return the grade of each submission, in their order."""
        return [grade(each.gold, each.response, each.policy) for each in submissions]

    def close(self) -> None:
        """End the workers."""

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
