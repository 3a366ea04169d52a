"""SVAMP rows, as published and as they would be malformed."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.grading.verifier import Verifier
from components.prepare_data.source import Fields, MalformedRowError
from components.prepare_data.svamp import SVAMP
from components.shared.problem import Problem, Split

_ROW = {
    "Body": "A bag has 12 red and 5 blue marbles. If Kim takes 3 of the red ones",
    "Question": "How many red marbles are left?",
    "Equation": "( 12.0 - 3.0 )",
    "Answer": 9.0,
    "Type": "Subtraction",
}
_PUBLISHED = Path("../shared/data/svamp.json")


def _read(**changes: Any) -> Fields:
    return SVAMP(kind="svamp", train=Path("svamp.json")).read_row({**_ROW, **changes}, Verifier())


def test_a_row_becomes_a_question_with_its_equation_as_solution() -> None:
    """The body ends in a full stop, whole numbers lose their decimals, and outer brackets go."""
    told = "A bag has 12 red and 5 blue marbles. If Kim takes 3 of the red ones. How many red marbles are left?"
    assert _read() == Fields(told, "12 - 3 = 9\n#### 9", "9", "Subtraction")
    two_steps = _read(Equation="( ( 12.0 - 3.0 ) / 4.5 )", Answer=2.0, Type="Common-Divison")
    assert (two_steps.solution, two_steps.subject) == ("(12 - 3) / 4.5 = 2\n#### 2", "Common-Division")


def test_without_solutions_there_is_nothing_to_imitate() -> None:
    """The answer alone is what a reward needs."""
    assert SVAMP(kind="svamp", train=Path("s.json"), solutions=False).read_row(_ROW, Verifier()).solution == ""


@pytest.mark.parametrize("column", list(_ROW))
def test_a_missing_column_is_named(column: str) -> None:
    """Whichever it is."""
    with pytest.raises(MalformedRowError, match=f"column `{column}` is missing"):
        _read(**{column: None})


@pytest.mark.skipif(not _PUBLISHED.is_file(), reason=f"no SVAMP at {_PUBLISHED}")
def test_every_published_problem_is_read_and_solved_by_its_solution() -> None:
    """The equation of each gives its answer, but for one, of which the published answer is wrong."""
    source = SVAMP(kind="svamp", train=_PUBLISHED)
    problems = [each for each in source.read(Split.TRAIN, Path(), Verifier()) if isinstance(each, Problem)]
    assert len(problems) == len(json.loads(_PUBLISHED.read_text())) == 1000
    wrong = []
    for problem in problems:
        calculation, answer = problem.solution.splitlines()[0].split(" = ")
        assert problem.answer == answer
        if eval(calculation) != pytest.approx(float(answer)):
            wrong.append(problem.id)
    assert wrong == ["svamp/train/00679"]
