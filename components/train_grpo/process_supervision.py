"""Process supervision (arXiv 2402.03300, section 4.1.3): where the steps of a completion end, and their text.

A step is a line of the completion; empty lines belong to the one before. With tools it may be a turn instead. What a
step is worth is for a reward to say: a learned reward model, which is read at its end, or one of the user's own, which
is given the texts. The last step ends with the completion and is worth what its answer is worth.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from components.grading.verifier import Grade, Verdict

if TYPE_CHECKING:  # torch
    from components.rollout.sampler import Completion

_OUTCOMES = {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: math.nan}
_INCOMPLETE = "\ufffd"
"""What a byte-level tokenizer decodes an unfinished character to."""


@dataclass(frozen=True)
class Step:
    """One reasoning step of a completion."""

    end: int
    """Sampled tokens of the completion up to and including the step's last one."""
    label: float
    """For a learned reward model: 1 for a right answer, 0 for a wrong one, NaN for a step before the last."""
    text: str = ""


def outcome(grade: Grade) -> float:
    """Return what the final answer is worth."""
    return _OUTCOMES[grade.verdict]


def steps_of(
    supervision: str, completion: "Completion", grade: Grade, decode: Callable[[Sequence[int]], str]
) -> tuple[Step, ...]:
    """Return the steps of a completion: its lines, its turns, or the whole of it."""
    match supervision:
        case "process":
            return tuple(line_steps(completion, grade, decode))
        case "turn":
            return tuple(turn_steps(completion, grade))
        case _:
            return (Step(completion.num_tokens, outcome(grade)),)


def line_steps(completion: "Completion", grade: Grade, decode: Callable[[Sequence[int]], str]) -> list[Step]:
    """Return a step for each line of a completion, whose ends increase strictly.

    `decode` turns the first tokens of a turn into the beginning of its text. A step's last token is the first with
    which all of its characters are there, its newline included; lines that would end at the same token are one step.
    What an environment wrote has no steps.
    """
    ids = completion.tokens.sampled_ids
    texts: dict[int, str] = {}
    start = 0
    for stop, text in [(turn.end, turn.text) for turn in completion.turns] or [(len(ids), completion.text)]:
        lines = _lines(text)
        for end, line in zip(_token_ends(ids[start:stop], lines, decode), lines, strict=True):
            texts[start + end] = texts.get(start + end, "") + line
        start = stop
    if ids:
        texts[len(ids)] = texts.get(len(ids), "")
    *ends, last = sorted(texts) or [0]
    return [*(Step(end, math.nan, texts[end]) for end in ends), Step(last, outcome(grade), texts.get(last, ""))]


def _lines(text: str) -> list[str]:
    """The lines of a text with their ends; an empty one is added to the one before."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if lines and not line.strip():
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def _token_ends(ids: Sequence[int], lines: Sequence[str], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return where each line ends, in tokens; the last one ends with them."""

    def num_decoded(count: int) -> int:
        return len(decode(ids[:count]).rstrip(_INCOMPLETE))

    ends, end = [], 0
    for num_characters in list(accumulate(map(len, lines)))[:-1]:
        end = bisect_left(range(len(ids) + 1), num_characters, end, len(ids), key=num_decoded)
        ends.append(end)
    return [*ends, len(ids)] if lines else []


def turn_steps(completion: "Completion", grade: Grade) -> list[Step]:
    """Return a step for each turn of a completion, of which the last is worth what its answer is worth."""
    *before, _ = turns = [turn.text for turn in completion.turns] or [completion.text]
    ends = [turn.end for turn in completion.turns[:-1]]
    steps = [Step(end, math.nan, text) for end, text in zip(ends, before, strict=True)]
    return [*steps, Step(completion.num_tokens, outcome(grade), turns[-1])]
