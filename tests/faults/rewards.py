"""Rewards of a user's own, by which something comes to happen in a process of a run that is under way."""

import itertools
import math
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from components.policy.engine import PolicyEngine

CHOSEN_RANK = 1
"""The one process that something happens to."""
CALLS_BEFORE = 8
"""Completions that are rewarded in a process before something happens."""
SLOW_S = 0.1
MEASURES_VARIABLE = "MEASURES"
"""Names the file for what a process holds."""
_calls = itertools.count()


def shortness(problem: Any, completion: Any, grade: Any) -> float:
    """Differ between almost any two completions."""
    del problem, grade
    return -len(completion.text) / 10


def slow_in_one(problem: Any, completion: Any, grade: Any) -> float:
    """Take long in the chosen process."""
    if _is_chosen():
        time.sleep(SLOW_S)
    return shortness(problem, completion, grade)


def slow(problem: Any, completion: Any, grade: Any) -> float:
    """Take a second for each completion."""
    time.sleep(1)
    return shortness(problem, completion, grade)


def nan_in_one(problem: Any, completion: Any, grade: Any) -> float:
    """Let the loss of the chosen process come to be NaN."""
    if _is_chosen() and next(_calls) == CALLS_BEFORE:
        accumulate = PolicyEngine.accumulate
        patch.object(PolicyEngine, "accumulate", lambda engine, loss: accumulate(engine, loss * math.nan)).start()
    return shortness(problem, completion, grade)


def endless(problem: Any, completion: Any, grade: Any) -> float:
    """Come to take longer than anybody waits."""
    if next(_calls) == CALLS_BEFORE:
        time.sleep(600)
    return shortness(problem, completion, grade)


def measuring(problem: Any, completion: Any, grade: Any) -> float:
    """Write down what this process holds: bytes of memory, open files and threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (sum(1 for _ in Path(f"/proc/self/{name}").iterdir()) for name in ("fd", "task"))
    with Path(os.environ[MEASURES_VARIABLE]).open("a") as file:
        print(pages * os.sysconf("SC_PAGE_SIZE"), files, threads, file=file)
    return shortness(problem, completion, grade)


def _is_chosen() -> bool:
    return os.environ.get("RANK") == str(CHOSEN_RANK)
