"""Graceful shutdown: after a request to stop, a run finishes its step and writes a checkpoint before it exits."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from components.shared.errors import RetryableError
from components.shared.progress import say_line

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ONE_REQUEST_S = 1.0
"""Time in which signals count as one request: `timeout` sends its signal twice, and a terminal to every process."""


class StopRequest:
    """Whether this process was asked to stop, and how many steps it would lose."""

    requested = False
    unsaved_steps = 0
    """Finished steps since the last checkpoint."""


@contextmanager
def graceful_shutdown(grace_s: float) -> Iterator[StopRequest]:
    """Record a request to stop, which the block acts on; exit at once after `grace_s`, or at a second request.

    The last checkpoint stays valid then. A rank ignores a second request: it may be the first one again, which a
    terminal has sent and the launcher has passed on. After a true second one the launcher ends all ranks.
    """

    def exit_now(reason: str) -> None:
        resume = "start the same run again to resume from the last checkpoint"
        lost = f"the current step and {stop.unsaved_steps} before it are lost"
        say_line(f"error: stopped {reason}: {lost}; {resume}", sys.stderr)
        os._exit(RetryableError.exit_code)

    def on_first_request() -> None:
        stop.requested = True
        timer.start()

    def on_second_request() -> None:
        if "RANK" not in os.environ:
            exit_now("at once by a second request")

    stop = StopRequest()
    timeout = f"during a step, which took longer than checkpoint.grace_s ({grace_s:g} s)"
    timer = threading.Timer(grace_s, exit_now, [timeout])
    timer.daemon = True
    try:
        with on_stop_signal(on_first_request, on_second_request):
            yield stop
    finally:
        timer.cancel()


@contextmanager
def on_stop_signal(first: Callable[[], object], again: Callable[[], object]) -> Iterator[None]:
    """Call `first` when this process is asked to stop (SIGTERM, SIGHUP, Ctrl-C), and `again` for later requests."""
    first_at: float | None = None

    def handle(*_: object) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = time.monotonic()
            first()
        elif time.monotonic() - first_at > _ONE_REQUEST_S:
            again()

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
