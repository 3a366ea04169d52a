"""How a comparison ends."""

from typing import NamedTuple


class Decision(NamedTuple):
    """Whether two answers are equal, and why, for people."""

    equal: bool
    reason: str

    @classmethod
    def between(cls, equal: bool, what: str) -> "Decision":
        """Return that two answers are the same or another `what`."""
        return cls(equal, f"same {what}" if equal else f"another {what}")


class RefusedError(Exception):
    """An answer that is none, whatever is expected; the message says why."""


class UnreadableGoldError(Exception):
    """The expected answer cannot be read."""


class UnreadableError(Exception):
    """A text is no mathematical expression."""
