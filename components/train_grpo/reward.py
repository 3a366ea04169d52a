"""The reward: what a completion is worth."""

import math

from components.shared.grading import Grade, Verdict

_REWARDS = {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: math.nan}


def accuracy_reward(grade: Grade) -> float:
    """Return 1 for a right answer, 0 for a wrong one, and NaN (no reward at all) for one that cannot be scored."""
    return _REWARDS[grade.verdict]
