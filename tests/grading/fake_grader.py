"""A grader for the tests of the pool: the gold names what it does to its process, the response is an argument."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from components.grading.verifier import Grade, Reason, Verdict
from components.shared.answer_policy import AnswerPolicy

FUNCTION = "tests.grading.fake_grader:grade"


def grade(gold: str, response: str, policy: AnswerPolicy, question: str) -> Grade:
    """Do what the gold says, then call the response right."""
    result = _ACTIONS[gold](response) if gold in _ACTIONS else None
    extracted = result if isinstance(result, str) else response
    return Grade(Verdict.RIGHT, extracted, Reason.SAME_TEXT, detail=policy)


def _loop_in_c(_: str) -> None:
    sys.set_int_max_str_digits(0)
    str(7 ** (1 << 24))


def _compute(seconds: str) -> None:
    started = time.process_time()
    while time.process_time() - started < float(seconds):
        pass


def _write_process(path: str) -> None:
    Path(path).with_suffix(".new").write_text(str(os.getpid()), encoding="ascii")
    Path(path).with_suffix(".new").rename(path)


def _write_process_and_sleep(path: str) -> None:
    _write_process(path)
    time.sleep(3600)


def _sleep_the_first_time(path: str) -> None:
    if not Path(path).exists():
        _write_process_and_sleep(path)


def _hide_much_memory(_: str) -> None:
    with contextlib.suppress(MemoryError):
        b"x" * (5 << 27)


_MEMORY: list[bytes] = []
_ACTIONS: dict[str, Callable[[str], object]] = {
    "loop": lambda _: _compute("inf"),
    "loop in C": _loop_in_c,
    "compute": _compute,
    "sleep": lambda seconds: time.sleep(float(seconds or 1)),
    "write process and sleep": _write_process_and_sleep,
    "sleep the first time": _sleep_the_first_time,
    "ask for much memory": lambda _: bytearray(3 << 30),
    "use much memory and hide it": _hide_much_memory,
    "use some memory": lambda _: len(b"x" * (5 << 26)),
    "keep some memory": lambda _: _MEMORY.append(b"x" * (200 << 20)),
    "fault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda _: os._exit(3),
    "print": lambda _: print("noise", flush=True),
    "variables": lambda _: " ".join(sorted(os.environ)),
    "process": lambda _: str(os.getpid()),
}
