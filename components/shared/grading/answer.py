r"""The final answer of a text: what stands after `####`, as in GSM8K, or in the last `\boxed{}`, as in MATH."""

import re
from enum import StrEnum

from components.shared.grading.boxes import last_boxed


class AnswerPolicy(StrEnum):
    """Where a response states its final answer; whatever else it says is not graded."""

    BOXED = "boxed"
    r"""In its last `\boxed{}`, as in MATH."""
    MARKED = "marked"
    """After its last `####`, as in GSM8K."""
    DECLARED = "declared"
    """In the later of the two."""
    STATED = "stated"
    """In the later of the two or, without either, in a last sentence that says so ("The answer is 42.")."""


_MARK = "####"
_MARKERS = (_MARK, r"\boxed", r"\fbox")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"
_NOT_REASONING = re.compile(r"</?think>|\\[(\[]|[\s#$*]")


def final_answer(text: str, policy: AnswerPolicy = AnswerPolicy.DECLARED) -> str | None:
    """Return what the text declares to be its answer; None where it declares nothing.

    The later of the two markers counts, so a heading such as `#### Step 1` does not hide a box below it. Text inside
    `<think>` does not count, and no number is ever picked from the prose: an undeclared answer is no answer.
    """
    declared = _outside_thoughts(text)
    _, mark, after = declared.rpartition(_MARK)
    line, _, rest = after.partition("\n")
    answer = _boxed(rest if mark else declared)
    return (line.strip() or None) if answer is None and mark else answer or None


def has_reasoning(text: str, policy: AnswerPolicy = AnswerPolicy.DECLARED) -> bool:
    """Tell whether anything is written before the final answer; thoughts count, and a bare answer has none."""
    if final_answer(text, policy) is None:
        return False
    before = text[: max(text.rfind(marker) for marker in _MARKERS)]
    return bool(_NOT_REASONING.sub("", before))


def _boxed(text: str) -> str | None:
    try:
        return last_boxed(text) if "box" in text else None
    except RecursionError:  # hundreds of boxes inside one another declare nothing
        return None


def _outside_thoughts(text: str) -> str:
    if "think>" not in text:
        return text
    # Where the prompt itself opened the thought, only its end is in the text.
    return _THOUGHT.sub(" ", text).rpartition(_THOUGHT_END)[2]
