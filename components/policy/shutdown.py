"""Being told to stop: a request is kept until the step at hand is done, so that nothing of it is lost."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from components.shared.errors import RetryableError

_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_S = 1.0
"""Time in which requests count as one: `timeout` sends its signal twice, and a terminal to every process."""


class StopRequest:
    """Whether this process was told to stop."""

    requested = False


@contextmanager
def on_stop_signal(first: Callable[[], object], again: Callable[[], object]) -> Iterator[None]:
    """Call `first` when this process is told to stop (SIGTERM, Ctrl-C), and `again` when it is told once more."""
    told: list[float] = []

    def request(number: int, _: FrameType | None) -> None:
        del number
        if not told:
            told.append(time.monotonic())
            first()
        elif time.monotonic() - told[0] > _SAME_S:
            again()

    before = {number: signal.signal(number, request) for number in _REQUESTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def graceful_shutdown(grace_s: float) -> Iterator[StopRequest]:
    """Keep a request to stop for the block to look at; one not heeded for `grace_s`, or a second one, ends the process.

    Then the checkpoint before stands. A rank ends with its launcher, which alone heeds the second request: the first
    reaches a rank from the terminal and from the launcher.
    """
    stop = StopRequest()
    overdue = threading.Timer(grace_s, _give_up, args=[f", but the step at hand took longer than {grace_s:g} s"])
    overdue.daemon = True

    def request() -> None:
        stop.requested = True
        overdue.start()

    def insist() -> None:
        if "RANK" not in os.environ:
            _give_up(" a second time: the step at hand is lost")

    try:
        with on_stop_signal(request, insist):
            yield stop
    finally:
        overdue.cancel()


def _give_up(reason: str) -> None:
    print(f"error: told to stop{reason}", file=sys.stderr, flush=True)
    os._exit(RetryableError.exit_code)
