"""Grades of code: what passes, what a reason says, and that nothing but the right values passes."""

import json

import pytest

from components.grading.unit_tests import grade_code, is_unit_tests
from components.grading.verifier import Grade, Verdict

GOLD = "assert add(1, 2) == 3\nassert add(0, 0) == 0\nassert add(-5, 2) == -3\nassert add(10, 5) == 15"
RIGHT = "def add(a, b):\n    return a + b"


def graded(code: str, gold: str = GOLD) -> Grade:
    """The grade of a response that consists of code."""
    return grade_code(gold, f"I add them.\n```python\n{code}\n```")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("assert f(1) == 2", True),
        ("\n  assert f(1) == 2\nassert f(2) == 3", True),
        ("# tests\n\n# of f\nassert f(1) == 2", True),
        ("assert", True),
        ("assert f(1) ==", True),
        ("assertion", False),
        ("asserted = 1", False),
        ("72", False),
        ("", False),
        ("# assert f(1) == 2", False),
        (r"\frac{1}{2}", False),
        ("x = 1\nassert f(1) == 2", False),
    ],
)
def test_an_answer_that_begins_with_an_assert_is_tests(gold: str, answer: bool) -> None:
    """Broken tests are tests too, so that they are reported and not compared as mathematics."""
    assert is_unit_tests(gold) is answer


def test_code_that_passes_all_tests_is_right() -> None:
    """The grade carries the code and the share of the tests."""
    assert graded(RIGHT) == Grade(Verdict.RIGHT, RIGHT, "4 of 4 tests passed", tests_passed=1.0)


@pytest.mark.parametrize(
    ("code", "passed", "failure"),
    [
        ("def add(a, b):\n    return a - b", 1, "add(1, 2) gave -1"),
        ("def add(a, b):\n    return a + b if b else 1 / 0", 3, "add(0, 0) raised ZeroDivisionError: division by zero"),
        ("def add(a, b):\n    return max(a, 0) + b", 3, "add(-5, 2) gave 2"),
        ("def plus(a, b):\n    return a + b", 0, "add(1, 2) raised NameError: name 'add' is not defined"),
        (
            "def add(a):\n    return a",
            0,
            "add(1, 2) raised TypeError: add() takes 1 positional argument",
        ),
        (
            "def add(a, b)\n    return a",
            0,
            "add(1, 2) could not be called: SyntaxError: expected ':' (solution.py",
        ),
        ("import numpy", 0, "add(1, 2) could not be called: ModuleNotFoundError: No module named 'numpy'"),
        ("def add(a, b):\n    return str(a + b)", 0, "add(1, 2) gave '3'"),
        ("def add(a, b):\n    return [a + b] * 10**4", 0, "add(1, 2) gave [3, 3, 3"),
        ("def add(a, b):\n    return 10**9999", 0, "add(1, 2) gave a very long number"),
        ("def add(a, b):\n    return float('nan')", 0, "add(1, 2) gave nan"),
        ("def add(a, b):\n    return", 0, "add(1, 2) gave None"),
        ("raise ValueError('\\x1b[31m\\nred\\u202e')", 0, "add(1, 2) could not be called: ValueError:  [31m red"),
        ("import os\nos._exit(0)", 0, "add(1, 2) was not finished: it ended with status 0"),
    ],
)
def test_a_reason_counts_the_tests_and_tells_of_the_first_that_failed(code: str, passed: int, failure: str) -> None:
    """It is one short line of printable characters, and the share is of all tests."""
    grade = graded(code)
    assert (grade.verdict, grade.extracted, grade.tests_passed) == (Verdict.WRONG, code, passed / 4)
    assert grade.reason.startswith(f"{passed} of 4 tests passed; {failure}")
    assert grade.reason.isprintable()
    assert len(grade.reason) < 250


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("The sum is 3.", "no code block"),
        (RIGHT, "no code block"),
        (f"<think>\n```python\n{RIGHT}\n```\n</think>\nDone.", "no code block"),
        (f"```python\n{RIGHT}", "no code block"),
        (f"```python\n{RIGHT}\n#{'x' * 60_000}\n```", "code is longer than 50000 characters"),
    ],
)
def test_without_usable_code_a_response_is_wrong(response: str, reason: str) -> None:
    """No test is passed by it; code in a thought is no answer."""
    grade = grade_code(GOLD, response)
    assert (grade.verdict, grade.reason, grade.tests_passed) == (Verdict.WRONG, reason, 0.0)
    assert grade.extracted is None or len(grade.extracted) <= 2_000


def test_the_last_code_outside_thoughts_counts() -> None:
    """What is tried in a thought is not what is answered."""
    wrong = "def add(a, b):\n    return 0"
    assert grade_code(GOLD, f"<think>```python\n{wrong}\n```</think>\n```python\n{RIGHT}\n```").verdict == Verdict.RIGHT
    assert grade_code(GOLD, f"```python\n{RIGHT}\n```\nor\n```python\n{wrong}\n```").verdict == Verdict.WRONG


