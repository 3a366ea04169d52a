"""Being told to stop: a request is kept until the step at hand is done, so that nothing of it is lost."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from components.shared.errors import RetryableError

_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StoppedError(RetryableError):
    """The run was told to stop, and has left a checkpoint to go on from."""


class Stop:
    """Whether this process was told to stop."""

    requested = False


@contextmanager
def heeded(grace_s: float) -> Iterator[Stop]:
    """Keep a request to stop (SIGTERM, Ctrl-C) for the block to look at; one not heeded for `grace_s` ends the process.

    Then the checkpoint before stands.
    """
    stop = Stop()
    overdue = threading.Timer(grace_s, _give_up, args=[grace_s])
    overdue.daemon = True

    def request(number: int, _: FrameType | None) -> None:
        del number
        if not stop.requested:
            stop.requested = True
            overdue.start()

    before = {number: signal.signal(number, request) for number in _REQUESTS}
    try:
        yield stop
    finally:
        overdue.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _give_up(grace_s: float) -> None:
    print(f"error: told to stop, but the step at hand took longer than {grace_s:g} s", file=sys.stderr, flush=True)
    os._exit(RetryableError.exit_code)
