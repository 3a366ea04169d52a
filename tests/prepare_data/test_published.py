import json
from pathlib import Path
from typing import Any

import pytest

from components.grading.unit_tests import grade_code
from components.grading.verifier import Verdict, is_unit_tests
from components.prepare_data.gsm8k import GSM8K
from components.prepare_data.math_dataset import MATH, boxed_answer
from components.prepare_data.mbpp import MBPP
from components.prepare_data.source import Fields, FileSource, MalformedRowError
from components.prepare_data.svamp import SVAMP
from components.shared.problem import Problem, Split

_PUBLISHED = Path("../shared/data")
_GSM8K, _MBPP = GSM8K(kind="gsm8k", train=Path("x")), MBPP(kind="mbpp", train=Path("x"))
_SVAMP = SVAMP(kind="svamp", train=Path("x"))
_MATH, _MATH500 = MATH(kind="math", train=Path("x")), MATH(kind="math500", test=Path("x"))
_SOLD: dict[str, Any] = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 24"}
_ADDED: dict[str, Any] = {"problem": "1+1?", "solution": r"It is $\boxed{2}$.", "level": "Level 1", "type": "Algebra"}
_DOUBLE: dict[str, Any] = {
    "task_id": 1,
    "text": "Write a function to double each element of a list.",
    "code": "def double(numbers):\r\n  return [2 * number for number in numbers] ",
    "test_list": ["assert double([1, 2]) == [2, 4]", "assert double([]) == []", "assert double([-1]) == [-2]"],
    "test_setup_code": "",
}
_AREA: dict[str, Any] = {
    "task_id": 2,
    "prompt": "Write a python function to find the area of a circle. ",
    "code": "import math\ndef area(radius):\n    return math.pi * radius ** 2",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(area(1), 3.14159, rel_tol=0.001)", "assert area(0) == 0"],
}
_MARBLES: dict[str, Any] = {
    "Body": "A bag has 12 red and 5 blue marbles. If Kim takes 3 of the red ones",
    "Question": "How many red marbles are left?",
    "Equation": "( 12.0 - 3.0 )",
    "Answer": 9.0,
    "Type": "Subtraction",
}


@pytest.mark.parametrize(
    ("source", "row", "change", "reason"),
    [
        (_GSM8K, _SOLD, {"question": None}, "column `question` is missing"),
        (_GSM8K, _SOLD, {"answer": "just 5"}, "column `answer` has no `####`"),
        (_GSM8K, _SOLD, {"answer": "#### 1,2"}, 'the final answer "1,2" is not a number'),
        (_MATH, _ADDED, {"level": "hard"}, 'column `level` is "hard", expected a number'),
        (_MATH, _ADDED, {"level": True}, "column `level` is true, expected a number"),
        (_MATH, _ADDED, {"solution": "It is 2."}, r"the solution has no closed \boxed"),
        (_MATH, _ADDED, {"solution": r"It is $\boxed{}$."}, r"the solution has an empty \boxed{}"),
        (_MATH, _ADDED, {"solution": r"$\boxed{1}$ or $\boxed{2"}, "the last box of the solution is never closed"),
        (_MATH500, _ADDED, {}, "column `answer` is missing"),  # the boxes are no substitute
        (_MBPP, _DOUBLE, {"code": "x = '''\n```\n'''"}, "column `code` contains a code fence"),
        (_MBPP, _DOUBLE, {"test_list": []}, "column `test_list` is [], expected a list of Python statements"),
        (_MBPP, _DOUBLE, {"test_list": ["assert f(1) == 2", 3]}, "column `test_list` is 3, expected text"),
        (_MBPP, _DOUBLE, {"test_list": ["assert f(1) > 2"]}, "column `test_list`: line 1 of the tests is "),
        (_MBPP, _DOUBLE, {"test_setup_code": "root = Node(1)"}, "column `test_setup_code` does more than import"),
        (_MBPP, _DOUBLE, {"test_setup_code": "import"}, "`test_setup_code` are not valid Python: invalid syntax"),
        (_MBPP, _AREA, {"test_list": ["assert area(math.pi) == 2"]}, "the tests call math, which they import; they"),
        (_SVAMP, _MARBLES, {"Equation": None}, "column `Equation` is missing"),
    ],
)
def test_malformed_row_is_named(source: FileSource, row: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    """Each names the column and its content, or what would be accepted; an answer is never guessed."""
    with pytest.raises(MalformedRowError) as refused:
        source.read_row(row | change)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("final", "answer"), [("-1,234,567", "-1234567"), ("2.5", "2.5"), ("Step 1\n#### 66", "66")])
