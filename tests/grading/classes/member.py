"""A member of a class of responses."""

import random
from collections.abc import Callable
from typing import NamedTuple

from components.shared.answer_policy import AnswerPolicy


class Member(NamedTuple):
    """A response, and the verdict that it should have."""

    gold: str
    response: str
    verdict: str
    """`right` or `wrong`."""
    question: str = ""
    policy: AnswerPolicy = AnswerPolicy.STATED


Generator = Callable[[random.Random], Member]
"""Makes a member of its class, another one at each call."""
