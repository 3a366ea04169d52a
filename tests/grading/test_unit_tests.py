"""Answers that are code: which tests are understood, what passes them, and that nothing but the right values does."""

import json
from typing import Any

import pytest
import yaml

from components.grading.unit_tests import UnitTest, UnreadableTestsError, grade_code, last_code_block, read_tests
from components.grading.verifier import Grade, Reason, Verdict, is_unit_tests
from tests.grading.processes import processor_time
from tests.grading.tables import FOLDER, table

GOLD = "assert add(1, 2) == 3\nassert add(0, 0) == 0\nassert add(-5, 2) == -3\nassert add(10, 5) == 15"
RIGHT = "def add(a, b):\n    return a + b"
CHEATS = yaml.safe_load((FOLDER / "cheats.yaml").read_text(encoding="utf-8"))


def graded(code: str, gold: str = GOLD) -> Grade:
    """The grade of a response that consists of code."""
    return grade_code(gold, f"I add them.\n```python\n{code}\n```")


def only(test: str) -> UnitTest:
    """The one test of a text."""
    (read,) = read_tests(test)
    return read


def test_an_answer_whose_first_statement_is_an_assert_is_unit_tests() -> None:
    """Comments and blank lines may stand before it."""
    tests = [
        "assert f(1) == 2",
        "\n  assert f(1) == 2\nx",
        "# tests\n\n# of f\nassert f(1)",
        "assert",
        "assert f(1) ==",
    ]
    others = ["assertion", "asserted = 1", "72", "", "# assert f(1) == 2", r"\frac{1}{2}", "x = 1\nassert f(1) == 2"]
    assert [gold for gold in tests + others if is_unit_tests(gold)] == tests


@pytest.mark.parametrize(("text", "code"), table("code_blocks.tsv"))
def test_the_code_is_the_last_closed_block(text: str, code: str) -> None:
    """The cases of code_blocks.tsv."""
    assert last_code_block(text) == (None if code == "(none)" else code)
    assert last_code_block("```python\n```") == ""


def test_repeated_fences_take_no_time() -> None:
    """Five thousand of each kind."""
    fenced = ("```python\n", "```\n", "`", "```", "\n", "    ", "```python\nx\n```\n", "~~~\n", "~")
    unfenced = ("def f(", "def f():\n", "x = 1\n", "import this is prose\n", "(", "@", "def f(): pass\nprose\n")
    for piece in fenced + unfenced:
        with processor_time(15):
            last_code_block(piece * 5_000)


@pytest.mark.parametrize(
    ("code", "passed", "failure"),
    [
        ("def add(a, b):\n    return a - b", 1, "add(1, 2) returned -1"),
        ("def add(a, b):\n    return a + b if b else 1 / 0", 3, "add(0, 0) raised ZeroDivisionError: division by zero"),
        ("def plus(a, b):\n    return a + b", 0, "add(1, 2) raised NameError: name 'add' is not defined"),
        ("def add(a, b)\n    return a", 0, "add(1, 2) could not be called: SyntaxError: expected ':' (solution.py"),
        ("def add(a, b):\n    return str(a + b)", 0, "add(1, 2) returned '3'"),
        ("def add(a, b):\n    return [a + b] * 10**4", 0, "add(1, 2) returned [3, 3, 3"),
        ("def add(a, b):\n    return 10**9999", 0, "add(1, 2) returned a very long number"),
        ("raise ValueError('\\x1b[31m\\nred\\u202e')", 0, "add(1, 2) could not be called: ValueError:  [31m red"),
    ],
)
def test_a_reason_counts_the_tests_and_describes_the_first_failure(code: str, passed: int, failure: str) -> None:
    """It is one short line of printable characters that can be encoded, and the fraction is of all tests."""
    assert graded(RIGHT) == Grade(Verdict.RIGHT, RIGHT, Reason.SAME_TESTS, 1.0, "4 of 4 tests passed")
    grade = graded(code)
    assert (grade.verdict, grade.extracted, grade.tests_passed) == (Verdict.WRONG, code, passed / 4)
    assert grade.detail.startswith(f"{passed} of 4 tests passed; {failure}")
    assert grade.detail.isprintable()
    assert len(grade.detail) < 250
    json.dumps(grade.detail, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("The sum is 3.", Reason.NO_CODE),
        (f"<think>\n```python\n{RIGHT}\n```\n</think>\nDone.", Reason.NO_CODE),
        (f"```python\n{RIGHT}\n#{'x' * 60_000}\n```", Reason.TOO_LONG),
    ],
)
def test_without_usable_code_a_response_is_wrong(response: str, reason: Reason) -> None:
    """No test is passed by it; code in a thought is not an answer."""
    grade = grade_code(GOLD, response)
    assert (grade.verdict, grade.reason, grade.tests_passed) == (Verdict.WRONG, reason, 0.0)
    assert grade.extracted is None or len(grade.extracted) <= 2_000