@pytest.mark.parametrize("gold", ["assert add(1, 2) > 2", "assert add(1, 2) ==", "assert add(1, 2) == 3\nx = 1"])
def test_tests_that_cannot_be_read_are_nobodys_fault(gold: str) -> None:
    """The response is unscorable, and no share of tests is made up."""
    grade = graded(RIGHT, gold)
    assert (grade.verdict, grade.tests_passed) == (Verdict.UNSCORABLE, None)
    assert grade.reason.startswith(("line ", "the tests are no Python"))


CHEATS = {
    "an equal to everything": """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def add(a, b): return Anything()
""",
    "a number equal to everything": """
class Number(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __index__(self): return 3
def add(a, b): return Number(99)
""",
    "a class that says it is a number": """
class Liar:
    __class__ = int
    def __eq__(self, other): return True
def add(a, b): return Liar()
""",
    "an early exit": "import sys\nsys.exit(0)",
    "a hard exit": "import os\nos._exit(0)",
    "an exit within": "import os\ndef add(a, b): os._exit(0)",
    "other built-ins": """
import builtins
builtins.AssertionError = builtins.BaseException = object
builtins.eval = lambda *arguments: True
builtins.isinstance = builtins.type = lambda *arguments: True
def add(a, b): return None
""",
    "another harness": """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("components") or name == "__main__":
        for attribute in list(vars(module)):
            if not attribute.startswith("__"):
                setattr(module, attribute, lambda *arguments, **named: "true")
def add(a, b): return None
""",
    "every frame and object": """
import gc, sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name, value in frame.f_locals.items():
            if isinstance(value, (list, tuple)) and value and value[0] == "add(1, 2)":
                raise SystemExit(str(value))
        frame = frame.f_back
    return [each for each in gc.get_objects() if isinstance(each, dict) and "expected" in each]
""",
    "the request": """
import os
os.lseek(0, 0, os.SEEK_SET)
import marshal, sys
request = marshal.loads(os.read(0, 10**6))
def add(a, b): return [part for part in request if "==" in str(part)]
""",
    "forged lines": """
import os
for kind in ("passed", "right", "ok", "gave"):
    os.write(3, f'["{kind}",true]\\\\n'.encode())
os._exit(0)
""",
    "a forged report": "print('4 of 4 tests passed')\nraise SystemExit('4 of 4 tests passed')",
    "everything at once": "def add(a, b): return set(range(-100, 100))",
    "a generator of guesses": "def add(a, b): yield from range(-100, 100)",
    "the trace": """
import sys
sys.settrace(lambda frame, event, argument: frame.f_locals.update(failure="") or None)
def add(a, b): return NotImplemented
""",
    "the last word": """
import atexit, os
class Last:
    def __del__(self): os.write(3, b'["gave",true]\\\\n' * 4)
last = Last()
atexit.register(os.write, 3, b'["gave",true]\\\\n' * 4)
def add(a, b): raise ValueError
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes_a_test(name: str) -> None:
    """Nothing in the sandbox knows what is expected, and nothing there does the comparison."""
    grade = graded(CHEATS[name])
    assert (grade.verdict, grade.tests_passed) == (Verdict.WRONG, 0.0)


def test_what_is_expected_does_not_enter_the_sandbox() -> None:
    """Code that looks at all of its process finds the calls there, but no expected value."""
    code = """
import gc, os, sys
os.lseek(0, 0, os.SEEK_SET)
request = os.read(0, 10**6)
def find():
    seen = [request, str(sys.argv), str(os.environ), str(sys._current_frames())]
    seen += [repr(each) for each in gc.get_objects() if type(each) in (dict, list, tuple, str)]
    return ["look-here".replace("-", "") in str(seen), "nee-dle".replace("-", "") in str(seen)]
"""
    grade = graded(code, "assert find() == ['needle']\nassert find('lookhere') == 'needle'")
    assert grade.reason == "0 of 2 tests passed; find() gave [True, False]"


def test_a_guess_is_worth_what_it_is() -> None:
    """Answers made up for the calls that are known pass those tests and no others."""
    grade = graded("def add(a, b):\n    return {(1, 2): 3, (0, 0): 0}.get((a, b))")
    assert (grade.verdict, grade.tests_passed) == (Verdict.WRONG, 0.5)


def test_a_grade_can_be_written_down() -> None:
    """Half a surrogate pair in a value or a message does not reach the reason."""
    for code in ("def add(a, b):\n    return '\\ud800'", "raise ValueError('\\ud800')"):
        json.dumps(graded(code).reason, ensure_ascii=False).encode()
