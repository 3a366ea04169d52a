"""The server's time, and the lock that guards time and objects alike: a request sees the state at one moment."""

import heapq
import itertools
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)
Action = Callable[[], None]


class Clock:
    """Time that stands still until somebody advances it, or the code under test sleeps."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._elapsed = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self.is_closed = False

    def monotonic(self) -> float:
        """Return the seconds since the clock was made."""
        return self._elapsed

    def now(self) -> datetime:
        """Return the date and time, in UTC."""
        return START + timedelta(seconds=self._elapsed)

    def stamp(self) -> str:
        """Return the date and time as Kubernetes writes it, without fractions of a second."""
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def sleep(self, seconds: float) -> None:
        """Sleep, as the code under test does instead of `time.sleep`."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move time forward; actions that become due happen at their moment, in order."""
        with self.changed:
            target = self._elapsed + max(seconds, 0.0)
            while self._due and self._due[0][0] <= target and not self.is_closed:
                at, _, action = heapq.heappop(self._due)
                self._elapsed = max(self._elapsed, at)
                action()
                self.changed.notify_all()
            self._elapsed = max(self._elapsed, target)
            self.changed.notify_all()

    def call_in(self, seconds: float, action: Action) -> None:
        """Schedule an action; those due at one moment happen in the order in which they were scheduled."""
        with self.changed:
            heapq.heappush(self._due, (self._elapsed + seconds, next(self._numbers), action))

    def close(self) -> None:
        """Release all threads that wait."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
