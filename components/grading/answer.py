r"""The final answer of a text: what stands after `####`, as in GSM8K, or in the last `\boxed{}`, as in MATH."""

import re

from components.grading.boxes import last_boxed
from components.grading.statement import stated_answer
from components.shared.answer_policy import AnswerPolicy

_MARK = "####"
_MARKERS = (_MARK, r"\boxed", r"\fbox")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"
_NOT_REASONING = re.compile(r"</?think>|\\[(\[]|[\s#$*]")


def final_answer(text: str, policy: AnswerPolicy) -> str | None:
    """Return what the text gives as its answer; None where it gives none in the place that the policy names.

    Of the two markers the later one counts, so a heading such as `#### Step 1` does not hide a box below it. Text
    inside `<think>` does not count. A text that stops in the middle has no answer, whatever numbers it holds.
    """
    said = outside_thoughts(text)
    if policy is AnswerPolicy.BOXED:
        return _boxed(said)
    if policy is AnswerPolicy.MARKED:
        return _marked(said)
    if _MARK in said or "box" in said:
        _, mark, after = said.rpartition(_MARK)
        _, _, rest = after.partition("\n")
        declared = _boxed(rest if mark else said) or _marked(said)
        if declared or policy is AnswerPolicy.DECLARED:
            return declared
    return stated_answer(said) if policy is AnswerPolicy.STATED else None


def has_reasoning(text: str, policy: AnswerPolicy) -> bool:
    """Tell whether anything is written before the final answer; thoughts count, and a bare answer has none."""
    answer = final_answer(text, policy)
    if answer is None:
        return False
    place = max(text.rfind(marker) for marker in _MARKERS)
    before = text[: place if place >= 0 else text.rfind(answer)]
    return bool(_NOT_REASONING.sub("", before))


def _boxed(text: str) -> str | None:
    return (last_boxed(text) if "box" in text else None) or None


def _marked(text: str) -> str | None:
    _, mark, after = text.rpartition(_MARK)
    return (after.partition("\n")[0].strip() or None) if mark else None


def outside_thoughts(text: str) -> str:
    """Return a response without what stands between `<think>` and `</think>`."""
    if "think>" not in text:
        return text
    # Where the prompt itself opened the thought, only its end is in the text.
    return _THOUGHT.sub(" ", text).rpartition(_THOUGHT_END)[2]
