"""Answers that are code, graded by unit tests: Python asserts that compare a call with a value written beside it.

Only the calls enter the sandbox. The values stay here, and are compared here: code under test can neither find out
what is expected nor report its own success. So a call must not contain a comparison, which would hold the value.
"""

import ast
import builtins
import json
import math
import operator
import re
import textwrap
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from components.grading.answer import outside_thoughts
from components.grading.grade import Grade, Verdict
from components.grading.sandbox.child import encode
from components.grading.sandbox.run import Failed, Outcome, Returned, decode, run
from components.shared.errors import PipelineError

_MAX_TESTS_CHARACTERS = 2**16
_MAX_CODE_CHARACTERS = 50_000
_MAX_EXTRACTED_CHARACTERS = 2_000
_MAX_SHOWN_CHARACTERS = 80
_ACCEPTED = (
    "`assert CALL == VALUE`, `assert CALL is True` (or False or None), `assert CALL`, `assert not CALL`, "
    "`assert math.isclose(CALL, NUMBER)` or `assert abs(CALL - NUMBER) < NUMBER`, where the call compares nothing and "
    "the value is written out"
)


class UnreadableTestsError(ValueError):
    """Tests in another form than the accepted ones; the message says which line, and what is accepted."""


class UnitTest(NamedTuple):
    """A call, and a check of the value that it returns."""

    call: str
    """A Python expression."""
    accepts: Callable[[object], bool]
    """By Python's `==`, for which 1, 1.0 and True are equal, unless the test says otherwise."""


def grade_code(gold: str, response: str) -> Grade:
    """Return whether the code of `response` passes all unit tests of `gold`, and what fraction of them it passes."""
    try:
        tests = read_tests(gold)
    except UnreadableTestsError as error:
        return Grade(Verdict.UNSCORABLE, None, str(error))
    code = last_code_block(outside_thoughts(response))
    if code is None:
        return Grade(Verdict.WRONG, None, "no code block", 0.0)
    extracted = code[:_MAX_EXTRACTED_CHARACTERS]
    if len(code) > _MAX_CODE_CHARACTERS:
        return Grade(Verdict.WRONG, extracted, f"code is longer than {_MAX_CODE_CHARACTERS} characters", 0.0)
    try:
        outcomes = run(code, [test.call for test in tests])
    except PipelineError as error:
        return Grade(Verdict.UNSCORABLE, extracted, str(error))
    failures = [
        f"{_in_one_line(test.call)} {_described(outcome)}"
        for test, outcome in zip(tests, outcomes, strict=True)
        if not (isinstance(outcome, Returned) and test.accepts(outcome.value))
    ]
    num_passed = len(tests) - len(failures)
    reason = "; ".join([f"{num_passed} of {len(tests)} tests passed", *failures[:1]])
    return Grade(Verdict.WRONG if failures else Verdict.RIGHT, extracted, reason, num_passed / len(tests))


