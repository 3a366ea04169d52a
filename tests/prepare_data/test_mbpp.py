"""MBPP rows: what becomes of tasks, solutions and tests, and which rows are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.grading.unit_tests import grade_code, is_unit_tests
from components.grading.verifier import Verdict, Verifier
from components.prepare_data.config import ContaminationConfig, PrepareConfig
from components.prepare_data.contamination import find_contamination
from components.prepare_data.mbpp import MBPP
from components.prepare_data.prepare import prepare
from components.prepare_data.source import Fields, MalformedRowError
from components.shared import jsonl
from components.shared.problem import Problem, Split, read_problems

_SOURCE = MBPP(kind="mbpp", train=Path("train.jsonl"))


def mbpp_fields(row: dict[str, Any]) -> Fields:
    """The problem in one row."""
    return _SOURCE.read_row(row, Verifier())


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


def test_a_row_becomes_a_problem_with_its_tests_as_answer() -> None:
    """The question shows the first test alone; the solution is a block of code; the answer is all tests."""
    fields = mbpp_fields(DOUBLE)
    assert fields.question == (
        "Write a function to double each element of a list.\n"
        "Answer with a Python code block that passes tests like:\n"
        "assert double([1, 2]) == [2, 4]"
    )
    assert fields.solution == "```python\ndef double(numbers):\n  return [2 * number for number in numbers]\n```"
    assert fields.answer == "assert double([1, 2]) == [2, 4]\nassert double([]) == []\nassert double([-1]) == [-2]"
    assert (fields.subject, fields.level) == ("", None)


def test_a_sanitized_row_calls_its_task_prompt() -> None:
    """An import that only a tolerance needs is no obstacle: the comparison is not made where the code is."""
    fields = mbpp_fields(AREA)
    assert fields.question.startswith("Write a python function to find the area of a circle.\nAnswer")
    assert fields.answer.count("assert") == 2


@pytest.mark.parametrize("row", [DOUBLE, AREA])
def test_a_prepared_solution_passes_the_prepared_tests(row: dict[str, Any]) -> None:
    """What is taken from a row fits together as the grader sees it."""
    fields = mbpp_fields(row)
    assert is_unit_tests(fields.answer)
    assert grade_code(fields.answer, fields.solution).verdict == Verdict.RIGHT


def test_what_is_shown_is_not_enough_to_pass() -> None:
    """An answer that gives back the value in the question passes one test of three."""
    fields = mbpp_fields(DOUBLE)
    shown = fields.question.rpartition("== ")[2]
    grade = grade_code(fields.answer, f"```python\ndef double(numbers):\n    return {shown}\n```")
    assert (grade.verdict, grade.tests_passed) == (Verdict.WRONG, 1 / 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text": None}, "column `prompt` or `text` is missing"),
        ({"text": " "}, "column `text` is empty"),
        ({"code": None}, "column `code` is missing"),
        ({"code": "x = '''\n```\n'''"}, "column `code` contains a code fence"),
        ({"test_list": None}, "column `test_list` is null, expected a list of Python statements"),
        ({"test_list": []}, "column `test_list` is [], expected a list of Python statements"),
        (
            {"test_list": "assert f(1) == 2"},
            'column `test_list` is "assert f(1) == 2", expected a list of Python statements',
        ),
        ({"test_list": ["assert f(1) == 2", " "]}, "column `test_list` is empty"),
        ({"test_list": ["assert f(1) == 2", 3]}, "column `test_list` is 3, expected text"),
        ({"test_list": ["assert f(1) == '\ud800'"]}, "column `test_list` contains half a surrogate pair"),
        ({"test_list": ["assert f(1) == 2", "assert f(1) > 2"]}, "column `test_list`: line 2 of the tests is none of"),
        ({"test_list": ["assert f(1) =="]}, "column `test_list`: the tests are "),
        ({"test_setup_code": "root = Node(1)"}, "column `test_setup_code` does more than import"),
        ({"test_setup_code": "import"}, "`test_imports` and `test_setup_code` are not valid Python: invalid syntax"),
        ({"test_setup_code": 3}, "column `test_setup_code` is 3, expected text"),
        ({"test_imports": "import re"}, 'column `test_imports` is "import re", expected a list of Python statements'),
        (
            {"test_imports": ["import os.path as p"], "test_list": ["assert double(p.sep) == 2"]},
            "the tests call p, which they import; they may only call the solution",
        ),
        (
            {"test_setup_code": "from re import sub", "test_list": ["assert sub(double(1)) == 2"]},
            "the tests call sub, which they import; they may only call the solution",
        ),
    ],
)
def test_unusable_rows_say_what_is_wrong(change: dict[str, object], reason: str) -> None:
    """Each reason names the column and what was found or what would be accepted."""
    with pytest.raises(MalformedRowError) as refused:
        mbpp_fields(DOUBLE | change)
    assert reason in str(refused.value)


def test_a_file_of_rows_is_read_as_a_source(tmp_path: Path) -> None:
    """The kind is known to the intake; a row whose tests cannot be read is set aside."""
    path = tmp_path / "mbpp.jsonl"
    rows = [DOUBLE, AREA | {"test_list": ["assert area(1) > 3"]}, AREA]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = tmp_path / "problems"
    folder.mkdir()
    prepare(
        PrepareConfig(
            seed=1,
            sources=[MBPP(kind="mbpp", train=path, test=path)],
            max_malformed_fraction=0.5,
            contamination=ContaminationConfig(ngram_words=13, max_overlap=1),
        ),
        problems=folder,
    )
    test = read_problems(folder, Split.TEST)
    assert [(problem.id, problem.source) for problem in test] == [
        ("mbpp/test/00000", "mbpp"),
        ("mbpp/test/00002", "mbpp"),
    ]
    quarantine = [row for _, row in jsonl.read_rows(folder / "quarantine.jsonl")]
    assert [(row["line"], row["reason"].partition(":")[0]) for row in quarantine] == [(2, "column `test_list`")] * 2


def test_the_words_that_all_questions_share_are_no_contamination() -> None:
    """Two tasks are as far apart as they were without the sentence about the form of the answer."""
    columns = {"source": "mbpp", "solution": "", "answer": "1", "subject": "", "level": None}
    train, test = (
        Problem.model_validate(columns | {"id": split, "split": split, "question": mbpp_fields(row).question})
        for split, row in zip(Split, (DOUBLE, AREA), strict=True)
    )
    assert find_contamination([train], [test], ContaminationConfig(ngram_words=13, max_overlap=0)) == []
