"""A limit on computing that does not depend on what else the machine does."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def processor_time(limit_s: float) -> Iterator[None]:
    """Fail, and end the block, once this process has computed for longer in it; waiting does not count."""

    def end(*_: Any) -> None:
        pytest.fail(f"took more than {limit_s} s of processor time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
