"""MBPP rows: their questions, solutions and tests, and which rows are malformed."""

from pathlib import Path
from typing import Any

import pytest

from components.grading.unit_tests import grade_code
from components.grading.verifier import Verdict, Verifier, is_unit_tests
from components.prepare_data.mbpp import MBPP
from components.prepare_data.source import Fields, MalformedRowError

DOUBLE: dict[str, Any] = {
    "task_id": 1,
    "text": "Write a function to double each element of a list.",
    "code": "def double(numbers):\r\n  return [2 * number for number in numbers] ",
    "test_list": ["assert double([1, 2]) == [2, 4]", "assert double([]) == []", "assert double([-1]) == [-2]"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
AREA: dict[str, Any] = {
    "source_file": "tasks.ipynb",
    "task_id": 2,
    "prompt": "Write a python function to find the area of a circle. ",
    "code": "import math\ndef area(radius):\n    return math.pi * radius ** 2",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(area(1), 3.14159, rel_tol=0.001)", "assert area(0) == 0"],
}


def read(row: dict[str, Any]) -> Fields:
    """The problem in one row."""
    return MBPP(kind="mbpp", train=Path("train.jsonl")).read_row(row, Verifier())


def test_row_becomes_a_problem_with_its_tests_as_answer() -> None:
    """The question shows the first test alone; the solution is a block of code; the answer is all tests."""
    assert read(DOUBLE) == Fields(
        question="Write a function to double each element of a list.\n"
        "Answer with a Python code block that passes tests like:\n"
        "assert double([1, 2]) == [2, 4]",
        solution="```python\ndef double(numbers):\n  return [2 * number for number in numbers]\n```",
        answer="assert double([1, 2]) == [2, 4]\nassert double([]) == []\nassert double([-1]) == [-2]",
    )


@pytest.mark.parametrize("row", [DOUBLE, AREA])
def test_prepared_solution_passes_the_prepared_tests(row: dict[str, Any]) -> None:
    """The parts of a row fit together as the grader sees them, and returning the value that is shown is not enough."""
    fields = read(row)
    assert is_unit_tests(fields.answer)
    assert grade_code(fields.answer, fields.solution).verdict == Verdict.RIGHT
    repeated = "```python\ndef double(numbers):\n    return [2, 4]\ndef area(radius):\n    return 3.14159\n```"
    assert grade_code(fields.answer, repeated).verdict == Verdict.WRONG


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text": None}, "column `prompt` or `text` is missing"),
        ({"code": "x = '''\n```\n'''"}, "column `code` contains a code fence"),
        ({"test_list": []}, "column `test_list` is [], expected a list of Python statements"),
        ({"test_list": ["assert f(1) == 2", 3]}, "column `test_list` is 3, expected text"),
        ({"test_list": ["assert f(1) == 2", "assert f(1) > 2"]}, "column `test_list`: line 2 of the tests is "),
        ({"test_list": ["assert f(1) =="]}, "column `test_list`: the tests are "),
        ({"test_setup_code": "root = Node(1)"}, "column `test_setup_code` does more than import"),
        ({"test_setup_code": "import"}, "`test_imports` and `test_setup_code` are not valid Python: invalid syntax"),
        ({"test_imports": "import re"}, 'column `test_imports` is "import re", expected a list of Python statements'),
        (
            {"test_imports": ["import os.path as p"], "test_list": ["assert double(p.sep) == 2"]},
            "the tests call p, which they import; they may only call the solution",
        ),
    ],
)
def test_malformed_row_has_a_reason(change: dict[str, object], reason: str) -> None:
    """Each reason names the column and its content, or what would be accepted."""
    with pytest.raises(MalformedRowError) as refused:
        read(DOUBLE | change)
    assert reason in str(refused.value)
