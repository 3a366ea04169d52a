"""MATH rows: the gold answer on every known oddity, levels, and which rows are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.grading.verifier import Verifier
from components.prepare_data.math_dataset import MATH, MATH500, boxed_answer
from components.prepare_data.source import MalformedRowError

_MATH500 = Path("../shared/data/math500.jsonl")
_MATH_SOURCE = MATH(kind="math", train=Path("x"))
_MATH500_SOURCE = MATH500(kind="math500", test=Path("x"))
_ROW: dict[str, Any] = {
    "problem": "What is $1+1$?",
    "solution": r"It is $\boxed{2}$.",
    "level": "Level 1",
    "type": "Algebra",
}


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """What tells whether two boxes say the same."""
    with Verifier() as verify:
        yield verify


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"Thus $x = \boxed{2}$.", "2"),
        (r"Thus $x = \boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"Our answer is $\boxed 2$.", "2"),
        (r"Our answer is $\fbox{2}$.", "2"),
        (r"It is $\boxed{10}$." + "\n\n- OR -\n\n" + r"It must be $\boxed{10}$.", "10"),
        (r"It is $\boxed{\frac{11}{2}}$. Alternatively, $\frac{8+3}{2} = \boxed{5.5}$.", "5.5"),
        (r"It is $\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$.", r"\frac{639}{40}"),
    ],
)
def test_one_answer_is_read_from_its_last_form(verify: Verifier, solution: str, answer: str) -> None:
    r"""Missing braces, \fbox and several ways to the same answer all give that one answer."""
    assert boxed_answer(solution, verify) == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"The roots are $\boxed{-2}$ and $\boxed{3}$.", "-2, 3"),
        (r"$\boxed{1}, \boxed{2},$ and $\boxed{4}$", "1, 2, 4"),
        (r"So $x = \boxed{4}$." + "\n\n" + r"Then $y = \boxed{-1}$.", "4, -1"),
        (
            r"They are $\boxed{(1,2)}$ and $\boxed{(3,4)}$, so again $\boxed{(1,2)}$ and $\boxed{(3,4)}$.",
            "(1,2), (3,4)",
        ),
    ],
)
def test_boxes_that_together_are_the_answer_are_joined(verify: Verifier, solution: str, answer: str) -> None:
    """No part of the answer is lost, and none is said twice."""
    assert boxed_answer(solution, verify) == answer


@pytest.mark.parametrize(
    "remark",
    [
        "\n\n" + r"Note: $\boxed{7}$ is also accepted as an answer.",
        r" (Also accepted: $\boxed{7}$.)",
        r" We accept $\boxed{7}$ as well.",
        r" $\boxed{7}$ would be acceptable.",
    ],
)
def test_a_box_that_is_merely_accepted_too_is_not_the_answer(verify: Verifier, remark: str) -> None:
    """What counts is what the solution found, not what graders were told to let pass."""
    assert boxed_answer(r"Solving, we find $d = \boxed{-7}$." + remark, verify) == "-7"


def test_a_story_about_accepting_does_not_hide_its_answer(verify: Verifier) -> None:
    """The first box is never a remark, and a remark does not reach into another paragraph."""
    assert boxed_answer(r"The number of accepted students is $\boxed{5}$.", verify) == "5"
    assert boxed_answer("All are accepted.\n\n$a = \\boxed{5}$\n\n$b = \\boxed{6}$", verify) == "5, 6"


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("It is 2.", r"the solution has no closed \boxed"),
        (r"It is $\boxed{}$.", r"the solution has an empty \boxed{}"),
        (r"It is $\boxed{1}$ or $\boxed{}$.", r"the solution has an empty \boxed{}"),
        (r"It is $\boxed{1}$ or $\boxed{2", "the last box of the solution is never closed"),
        (r"It is $\boxed{\frac{1}{2}", r"the solution has no closed \boxed"),
    ],
)
def test_a_solution_without_a_readable_answer_is_refused(verify: Verifier, solution: str, reason: str) -> None:
    """An answer is never guessed."""
    with pytest.raises(MalformedRowError) as refused:
        boxed_answer(solution, verify)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("level", "expected"), [("Level 5", 5), (3, 3), (3.0, 3), ("4", 4), ("Level ?", None)])
def test_levels_are_numbers_or_unknown(verify: Verifier, level: object, expected: int | None) -> None:
    """Text, whole numbers as parquet may give them, and the question mark of two published rows."""
    assert _MATH_SOURCE.read_row(_ROW | {"level": level}, verify).level == expected


def test_an_answer_column_stands_before_the_boxes(verify: Verifier) -> None:
    """Where a dataset gives its answers apart, they are taken as they are."""
    assert _MATH_SOURCE.read_row(_ROW | {"answer": r" \frac{4}{2} "}, verify).answer == r"\frac{4}{2}"


def test_the_subject_is_called_subject_or_type(verify: Verifier) -> None:
    """Both published layouts are read."""
    assert _MATH_SOURCE.read_row(_ROW, verify).subject == "Algebra"
    renamed = {name: value for name, value in _ROW.items() if name != "type"}
    assert _MATH_SOURCE.read_row(renamed | {"subject": "Geometry"}, verify).subject == "Geometry"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"problem": None}, "column `problem` is missing"),
        ({"solution": None}, "column `solution` is missing"),
        ({"level": None}, "column `level` is missing"),
        ({"type": None}, "column `subject` or `type` is missing"),
        ({"level": "hard"}, 'column `level` is "hard", expected a number'),
        ({"level": True}, "column `level` is true, expected a number"),
        ({"answer": " "}, "column `answer` is empty"),
    ],
)
def test_unusable_rows_say_what_is_wrong(verify: Verifier, change: dict[str, Any], reason: str) -> None:
    """Each reason names the column and what was found."""
    with pytest.raises(MalformedRowError) as refused:
        _MATH_SOURCE.read_row(_ROW | change, verify)
    assert reason in str(refused.value)


def test_math500_needs_its_answer_column(verify: Verifier) -> None:
    """Its answers were cleaned by its authors; the boxes are no substitute."""
    with pytest.raises(MalformedRowError, match="column `answer` is missing"):
        _MATH500_SOURCE.read_row(_ROW, verify)


@pytest.mark.skipif(not _MATH500.is_file(), reason="the published MATH-500 file is not at hand")
def test_boxes_agree_with_the_published_answers_of_math500(verify: Verifier) -> None:
    """On all 500 rows, reading the solution's boxes gives the answer that its authors wrote down."""
    rows = [json.loads(line) for line in _MATH500.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 500
    assert [
        row["unique_id"]
        for row in rows
        if boxed_answer(row["solution"], verify) != _MATH500_SOURCE.read_row(row, verify).answer
    ] == []
