"""A reward at which a process of a training run dies, once."""

import os
import signal
from pathlib import Path

from components.grading.verifier import Grade
from components.rollout.sampler import Completion
from components.shared.problem import Problem

MARK_VARIABLE = "TEST_DYING_MARK"
"""Names the file that says that it has happened."""
_CALLS_BEFORE = 6
_calls: list[None] = []


def brevity(problem: Problem, completion: Completion, grade: Grade) -> float:
    """Return more for shorter completions; in the second process, the second step is the end of it."""
    _calls.append(None)
    mark = os.environ.get(MARK_VARIABLE)
    if mark and os.environ["RANK"] == "1" and len(_calls) > _CALLS_BEFORE and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1 / (1 + len(completion.tokens.completion_ids))
