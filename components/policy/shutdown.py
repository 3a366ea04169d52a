"""Graceful shutdown: a run that is asked to stop finishes its step and writes a checkpoint first."""

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
    """Whether this process was asked to stop, and what it would lose."""

    requested = False
    unsaved_steps = 0
    """Steps that are done and in no checkpoint."""


@contextmanager
def graceful_shutdown(grace_s: float) -> Iterator[StopRequest]:
    """Record requests to stop for the block to act on; exit after `grace_s`, or at a second request.

    The last checkpoint stays valid then. The first request reaches a rank from the terminal and from its launcher;
    only the launcher acts on a second one, and ends its ranks.
    """

    def exit_(reason: str) -> None:
        resume = "start the same run again to resume from the last checkpoint"
        lost = f"the current step and {stop.unsaved_steps} before it are lost"
        say_line(f"error: stopped {reason}: {lost}; {resume}", sys.stderr)
        os._exit(RetryableError.exit_code)

    def first() -> None:
        stop.requested = True
        timer.start()

    def again() -> None:
        if "RANK" not in os.environ:
            exit_("at once by a second request")

    stop = StopRequest()
    late = f"during a step, which took longer than checkpoint.grace_s ({grace_s:g} s)"
    timer = threading.Timer(grace_s, exit_, [late])
    timer.daemon = True
    try:
        with on_stop_signal(first, again):
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
