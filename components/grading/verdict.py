"""What the grader says of a response."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the grader says of a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNSCORABLE = "unscorable"
    """Nothing can be said: the expected answer cannot be read, or the comparison did not end."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict, the answer that was compared, and why."""

    verdict: Verdict
    extracted: str | None
    reason: str
    tests_passed: float | None = None
    """Share of the unit tests that passed; None where the gold is no unit tests."""
