"""Custom rewards that cause faults in the process that computes them."""

import itertools
import math
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from components.policy.engine import Policy

FAULTY_RANK = 1
CALLS_BEFORE = 8
"""Completions scored in a process before the fault."""
CALLS_BEFORE_DEATH = 6
SLOW_S = 0.1
MEASURES_VARIABLE = "MEASURES"
"""Names the file for the measurements of `measuring`."""
MARK_VARIABLE = "KILLED"
"""Names the file that exists once `deadly` has killed a process."""
_calls = itertools.count()


def shortness(problem: Any, completion: Any, grade: Any) -> float:
    """Differ between almost any two completions."""
    del problem, grade
    return -len(completion.text) / 10


def slow_in_one(problem: Any, completion: Any, grade: Any) -> float:
    """Be slow in the faulty rank."""
    if _is_faulty():
        time.sleep(SLOW_S)
    return shortness(problem, completion, grade)


def slow(problem: Any, completion: Any, grade: Any) -> float:
    """Take a second for each completion."""
    time.sleep(1)
    return shortness(problem, completion, grade)


def slow_in_all(problem: Any, completion: Any, grade: Any) -> float:
    """Be slow in every process."""
    time.sleep(SLOW_S)
    return shortness(problem, completion, grade)


def nan_in_one(problem: Any, completion: Any, grade: Any) -> float:
    """Make the loss of the faulty rank NaN."""
    if _is_faulty() and next(_calls) == CALLS_BEFORE:
        backward = Policy.backward
        patch.object(Policy, "backward", lambda policy, loss: backward(policy, loss * math.nan)).start()
    return shortness(problem, completion, grade)


def endless(problem: Any, completion: Any, grade: Any) -> float:
    """Hang."""
    if next(_calls) == CALLS_BEFORE:
        time.sleep(600)
    return shortness(problem, completion, grade)


def deadly(problem: Any, completion: Any, grade: Any) -> float:
    """Kill the faulty rank, once."""
    mark = os.environ.get(MARK_VARIABLE)
    if mark and _is_faulty() and next(_calls) == CALLS_BEFORE_DEATH and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return shortness(problem, completion, grade)


def measuring(problem: Any, completion: Any, grade: Any) -> float:
    """Record bytes of memory, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (sum(1 for _ in Path(f"/proc/self/{name}").iterdir()) for name in ("fd", "task"))
    with Path(os.environ[MEASURES_VARIABLE]).open("a") as file:
        print(pages * os.sysconf("SC_PAGE_SIZE"), files, threads, file=file)
    return shortness(problem, completion, grade)


def _is_faulty() -> bool:
    return os.environ.get("RANK") == str(FAULTY_RANK)
