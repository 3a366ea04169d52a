"""Custom rewards that cause faults in the process that computes them."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

FAULTY_RANK = 1
CALLS_BEFORE = 8
"""Completions scored in a process before the fault."""
SLOW_S = 0.1
MEASURES_VARIABLE = "MEASURES"
"""Names the file for the measurements of `measuring`."""
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


def endless(problem: Any, completion: Any, grade: Any) -> float:
    """Hang."""
    if next(_calls) == CALLS_BEFORE:
        time.sleep(600)
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