def _described(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        return _in_one_line(outcome.reason)
    try:
        return f"returned {_in_one_line(repr(outcome.value))}"
    except ValueError:  # Python refuses to write a number of more than some thousand digits
        return "returned a very long number"


def _in_one_line(text: str) -> str:
    """The beginning of a text, without characters that break a line or a terminal."""
    shown = "".join(character if character.isprintable() else " " for character in text[:_MAX_SHOWN_CHARACTERS])
    return shown if len(text) <= _MAX_SHOWN_CHARACTERS else f"{shown}..."


_FENCE = re.compile(r"[ \t]*```([^`]*)")
_PYTHON = frozenset({"python", "python3", "py"})
_UNLABELED = frozenset({""})


def last_code_block(text: str) -> str | None:
    """Return the last fenced block labeled as Python or, where there is none, the last block without a label.

    None where there is neither. The label counts first, since a block after the code without one is often its output.
    A block that is never closed does not count.
    """
    blocks: list[tuple[str, list[str]]] = []
    label: str | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        info = fence[1].strip().lower() if fence else ""
        if fence and label is None:
            label, lines = info, []
        elif fence and label is not None and not info:
            blocks.append((label, lines))
            label = None
        elif label is not None:
            lines.append(line)
    by_label = [lines for labels in (_UNLABELED, _PYTHON) for label, lines in blocks if label in labels]
    return textwrap.dedent("\n".join(by_label[-1])) if by_label else None


def read_tests(gold: str) -> list[UnitTest]:
    """Return the tests in their order; UnreadableTestsError where one is not in an accepted form."""
    if len(gold) > _MAX_TESTS_CHARACTERS:
        raise UnreadableTestsError(f"the tests are longer than {_MAX_TESTS_CHARACTERS} characters")
    try:
        statements = ast.parse(gold).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTestsError(f"the tests are not Python: {error}") from None
    return [_read_statement(statement) for statement in statements]


def _read_statement(statement: ast.stmt) -> UnitTest:
    try:
        if isinstance(statement, ast.Assert):
            return _read_condition(statement.test)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # a value that is not a literal
        pass
    raise UnreadableTestsError(f"line {statement.lineno} of the tests is none of {_ACCEPTED}")


def _read_condition(condition: ast.expr) -> UnitTest:
    match condition:
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), value)]), [ast.Lt()], [tolerance]):
            return UnitTest(_source(call), _close_to(value, {"rel_tol": 0.0, "abs_tol": _number(tolerance)}))
        case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [call, value], keywords):
            tolerances = {str(keyword.arg): _number(keyword.value) for keyword in keywords}
            return UnitTest(_source(call), _close_to(value, tolerances))
        case ast.Compare(call, [ast.Eq()], [value]):
            return UnitTest(_source(call), partial(operator.eq, _value(value)))
        case ast.Compare(call, [ast.Is()], [ast.Constant(None | True | False as value)]):
            return UnitTest(_source(call), partial(operator.is_, value))
        case ast.UnaryOp(ast.Not(), ast.Call(ast.Name(name)) as call) if not hasattr(builtins, name):
            return UnitTest(_source(call), partial(operator.is_, False))
        case ast.Call(ast.Name(name)) if not hasattr(builtins, name):
            return UnitTest(_source(condition), partial(operator.is_, True))
    raise ValueError


def _source(call: ast.expr) -> str:
    """The expression for the sandbox; ValueError where it calls nothing or compares outside of a lambda."""
    nodes = list(ast.walk(call))
    arguments = [inner for node in nodes if isinstance(node, ast.Lambda) for inner in ast.walk(node)]
    calls = any(isinstance(node, ast.Call) for node in nodes)
    compares = any(isinstance(node, ast.Compare) and node not in arguments for node in nodes)
    if not isinstance(call, ast.Call | ast.Subscript | ast.Attribute) or not calls or compares:
        raise ValueError
    return ast.unparse(call)


def _value(written: ast.expr) -> object:
    match written:
        case ast.Call(ast.Name("set" | "frozenset" as kind), [elements], []):
            value: object = {"set": set, "frozenset": frozenset}[kind](ast.literal_eval(elements))
        case _:
            value = ast.literal_eval(written)
    if decode(json.loads(encode(value))) != value:
        raise ValueError  # no code could return it either
    return value


def _number(written: ast.expr) -> float:
    value = ast.literal_eval(written)
    if not isinstance(value, int | float):
        raise ValueError
    return value


def _close_to(written: ast.expr, tolerances: dict[str, float]) -> Callable[[object], bool]:
    number = _number(written)
    math.isclose(number, number, **tolerances)  # raises for tolerances that cannot be used

    def accepts(value: object) -> bool:
        try:
            return isinstance(value, int | float) and math.isclose(value, number, **tolerances)
        except OverflowError:  # an integer beyond every float
            return False

    return accepts
