"""What the tests of the grader see of processes, and a limit on computing that does not depend on the load."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest


def children(parent: int | str = "self") -> set[int]:
    """The child processes of a process, zombies among them."""
    numbers: set[int] = set()
    for path in Path("/proc").glob(f"{parent}/task/*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            numbers.update(map(int, path.read_text(encoding="ascii").split()))
    return numbers


def workers(parent: int | str = "self") -> set[int]:
    """The workers of a process's pools, each the child of its supervisor, which is forked from the fork server."""
    supervisors = {supervisor for server in children(parent) for supervisor in children(server)}
    return {worker for supervisor in supervisors for worker in children(supervisor)}


def is_gone(process: int) -> bool:
    """Whether nothing is left of a process except possibly its entry in the table."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; the limit is only for broken code."""
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        time.sleep(0.01)


def processor_s() -> float:
    """The processor time that this process, its children and theirs have used, without those that have ended."""
    used_s = time.process_time()
    for process in children() | workers():
        with suppress(OSError):  # it may end meanwhile
            used_s += time.clock_gettime((~process << 3) | 2)
    return used_s


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