def test_answer_of_gsm8k_is_the_number_after_the_last_mark(final: str, answer: str) -> None:
    """Thousands commas go, signs and decimals stay, and the solution is kept to the letter."""
    solution = f"She sold 48/2 = <<48/2=24>>24 clips, 1,000 in all.\n#### {final}"
    fields = _GSM8K.read_row({"question": "How many?", "answer": solution})
    assert fields == Fields("How many?", solution, answer, "", None)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"Thus $x = \boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"Our answer is $\boxed 2$.", "2"),
        (r"Our answer is $\fbox{2}$.", "2"),
        (r"It is $\boxed{\frac{11}{2}}$. Alternatively, $\frac{8+3}{2} = \boxed{5.5}$.", "5.5"),
        (r"It is $\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$.", r"\frac{639}{40}"),
        ("So $x = \\boxed{4}$.\n\nThen $y = \\boxed{-1}$.", "4, -1"),
        (r"They are $\boxed{(1,2)}$ and $\boxed{(3,4)}$, so $\boxed{(1,2)}$ and $\boxed{(3,4)}$.", "(1,2), (3,4)"),
        ("We find $d = \\boxed{-7}$.\n\nNote: $\\boxed{7}$ is also accepted as an answer.", "-7"),
        (r"We find $d = \boxed{-7}$. (Also accepted: $\boxed{7}$.)", "-7"),
        (r"We find $d = \boxed{-7}$. $\boxed{7}$ would be acceptable.", "-7"),
        # The first box is never a remark, and a remark does not reach into another paragraph.
        (r"The number of accepted students is $\boxed{5}$.", "5"),
        ("All are accepted.\n\n$a = \\boxed{5}$\n\n$b = \\boxed{6}$", "5, 6"),
    ],
)
def test_answer_of_math_is_read_from_the_boxes(solution: str, answer: str) -> None:
    """One answer in its last form; parts joined without repetition; other accepted answers left out."""
    assert boxed_answer(solution) == answer


def test_columns_of_both_published_layouts_of_math_are_read() -> None:
    """The subject is `subject` or `type`, a level text, a number or unknown; an answer column counts before boxes."""
    assert _MATH.read_row(_ADDED).subject == "Algebra"
    assert _MATH.read_row(_ADDED | {"subject": "Geometry"}).subject == "Geometry"
    assert _MATH.read_row(_ADDED | {"answer": r" \frac{4}{2} "}).answer == r"\frac{4}{2}"
    for level, expected in (("Level 5", 5), (3, 3), (3.0, 3), ("4", 4), ("Level ?", None)):
        assert _MATH.read_row(_ADDED | {"level": level}).level == expected


@pytest.mark.skipif(not _PUBLISHED.is_dir(), reason="the published files are not here")
def test_boxes_agree_with_the_published_answers_of_math500() -> None:
    """On all 500 rows, the boxes of the solution give the answer that the authors wrote down."""
    rows = [json.loads(line) for line in (_PUBLISHED / "math500.jsonl").read_text(encoding="utf-8").splitlines()]
    differing = [row for row in rows if boxed_answer(row["solution"]) != _MATH500.read_row(row).answer]
    assert (len(rows), [row["unique_id"] for row in differing]) == (500, [])


def test_row_of_mbpp_becomes_a_problem_with_its_tests_as_answer() -> None:
    """The question shows the first test alone; the solution is a block of code; the answer is all tests."""
    assert _MBPP.read_row(_DOUBLE) == Fields(
        question="Write a function to double each element of a list.\n"
        "Answer with a Python code block that passes tests like:\n"
        "assert double([1, 2]) == [2, 4]",
        solution="```python\ndef double(numbers):\n  return [2 * number for number in numbers]\n```",
        answer="assert double([1, 2]) == [2, 4]\nassert double([]) == []\nassert double([-1]) == [-2]",
    )


@pytest.mark.parametrize("row", [_DOUBLE, _AREA])
def test_prepared_solution_passes_the_prepared_tests(row: dict[str, Any]) -> None:
    """The parts of a row fit together as the grader sees them, and returning the value that is shown is not enough."""
    fields = _MBPP.read_row(row)
    assert is_unit_tests(fields.answer)
    assert grade_code(fields.answer, fields.solution).verdict == Verdict.RIGHT
    repeated = "```python\ndef double(numbers):\n    return [2, 4]\ndef area(radius):\n    return 3.14159\n```"
    assert grade_code(fields.answer, repeated).verdict == Verdict.WRONG


def test_a_row_of_svamp_becomes_a_question_with_its_equation_as_solution() -> None:
    """The body ends in a full stop, whole numbers lose their decimals, and outer brackets go."""
    told = "A bag has 12 red and 5 blue marbles. If Kim takes 3 of the red ones. How many red marbles are left?"
    assert _SVAMP.read_row(_MARBLES) == Fields(told, "12 - 3 = 9\n#### 9", "9", "Subtraction")
    changes = {"Equation": "( ( 12.0 - 3.0 ) / 4.5 )", "Answer": 2.0, "Type": "Common-Divison"}
    two_steps = _SVAMP.read_row(_MARBLES | changes)
    assert (two_steps.solution, two_steps.subject) == ("(12 - 3) / 4.5 = 2\n#### 2", "Common-Division")


@pytest.mark.skipif(not _PUBLISHED.is_dir(), reason="the published files are not here")
def test_every_published_problem_of_svamp_is_read_and_solved_by_its_solution() -> None:
    """The equation of each gives its answer, but for one, of which the published answer is wrong."""
    source = SVAMP(kind="svamp", train=_PUBLISHED / "svamp.json")
    problems = [each for each in source.read(Split.TRAIN, Path()) if isinstance(each, Problem)]
    assert len(problems) == 1000
    wrong = []
    for problem in problems:
        calculation, answer = problem.solution.splitlines()[0].split(" = ")
        assert problem.answer == answer
        if eval(calculation) != pytest.approx(float(answer)):
            wrong.append(problem.id)
    assert wrong == ["svamp/train/00679"]
