"""A grader for the tests of the pool: the gold says what becomes of the worker process that grades it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from components.grading.verifier import Grade, Verdict
from components.shared.answer_policy import AnswerPolicy

GRADE = "tests.grading.stunts:perform"


def perform(gold: str, response: str, policy: AnswerPolicy) -> Grade:
    """Do what the gold says, then call the response right."""
    told = _STUNTS[gold](response) if gold in _STUNTS else None
    return Grade(Verdict.RIGHT, told if isinstance(told, str) else response, policy)


def _loop(_: str) -> None:
    while True:
        pass


def _loop_in_c(_: str) -> None:
    sys.set_int_max_str_digits(0)
    str(7 ** (1 << 24))


def _compute(seconds: str) -> None:
    started = time.process_time()
    while time.process_time() - started < float(seconds):
        pass


def _sleep(seconds: str) -> None:
    time.sleep(float(seconds or 1))


def _tell_and_sleep(path: str) -> None:
    """Write down which process this is."""
    Path(path).with_suffix(".new").write_text(str(os.getpid()), encoding="ascii")
    Path(path).with_suffix(".new").rename(path)
    time.sleep(3600)


def _wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def _sleep_the_first_time(path: str) -> None:
    if not Path(path).exists():
        _tell_and_sleep(path)


def _hide_much_memory(_: str) -> None:
    with contextlib.suppress(MemoryError):
        b"x" * (5 << 27)


def _use_algebra(_: str) -> None:
    import_module("sympy")


def _print(_: str) -> None:
    print("noise", flush=True)
    os.write(1, b"noise\n")


_STUNTS: dict[str, Callable[[str], object]] = {
    "loop": _loop,
    "loop in C": _loop_in_c,
    "compute": _compute,
    "sleep": _sleep,
    "tell and sleep": _tell_and_sleep,
    "wait for": _wait_for,
    "sleep the first time": _sleep_the_first_time,
    "ask for much memory": lambda _: bytearray(3 << 30),
    "use much memory and hide it": _hide_much_memory,
    "use some memory": lambda _: len(b"x" * (5 << 26)),
    "fault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda _: os._exit(3),
    "print": _print,
    "use algebra": _use_algebra,
    "variables": lambda _: " ".join(sorted(os.environ)),
    "process": lambda _: str(os.getpid()),
}
