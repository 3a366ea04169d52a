"""MATH and its selection MATH-500: competition problems whose answers are boxed in the solution."""

import re
from typing import Any

from components.grading.answer import Box, find_boxes, last_boxed
from components.grading.verifier import Submission, Verdict, Verifier
from components.prepare_data.fields import Fields
from components.prepare_data.raw_rows import MalformedRowError, shown, text
from components.shared.answer_policy import AnswerPolicy

_LEVEL = re.compile(r"(?:Level )?([1-9])(?:\.0)?")
_UNKNOWN_LEVEL = "Level ?"
_PARAGRAPH = re.compile(r"\n\s*\n")
_REMARK = re.compile(r"\baccept(?:ed|able)?\b", re.IGNORECASE)


def math_fields(columns: dict[str, Any], verify: Verifier) -> Fields:
    """Read one row of MATH; the answer is its own column where there is one, and the solution's boxes otherwise."""
    solution = text(columns, "solution")
    return Fields(
        question=text(columns, "problem"),
        solution=solution,
        answer=text(columns, "answer").strip() if columns.get("answer") is not None else boxed_answer(solution, verify),
        subject=text(columns, "subject", "type"),
        level=_level(columns),
    )


def math500_fields(columns: dict[str, Any], verify: Verifier) -> Fields:
    """Read one row of MATH-500, which has its answers in a column of their own."""
    text(columns, "answer")
    return math_fields(columns, verify)


def boxed_answer(solution: str, verify: Verifier) -> str:
    r"""Return the answer that a solution boxes.

    Nearly every solution has one box, or one for each of several ways to the same answer. Boxes with different
    answers are parts of one answer and are joined, unless a later one is merely said to be accepted too. Where two
    boxes say the same in two forms (`15\frac{39}{40}` or `\frac{639}{40}`), the last form counts.
    """
    boxes = find_boxes(solution)
    if boxes and last_boxed(solution) is None:
        raise MalformedRowError("the last box of the solution is never closed")
    if not boxes:
        raise MalformedRowError(r"the solution has no closed \boxed{...}")
    answers = [box.content for index, box in enumerate(boxes) if index == 0 or not _is_remark(solution, boxes, index)]
    if not all(answers):
        raise MalformedRowError(r"the solution has an empty \boxed{}")
    return ", ".join(_distinct(answers, verify))


def _is_remark(solution: str, boxes: list[Box], index: int) -> bool:
    r"""Whether a box is an aside, such as in "Note: $\boxed{3}$ is also accepted as an answer"."""
    box = boxes[index]
    until = boxes[index + 1].start if index + 1 < len(boxes) else len(solution)
    before = _PARAGRAPH.split(solution[boxes[index - 1].end : box.start])[-1]
    after = _PARAGRAPH.split(solution[box.end : until])[0]
    return bool(_REMARK.search(before + after))


def _distinct(answers: list[str], verify: Verifier) -> list[str]:
    """The answers without those that a later one says again, maybe in another form."""
    return [
        answer
        for index, answer in enumerate(answers)
        if not any(_same(answer, later, verify) for later in answers[index + 1 :])
    ]


def _same(answer: str, other: str, verify: Verifier) -> bool:
    if answer == other:
        return True
    (grade,) = verify([Submission(other, rf"\boxed{{{answer}}}", AnswerPolicy.BOXED)])
    return grade.verdict == Verdict.RIGHT


def _level(columns: dict[str, Any]) -> int | None:
    level = columns.get("level")
    if level is None:
        raise MalformedRowError("column `level` is missing")
    if level == _UNKNOWN_LEVEL:
        return None
    found = _LEVEL.fullmatch(str(level)) if isinstance(level, str | int | float) else None
    if not found:
        raise MalformedRowError(f"column `level` is {shown(level)}, expected a number, `Level n` or `{_UNKNOWN_LEVEL}`")
    return int(found.group(1))
