"""The server's time: told by the test and by the sleeps of the code under test, or the machine's own, made faster.

Everything the scripted cluster does is an action due at some time. One lock guards time and objects alike, so what a
request sees is the state at one moment.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)
_HANDSHAKE_S = 0.2
"""How long a moving clock waits for a thread it has woken to sleep again, in real time."""

Action = Callable[[], None]


class Clock:
    """Time that stands still until somebody advances it.

    The thread that made the clock drives it: its `sleep` moves time. Any other thread's `sleep` lasts until the time
    has come, and the clock stops there on its way and lets that thread work before it goes on.

    Args:
        idle_s: With this, an open watch in which nothing has happened for so many real seconds moves the clock to
            whatever is due next: for code that waits in watches and never sleeps.
    """

    def __init__(self, *, idle_s: float | None = None) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.idle_s = idle_s
        self._elapsed = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._driver = threading.get_ident()
        self.is_closed = False
        self.mistakes: list[Exception] = []
        """Of actions that no thread of the test has asked for."""

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return self._elapsed

    def now(self) -> datetime:
        """The date and time, in UTC."""
        return START + timedelta(seconds=self.monotonic())

    def sleep(self, seconds: float) -> None:
        """What the code under test calls for `time.sleep`."""
        if threading.get_ident() == self._driver:
            self.advance(seconds)
        else:
            self._sleep_aside(seconds)

    def advance(self, seconds: float) -> None:
        """Move time forward; what becomes due happens at its moment, in order."""
        with self.changed:
            self._run_until(self._elapsed + max(seconds, 0.0))

    def call_in(self, seconds: float, action: Action) -> None:
        """Have something happen; actions due at one moment happen in the order in which they were asked for."""
        with self.changed:
            heapq.heappush(self._due, (self.monotonic() + seconds, next(self._numbers), action))
            self.changed.notify_all()

    def wait_for(self, happened: Callable[[], bool], deadline: float) -> bool:
        """Wait until something has happened or the deadline is past; returns whether it has. Holds the lock."""
        while not happened():
            if self.is_closed or self.monotonic() >= deadline:
                return False
            self._pause(deadline)
        return True

    def close(self) -> None:
        """Let everybody who waits go."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def _pause(self, deadline: float) -> None:
        if not self.changed.wait(self.idle_s) and self.idle_s is not None:
            self._run_until(min(deadline, self._due[0][0] if self._due else deadline))

    def _run_until(self, target: float) -> None:
        while self._due and self._due[0][0] <= target and not self.is_closed:
            at, _, action = heapq.heappop(self._due)
            self._elapsed = max(self._elapsed, at)
            action()
            self.changed.notify_all()
        self._elapsed = max(self._elapsed, target)
        self.changed.notify_all()

    def _sleep_aside(self, seconds: float) -> None:
        """Sleep in a thread that does not drive: wake at the moment, and hold time until it sleeps again."""
        woken = threading.Event()
        thread = threading.current_thread()
        done = _asleep_again(thread)

        def wake() -> None:
            done.clear()
            woken.set()
            self.changed.release()
            try:
                _settle(done, thread)
            finally:
                self.changed.acquire()

        done.set()
        self.call_in(seconds, wake)
        while not woken.wait(0.05):
            if self.is_closed:
                return


class RealClock(Clock):
    """The machine's own time, `speed` times as fast: for tests whose code under test runs in a process of its own."""

    def __init__(self, *, speed: float = 1.0) -> None:
        super().__init__()
        self._speed = speed
        self._began = time.monotonic()
        self._ticker = threading.Thread(target=self._tick, name="clock", daemon=True)
        self._ticker.start()

    def monotonic(self) -> float:
        """Seconds since the clock was made, as this clock counts them."""
        return (time.monotonic() - self._began) * self._speed

    def sleep(self, seconds: float) -> None:
        """Sleep so long as this clock counts."""
        time.sleep(seconds / self._speed)

    def advance(self, seconds: float) -> None:
        """Wait for the time to come."""
        self.sleep(seconds)

    def _pause(self, deadline: float) -> None:
        self.changed.wait(max(deadline - self.monotonic(), 0.0) / self._speed)

    def _tick(self) -> None:
        with self.changed:
            while not self.is_closed:
                while self._due and self._due[0][0] <= self.monotonic():
                    self._act(heapq.heappop(self._due)[2])
                left = self._due[0][0] - self.monotonic() if self._due else 1.0
                self.changed.wait(max(left, 0.0) / self._speed)

    def _act(self, action: Action) -> None:
        try:
            action()
        except Exception as error:
            # In this thread nobody would see it.
            self.mistakes.append(error)
        self.changed.notify_all()


_sleepers: dict[threading.Thread, threading.Event] = {}


def _asleep_again(thread: threading.Thread) -> threading.Event:
    return _sleepers.setdefault(thread, threading.Event())


def _settle(done: threading.Event, thread: threading.Thread) -> None:
    """Wait until a thread sleeps again or has ended, but not long: it may be waiting for something else."""
    given_up = time.monotonic() + _HANDSHAKE_S
    while not done.wait(0.002) and thread.is_alive() and time.monotonic() < given_up:
        pass
