r"""The steps of a completion and what each is worth, for process supervision (arXiv 2402.03300, section 4.1.3).

A step is a worked line: one that states an equation which can be checked and was not stated before. The text between
two such lines belongs to the later one. The last step ends with the completion and is worth what its answer is worth.

Checked arithmetic says that a line is true, not that it helps. Trivial and repeated equations are no steps, but a
policy can still state new ones that nobody asked for; and since advantages are sums over the steps to come, of two
completions the one with more right steps is preferred. Watch the number of steps when training on this.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.grading.verifier import Grade, Verdict
from components.rollout.sampler import Completion
from components.train_grpo.equations import Equation, equations

_ANSWER_MARKERS = ("####", r"\boxed", r"\fbox")
_OUTCOMES = {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: math.nan}
_INCOMPLETE = "\ufffd"
"""What a byte-level tokenizer decodes the first bytes of a longer character to."""


@dataclass(frozen=True)
class Step:
    """One reasoning step of a completion."""

    end: int
    """Completion tokens up to and including the step's last one: it ends at token end - 1."""
    reward: float
    """1 for right, 0 for wrong, NaN for one that cannot be scored."""


@dataclass(frozen=True)
class TextStep:
    """One worked line of a text."""

    end: int
    """Characters up to and including the line's newline, whose token completes the line's last number."""
    right: bool
    """Whether every equation that it adds holds."""


def worked_steps(text: str) -> list[TextStep]:
    """Return the worked lines above the one that holds the last `####` or box.

    A line without a newline is none: it is the answer, or was cut off at the length limit.
    """
    answer = max(text.rfind(marker) for marker in _ANSWER_MARKERS)
    reasoning = text if answer < 0 else text[:answer]
    steps: list[TextStep] = []
    stated: set[Equation] = set()
    end = 0
    for line in reasoning.split("\n")[:-1]:
        end += len(line) + 1
        added = set(equations(line)) - stated
        if added:
            steps.append(TextStep(end, right=all(equation.holds for equation in added)))
            stated |= added
    return steps


def outcome(grade: Grade) -> float:
    """Return what the final answer is worth."""
    return _OUTCOMES[grade.verdict]


def verified_steps(completion: Completion, grade: Grade, decode: Callable[[Sequence[int]], str]) -> list[Step]:
    """Return the steps of a completion, whose ends increase strictly.

    `decode` turns the first tokens of the completion into the beginning of its text. A step's last token is the first
    with which all of its characters are there. Of steps that would end at the same token one remains: it is right if
    all are, and where the completion itself ends it is the answer.
    """
    ids = completion.tokens.completion_ids
    rewards: dict[int, float] = {}
    end = 0
    for step in worked_steps(completion.text):
        end = bisect_left(
            range(len(ids) + 1),
            step.end,
            lo=end,
            hi=len(ids),
            key=lambda count: len(decode(ids[:count]).rstrip(_INCOMPLETE)),
        )
        rewards[end] = min(rewards.get(end, 1.0), float(step.right))
    rewards[len(ids)] = outcome(grade)
    return [Step(end, reward) for end, reward in rewards.items()]