@pytest.mark.parametrize("gold", ["assert add(1, 2) > 2", "assert add(1, 2) ==", "assert add(1, 2) == 3\nx = 1"])
def test_tests_that_cannot_be_read_make_a_response_unscorable(gold: str) -> None:
    """The response is not to blame."""
    grade = graded(RIGHT, gold)
    assert (grade.verdict, grade.tests_passed) == (Verdict.UNSCORABLE, None)
    assert grade.detail.startswith(("line ", "the tests are not Python"))


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes_a_test(name: str) -> None:
    """Nothing in the sandbox knows what is expected, and nothing there does the comparison."""
    grade = graded(CHEATS[name])
    assert (grade.verdict, grade.tests_passed) == (Verdict.WRONG, 0.0)


def test_expected_values_do_not_enter_the_sandbox() -> None:
    """Code that searches all of its process finds the calls there, but no expected value."""
    code = """
import gc, os, sys
os.lseek(0, 0, os.SEEK_SET)
request = os.read(0, 10**6)
def find():
    visible = [request, str(sys.argv), str(os.environ), str(sys._current_frames())]
    visible += [repr(each) for each in gc.get_objects() if type(each) in (dict, list, tuple, str)]
    return ["look-here".replace("-", "") in str(visible), "nee-dle".replace("-", "") in str(visible)]
"""
    grade = graded(code, "assert find() == ['needle']\nassert find('lookhere') == 'needle'")
    assert grade.detail == "0 of 2 tests passed; find() returned [True, False]"


