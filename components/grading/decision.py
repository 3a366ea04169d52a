"""How a comparison ends."""

from collections.abc import Callable
from typing import NamedTuple


class Decision(NamedTuple):
    """Whether two answers are equal, and why, for people."""

    equal: bool
    reason: str

    @classmethod
    def between(cls, equal: bool, what: str) -> "Decision":
        """Return that two answers are the same or another `what`."""
        return cls(equal, f"same {what}" if equal else f"another {what}")


def decided_by_algebra(decide: Callable[[], bool], what: str) -> Decision:
    """Return what algebra decides; what it fails on, whatever the failure is, is no answer to anything."""
    try:
        equal = decide()
    except MemoryError:
        raise
    except Exception:  # a reader and a simplifier of whatever a model wrote
        return Decision(False, "the answer is no mathematical expression")
    return Decision.between(equal, what)


class RefusedError(Exception):
    """An answer that is none, whatever is expected; the message says why."""


class UnreadableGoldError(Exception):
    """The expected answer cannot be read."""


class UnreadableError(Exception):
    """A text is no mathematical expression."""
