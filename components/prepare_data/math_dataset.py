"""MATH and its selection MATH-500: competition problems whose answers are boxed in the solution."""

import re
from typing import Any, Literal

from components.grading.extract import Span, final_answer, find_boxes
from components.grading.verifier import Verdict, grade
from components.prepare_data.source import Fields, FileSource, MalformedRowError, excerpt, text, text_or_number
from components.shared.answer_policy import AnswerPolicy

_LEVEL = re.compile(r"(?:Level )?([1-9])(?:\.0)?")
_UNKNOWN_LEVEL = "Level ?"
_SUBJECT_COLUMNS = ("subject", "type")
_PARAGRAPH = re.compile(r"\n\s*\n")
_REMARK = re.compile(r"\baccept(?:ed|able)?\b", re.IGNORECASE)


class MATH(FileSource):
    """MATH and MATH-500 as published; MATH's original folder of a split has a JSON file per problem."""

    kind: Literal["math", "math500"]

    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem; in MATH without an `answer` column, the answer is read from the boxes of the solution.

        MATH-500 always needs the column: its authors corrected answers there, but not in the boxes.
        """
        if columns.get("answer") is None and self.kind == "math":
            answer = boxed_answer(text(columns, "solution"))
        else:
            answer = text_or_number(columns, "answer").strip()
        question, solution = text(columns, "problem"), text(columns, "solution")
        has_subject = any(columns.get(name) is not None for name in _SUBJECT_COLUMNS)
        subject = text(columns, *_SUBJECT_COLUMNS) if has_subject else ""
        return Fields(question, solution, answer, subject, level_of(columns))


def boxed_answer(solution: str) -> str:
    r"""Return the answer in the boxes of a solution.

    Nearly every solution has one box, or several with the same answer. Boxes with different answers are parts of one
    answer and are joined, except for a remark that another answer is accepted too. If two boxes hold the same answer
    in two forms (`15\frac{39}{40}` or `\frac{639}{40}`), the last form counts.
    """
    boxes = find_boxes(solution)
    if not boxes:
        raise MalformedRowError(r"the solution has no closed \boxed{...}")
    answers = [box.content for index, box in enumerate(boxes) if not _is_remark(solution, boxes, index)]
    if not all(answers):
        raise MalformedRowError(r"the solution has an empty \boxed{}")
    if final_answer(solution, AnswerPolicy.BOXED) is None:
        raise MalformedRowError("the last box of the solution is never closed")
    distinct = [
        answer
        for index, answer in enumerate(answers)
        if not any(_are_equal(answer, later) for later in answers[index + 1 :])
    ]
    return ", ".join(distinct)


def _is_remark(solution: str, boxes: list[Span], index: int) -> bool:
    r"""Tell whether a later box is a remark, such as in "Note: $\boxed{3}$ is also accepted as an answer"."""
    if index == 0:
        return False
    box = boxes[index]
    next_start = boxes[index + 1].start if index + 1 < len(boxes) else len(solution)
    # The text around the box, within its paragraph and up to the boxes next to it.
    before = _PARAGRAPH.split(solution[boxes[index - 1].end : box.start])[-1]
    after = _PARAGRAPH.split(solution[box.end : next_start])[0]
    return bool(_REMARK.search(before + after))


def _are_equal(answer: str, other: str) -> bool:
    return answer == other or grade(other, rf"\boxed{{{answer}}}", AnswerPolicy.BOXED).verdict is Verdict.RIGHT


def level_of(columns: dict[str, Any], name: str = "level") -> int | None:
    """Return the level in a column with a number or `Level n`; None if it is missing or unknown."""
    level = columns.get(name)
    if level is None or level == _UNKNOWN_LEVEL:
        return None
    match = _LEVEL.fullmatch(str(level))
    if not match:
        raise MalformedRowError(
            f"column `{name}` is {excerpt(level)}, expected a number, `Level n` or `{_UNKNOWN_LEVEL}`"
        )
    return int(match.group(1))
