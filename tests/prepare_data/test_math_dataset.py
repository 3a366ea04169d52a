"""MATH rows: the gold answer on every known oddity, levels, and which rows are malformed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.grading.verifier import Verifier
from components.prepare_data.math_dataset import MATH, boxed_answer
from components.prepare_data.source import MalformedRowError

_MATH, _MATH500 = MATH(kind="math", train=Path("x")), MATH(kind="math500", test=Path("x"))
_PUBLISHED = Path("../shared/data/math500.jsonl")
_ROW: dict[str, Any] = {
    "problem": "What is $1+1$?",
    "solution": r"It is $\boxed{2}$.",
    "level": "Level 1",
    "type": "Algebra",
}


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """Decides whether two boxes have the same answer."""
    with Verifier() as verify:
        yield verify


_ONE_ANSWER = [
    (r"Thus $x = \boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
    (r"Our answer is $\boxed 2$.", "2"),
    (r"Our answer is $\fbox{2}$.", "2"),
    (r"It is $\boxed{10}$." + "\n\n- OR -\n\n" + r"It must be $\boxed{10}$.", "10"),
    (r"It is $\boxed{\frac{11}{2}}$. Alternatively, $\frac{8+3}{2} = \boxed{5.5}$.", "5.5"),
    (r"It is $\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$.", r"\frac{639}{40}"),
]
_JOINED = [
    (r"The roots are $\boxed{-2}$ and $\boxed{3}$.", "-2, 3"),
    (r"So $x = \boxed{4}$." + "\n\n" + r"Then $y = \boxed{-1}$.", "4, -1"),
    (r"They are $\boxed{(1,2)}$ and $\boxed{(3,4)}$, so again $\boxed{(1,2)}$ and $\boxed{(3,4)}$.", "(1,2), (3,4)"),
]
_REMARKS = [
    (r"We find $d = \boxed{-7}$." + "\n\n" + r"Note: $\boxed{7}$ is also accepted as an answer.", "-7"),
    (r"We find $d = \boxed{-7}$. (Also accepted: $\boxed{7}$.)", "-7"),
    (r"We find $d = \boxed{-7}$. We accept $\boxed{7}$ as well.", "-7"),
    (r"We find $d = \boxed{-7}$. $\boxed{7}$ would be acceptable.", "-7"),
    # The first box is never a remark, and a remark does not reach into another paragraph.
    (r"The number of accepted students is $\boxed{5}$.", "5"),
    ("All are accepted.\n\n$a = \\boxed{5}$\n\n$b = \\boxed{6}$", "5, 6"),
]


@pytest.mark.parametrize(("solution", "answer"), [*_ONE_ANSWER, *_JOINED, *_REMARKS])
def test_answer_is_read_from_the_boxes(verify: Verifier, solution: str, answer: str) -> None:
    """One answer in its last form; parts joined without repetition; other accepted answers left out."""
    assert boxed_answer(solution, verify) == answer


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("It is 2.", r"the solution has no closed \boxed"),
        (r"It is $\boxed{}$.", r"the solution has an empty \boxed{}"),
        (r"It is $\boxed{1}$ or $\boxed{2", "the last box of the solution is never closed"),
    ],
)
def test_solution_without_a_readable_answer_is_malformed(verify: Verifier, solution: str, reason: str) -> None:
    """An answer is never guessed."""
    with pytest.raises(MalformedRowError) as refused:
        boxed_answer(solution, verify)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("level", "expected"), [("Level 5", 5), (3, 3), (3.0, 3), ("4", 4), ("Level ?", None)])
def test_level_is_a_number_or_unknown(verify: Verifier, level: object, expected: int | None) -> None:
    """Text, whole numbers as parquet may give them, and the question mark of two published rows."""
    assert _MATH.read_row(_ROW | {"level": level}, verify).level == expected


def test_columns_of_both_published_layouts_are_read(verify: Verifier) -> None:
    """The subject is called `subject` or `type`, and an answer column is preferred to the boxes."""
    assert _MATH.read_row(_ROW, verify).subject == "Algebra"
    assert _MATH.read_row(_ROW | {"subject": "Geometry"}, verify).subject == "Geometry"
    assert _MATH.read_row(_ROW | {"answer": r" \frac{4}{2} "}, verify).answer == r"\frac{4}{2}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"problem": None}, "column `problem` is missing"),
        ({"type": " "}, "column `type` is empty"),
        ({"level": "hard"}, 'column `level` is "hard", expected a number'),
        ({"level": True}, "column `level` is true, expected a number"),
        ({"answer": " "}, "column `answer` is empty"),
    ],
)
def test_malformed_row_has_a_reason(verify: Verifier, change: dict[str, Any], reason: str) -> None:
    """Each reason names the column and its content."""
    with pytest.raises(MalformedRowError) as refused:
        _MATH.read_row(_ROW | change, verify)
    assert reason in str(refused.value)


@pytest.mark.skipif(not _PUBLISHED.is_file(), reason="the published MATH-500 file is not here")
def test_boxes_agree_with_the_published_answers_of_math500(verify: Verifier) -> None:
    """On all 500 rows, the boxes of the solution give the answer that the authors wrote down."""
    rows = [json.loads(line) for line in _PUBLISHED.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 500
    differing = [row for row in rows if boxed_answer(row["solution"], verify) != _MATH500.read_row(row, verify).answer]
    assert [row["unique_id"] for row in differing] == []
