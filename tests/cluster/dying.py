"""A reward that kills a process of a training run, once."""

import os
import signal
from pathlib import Path

from components.grading.verifier import Grade
from components.rollout.sampler import Completion
from components.shared.problem import Problem

MARK_VARIABLE = "TEST_DYING_MARK"
"""Environment variable with the path of a file that exists once it has happened."""
_CALLS_BEFORE = 6
_calls: list[None] = []


def even_tokens(problem: Problem, completion: Completion, grade: Grade) -> float:
    """Return the fraction of even tokens, which differs between completions; kill rank 1 in its second step."""
    _calls.append(None)
    mark = os.environ.get(MARK_VARIABLE)
    if mark and os.environ["RANK"] == "1" and len(_calls) > _CALLS_BEFORE and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    tokens = completion.tokens.completion_ids
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