@pytest.mark.parametrize(
    ("test", "call", "accepted", "refused"),
    [
        ("assert f(1, 2) == 3", "f(1, 2)", [3, 3.0], [4, "3", None, [3]]),
        ('assert remove_Occ("hello","l") == "heo"', "remove_Occ('hello', 'l')", ["heo"], ["helo", b"heo", 0]),
        ("assert (f(1)) == (-3)", "f(1)", [-3], [3]),
        ("assert f(1) == 3, 'says why'", "f(1)", [3], [4]),
        ("assert f(1)==True", "f(1)", [True, 1], [False, 2, "True"]),
        ("assert f([1])[0].x == [1, (2, {'a': 0})]", "f([1])[0].x", [[1, (2, {"a": 0})]], [[1, [2, {"a": 0}]]]),
        ("assert set(f(1)) == set([1, 2])", "set(f(1))", [{2, 1}, frozenset({1, 2})], [{1}, [1, 2]]),
        ("assert f(1) == frozenset((1,))", "f(1)", [{1}], [(1,)]),
        ("assert f(1) == set()", "f(1)", [set()], [{}, [], ()]),
        ("assert f(1) == (5.0, -2+3j)", "f(1)", [(5.0, -2 + 3j), (5, complex(-2, 3))], [(5.0, -2)]),
        ("assert f(0.1) == 0.3", "f(0.1)", [0.3], [0.1 + 0.2]),
        ("assert f(lambda x: x > 2) == [3]", "f(lambda x: x > 2)", [[3]], [[2]]),
        ("assert f(1) is None", "f(1)", [None], [0, False]),
        ("assert f(1) is True", "f(1)", [True], [1, 1.0, "yes"]),
        ("assert f(1)", "f(1)", [True], [1, "yes", [0], False, None]),
        ("assert not f(1)", "f(1)", [False], [0, "", None, True]),
        ("assert math.isclose(f(1), 3.0)", "f(1)", [3.0, 3, 3 + 1e-12], [3.001, "3", None, [3.0], 3j, 10**400]),
        ("assert math.isclose(f(1), 100, rel_tol=0.01)", "f(1)", [99.5, 101], [98, float("nan"), float("inf")]),
        ("assert math.isclose(f(1), 0, abs_tol=1e-3, rel_tol=0)", "f(1)", [1e-3, -1e-4], [0.002]),
        ("assert abs(f(1) - 2.5) < 0.1", "f(1)", [2.5, 2.55], [2.7, None, float("nan"), 10**400]),
        ("assert abs(f(1) - 1e12) < 0.1", "f(1)", [1e12], [1e12 + 100]),
        ("assert abs(f(1)) == 2", "abs(f(1))", [2], [-2]),
    ],
)
def test_a_test_is_a_call_and_what_it_accepts(test: str, call: str, accepted: list[Any], refused: list[Any]) -> None:
    """Values are compared by Python's `==` unless the test names identity or a tolerance."""
    read = only(test)
    assert read.call == call
    assert [value for value in accepted if not read.accepts(value)] == []
    assert [value for value in refused if read.accepts(value)] == []


UNREADABLE = """
x = 1
f(1) == 2
assert f(1) > 3
assert f(1) in (1, 2)
assert f(1) == g(1)
assert f(1) == [2 * 3]
assert f(1) == 2 and f(2) == 3
assert 3 == f(1)
assert (f(1) == 3) == True
assert all(f(n) == n for n in range(5)) == True
assert (f(1), f(2)) == (1, 2)
assert not any(f(1))
assert np.allclose(f(1), [1, 2])
assert math.isclose(f(1), 3, rel_tol=-1)
assert math.isclose(f(1), '3')
assert abs(f(1) - 3) < x
assert abs(3 - f(1)) < 1
assert f(1) is not None
assert f(1) == set(range(3))
"""


@pytest.mark.parametrize(
    "test",
    [*UNREADABLE.strip().split("\n"), "assert f(1) == " + "[" * 60 + "]" * 60, f"assert f(1) == {set(range(2000))}"],
)
def test_any_other_form_is_refused_with_its_line(test: str) -> None:
    """The message says which line it is and what would be accepted."""
    message = r"line 2 of the tests is not in an accepted form: `assert CALL == VALUE`, .* written out"
    with pytest.raises(UnreadableTestsError, match=message):
        read_tests(f"assert f(1) == 1\n{test}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("assert f(1) ==", r"the tests are not Python: invalid syntax \(.*line 1\)"),
        ("assert f(1) == 1\n  assert f(2) == 2", "the tests are not Python: unexpected indent"),
        ("assert f(1) == '\0'", "the tests are not Python"),
        ("assert f(1) == " + "[" * 5000 + "]" * 5000, "the tests are not Python: too many nested parentheses"),
        ("assert f(1) == " + "-" * 50_000 + "1", "the tests are not Python"),
        (f"assert f(1) == {'x' * 70_000!r}", "the tests are longer than 65536 characters"),
    ],
)
def test_text_that_is_not_python_is_refused(text: str, message: str) -> None:
    """Neither broken nor enormous text raises anything else."""
    with pytest.raises(UnreadableTestsError, match=message):
        read_tests(text)
