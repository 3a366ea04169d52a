"""Time, as what waits for a cluster sees it."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time and lets it pass."""

    def monotonic(self) -> float:
        """Return seconds since some moment; they never go back."""
        ...

    def now(self) -> datetime:
        """Return date and time in UTC."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def now(self) -> datetime:
        """See `Clock`."""
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(seconds)
