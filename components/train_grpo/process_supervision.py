"""Process supervision (arXiv 2402.03300, section 4.1.3): where the steps of a completion end, and their text.

A step is a line of the completion, with the empty lines that follow it; in an environment it can be a turn instead. A
learned reward model scores a step at its end; a custom reward gets the texts of the steps. The last step ends with the
completion, and only it has a label: whether the answer is right.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from components.grading.verifier import Grade, Verdict

if TYPE_CHECKING:  # torch
    from components.rollout.sampler import Completion

_OUTCOMES = {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: math.nan}
_INCOMPLETE = "\ufffd"
"""The replacement character, to which a byte-level tokenizer decodes the first bytes of a character."""


@dataclass(frozen=True)
class Step:
    """One reasoning step of a completion."""

    end: int
    """Sampled tokens of the completion up to and including the step's last one."""
    label: float
    """Training label of the reward model: 1 for a right answer, 0 for a wrong one, NaN for all steps but the last."""
    text: str = ""


def outcome(grade: Grade) -> float:
    """Return 1 for a right answer, 0 for a wrong one, and NaN for one that cannot be graded."""
    return _OUTCOMES[grade.verdict]


def steps_of(
    supervision: str, completion: "Completion", grade: Grade, decode: Callable[[Sequence[int]], str]
) -> tuple[Step, ...]:
    """Return the steps of a completion: its lines, its turns, or the whole of it."""
    if supervision == "process":
        return tuple(line_steps(completion, grade, decode))
    if supervision == "turn":
        return tuple(turn_steps(completion, grade))
    return (Step(completion.num_tokens, outcome(grade)),)


def line_steps(completion: "Completion", grade: Grade, decode: Callable[[Sequence[int]], str]) -> list[Step]:
    """Return a step for each line of a completion, whose ends increase strictly.

    A step ends at the first token with which all of its characters, newline included, are decoded. Lines that would end
    at the same token are one step. What an environment wrote has no steps.
    """
    ids = completion.tokens.sampled_ids
    turns = [(turn.end, turn.text) for turn in completion.turns] or [(len(ids), completion.text)]
    text_by_end, start = defaultdict[int, str](str), 0
    for stop, text in turns:
        lines = _lines(text)
        for end, line in zip(_token_ends(ids[start:stop], lines, decode), lines, strict=True):
            text_by_end[start + end] += line
        start = stop
    ends = sorted({*text_by_end, len(ids)})  # tokens without text may follow the last line
    return _steps(ends, [text_by_end[end] for end in ends], grade)


def _lines(text: str) -> list[str]:
    """Return the lines of a text with their newlines; empty lines are appended to the line before."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if lines and not line.strip():
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def _token_ends(ids: Sequence[int], lines: Sequence[str], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the number of tokens up to the end of each line; the last line ends with the last token."""

    def num_characters(num_tokens: int) -> int:  # of the first tokens, without an incomplete character at the end
        return len(decode(ids[:num_tokens]).rstrip(_INCOMPLETE))

    ends, end = [], 0
    for num_needed in accumulate(map(len, lines[:-1])):  # characters up to the end of each line but the last
        end = bisect_left(range(len(ids) + 1), num_needed, end, len(ids), key=num_characters)
        ends.append(end)
    return [*ends, len(ids)] if lines else []


def turn_steps(completion: "Completion", grade: Grade) -> list[Step]:
    """Return a step for each turn of a completion; one without turns is a single step."""
    texts = [turn.text for turn in completion.turns] or [completion.text]
    ends = [turn.end for turn in completion.turns[:-1]] + [completion.num_tokens]
    return _steps(ends, texts, grade)


def _steps(ends: Sequence[int], texts: Sequence[str], grade: Grade) -> list[Step]:
    """Return steps, of which only the last has a label, that of the grade."""
    labels = [math.nan] * (len(ends) - 1) + [outcome(grade)]
    return [Step(*fields) for fields in zip(ends, labels, texts, strict=True)]
