"""Grading of code by unit tests: Python asserts that compare a call with a literal value.

Only the calls enter the sandbox. The expected values stay here and are compared here, so the code under test can
neither find them out nor report its own success. A call must not contain a comparison, which could reveal the value.
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

from components.grading.extract import outside_thoughts
from components.grading.sandbox.child import encode
from components.grading.sandbox.run import Failed, Outcome, Returned, decode, run
from components.grading.verdicts import Grade, Reason, Verdict
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
    """A test is not in an accepted form; the message names the line and the accepted forms."""


class UnitTest(NamedTuple):
    """A call, and a check of its value."""

    call: str
    """A Python expression."""
    accepts: Callable[[object], bool]
    """Whether the value is right; for a test with `==` by Python's `==`, so 1, 1.0 and True are equal."""


def grade_code(gold: str, response: str) -> Grade:
    """Return the grade of the code in `response` by the unit tests in `gold`, with the fraction that it passes."""
    try:
        tests = read_tests(gold)
    except UnreadableTestsError as error:
        return Grade(Verdict.UNSCORABLE, None, Reason.UNREADABLE_TESTS, detail=str(error))
    code = last_code_block(outside_thoughts(response))
    if code is None:
        return Grade(Verdict.WRONG, None, Reason.NO_CODE, 0.0)
    extracted = code[:_MAX_EXTRACTED_CHARACTERS]
    if len(code) > _MAX_CODE_CHARACTERS:
        return Grade(Verdict.WRONG, extracted, Reason.TOO_LONG, 0.0, f"more than {_MAX_CODE_CHARACTERS} characters")
    try:
        outcomes = run(code, [test.call for test in tests])
    except PipelineError as error:
        return Grade(Verdict.UNSCORABLE, extracted, Reason.NO_SANDBOX, detail=str(error))
    failures = [
        f"{_in_one_line(test.call)} {_described(outcome)}"
        for test, outcome in zip(tests, outcomes, strict=True)
        if not (isinstance(outcome, Returned) and test.accepts(outcome.value))
    ]
    num_passed = len(tests) - len(failures)
    detail = "; ".join([f"{num_passed} of {len(tests)} tests passed", *failures[:1]])
    verdict, reason = (Verdict.WRONG, Reason.FAILED_TESTS) if failures else (Verdict.RIGHT, Reason.SAME_TESTS)
    return Grade(verdict, extracted, reason, num_passed / len(tests), detail)


def _described(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        return _in_one_line(outcome.reason)
    try:
        return f"returned {_in_one_line(repr(outcome.value))}"
    except ValueError:  # Python refuses to print an integer with more than 4,300 digits
        return "returned a very long number"


def _in_one_line(text: str) -> str:
    """The beginning of a text, without characters that break a line or a terminal."""
    shown = "".join(character if character.isprintable() else " " for character in text[:_MAX_SHOWN_CHARACTERS])
    return shown if len(text) <= _MAX_SHOWN_CHARACTERS else f"{shown}..."


_FENCE = re.compile(r"[ \t]*(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)")
_LANGUAGE = re.compile(r"[{.\s]*([^\s{}:,(]*)")
_PYTHON = re.compile(r"py(?:thon)?[0-9.]*|\S+\.py")
_CODE_BEGINS = re.compile(
    r"(?P<indent>[ \t]*)"
    r"(?:(?:async +)?def \w|class \w|import \w|from [\w.]+ import\b|@\w|[A-Za-z_]\w* *(?::[^=]*)?=(?!=))"
)
_MAX_PARSED_CHARACTERS = 500_000  # in all attempts: text that is not Python is parsed again after each error


def last_code_block(text: str) -> str | None:
    """Return the last fenced block labeled as Python or, without such a block, the last one without a label.

    A label counts first, since an unlabeled block after the code is often its output. A fence is closed by one with
    the same character that is at least as long; a block that is never closed does not count. In a text without any
    fence, the code is the last run of lines that is Python and defines a function or class. None without code.
    """
    blocks: list[tuple[str, list[str]]] = []
    opening, label = "", ""
    lines: list[str] = []
    all_lines = text.replace("\r\n", "\n").split("\n")
    for line in all_lines:
        match = _FENCE.fullmatch(line)
        fence, info = (match["fence"], match["info"].strip()) if match else ("", "")
        if fence and not opening:
            opening, label, lines = fence, _language(info), []
        elif opening and fence.startswith(opening) and not info:
            blocks.append((label, lines))
            opening = ""
        elif opening:
            lines.append(line)
    if not blocks and not opening:
        return _code_without_fence(all_lines)
    labeled = [lines for label, lines in blocks if _PYTHON.fullmatch(label)]
    counted = labeled or [lines for label, lines in blocks if not label]
    return textwrap.dedent("\n".join(counted[-1])) if counted else None


def _language(info: str) -> str:
    """The language label after a fence, in lower case: `python` for `python title="x"` and `{.python .numbered}`."""
    match = _LANGUAGE.match(info.lower())
    word = match[1] if match else ""
    return "" if "=" in word or word.startswith("#") else word


def _code_without_fence(lines: list[str]) -> str | None:
    """The last run of lines that is Python and defines a function or class; an indented run follows an empty line."""
    code, end, num_parsed = None, 0, 0
    for start in range(len(lines)):
        if start >= end and num_parsed < _MAX_PARSED_CHARACTERS and _begins_code(lines, start):
            run, end, num_characters = _run_of_code(lines, start)
            code = run or code
            num_parsed += num_characters
    return code


def _begins_code(lines: list[str], index: int) -> bool:
    """Whether a line looks like the first one of code."""
    match = _CODE_BEGINS.match(lines[index])
    return match is not None and (not match["indent"] or index == 0 or not lines[index - 1].strip())


def _run_of_code(lines: list[str], start: int) -> tuple[str | None, int, int]:
    """The code from a line on, None if it defines nothing; the line after it; and the number of characters parsed."""
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    end = start + 1
    while end < len(lines) and (lines[end].startswith(indent) or not lines[end].strip()):
        end += 1
    code = [line.removeprefix(indent) for line in lines[start:end]]
    parsed = 0
    while code and parsed < _MAX_PARSED_CHARACTERS:
        text = "\n".join(code)
        parsed += len(text)
        try:
            statements = ast.parse(text).body
        except SyntaxError as error:  # prose follows the code, or the code has an error: try the lines before it
            code = code[: min(error.lineno or 1, len(code)) - 1]
            continue
        except (ValueError, RecursionError, MemoryError):
            break
        if (prose := next(filter(_may_be_prose, statements), None)) is not None:
            code = code[: prose.lineno - 1]
            continue
        defines = any(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for each in statements)
        return text.strip("\n") if defines else None, start + len(code), parsed
    return None, start + 1, parsed


def _may_be_prose(statement: ast.stmt) -> bool:
    """Whether a statement has no effect and so is probably a sentence: `Done` or `Complexity: linear`."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call | ast.Constant | ast.Await)


def read_tests(gold: str) -> list[UnitTest]:
    """Return the tests in their order; raise UnreadableTestsError if one is not in an accepted form."""
    if len(gold) > _MAX_TESTS_CHARACTERS:
        raise UnreadableTestsError(f"the tests are longer than {_MAX_TESTS_CHARACTERS} characters")
    try:
        statements = ast.parse(gold).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTestsError(f"the tests are not Python: {error}") from None
    return [_read_statement(statement) for statement in statements]


def _read_statement(statement: ast.stmt) -> UnitTest:
    """The test that a statement makes; raise UnreadableTestsError if it is not in an accepted form."""
    try:
        if isinstance(statement, ast.Assert):
            return _read_condition(statement.test)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # a value that is not a literal
        pass
    raise UnreadableTestsError(f"line {statement.lineno} of the tests is not in an accepted form: {_ACCEPTED}")


def _read_condition(condition: ast.expr) -> UnitTest:
    """The test that an assert makes; ValueError or TypeError for a condition that is not in an accepted form."""
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
    """The source of a call for the sandbox; ValueError if it calls nothing, or has a comparison outside a lambda."""
    nodes = list(ast.walk(call))
    in_lambdas = [inner for node in nodes if isinstance(node, ast.Lambda) for inner in ast.walk(node)]
    calls = any(isinstance(node, ast.Call) for node in nodes)
    compares = any(isinstance(node, ast.Compare) and node not in in_lambdas for node in nodes)
    if not isinstance(call, ast.Call | ast.Subscript | ast.Attribute) or not calls or compares:
        raise ValueError
    return ast.unparse(call)


def _value(written: ast.expr) -> object:
    """The value of a literal; ValueError for anything else, and for a value that the sandbox cannot send."""
    match written:
        case ast.Call(ast.Name("set" | "frozenset" as kind), [elements], []):
            value: object = {"set": set, "frozenset": frozenset}[kind](ast.literal_eval(elements))
        case _:
            value = ast.literal_eval(written)
    if decode(json.loads(encode(value))) != value:
        raise ValueError
    return value


def _number(written: ast.expr) -> float:
    value = ast.literal_eval(written)
    if not isinstance(value, int | float):
        raise ValueError
    return value


def _close_to(written: ast.expr, tolerances: dict[str, float]) -> Callable[[object], bool]:
    """A check whether a value is a number close to the written one."""
    number = _number(written)
    math.isclose(number, number, **tolerances)  # raises for unknown or negative tolerances

    def accepts(value: object) -> bool:
        try:
            return isinstance(value, int | float) and math.isclose(value, number, **tolerances)
        except OverflowError:  # an integer too large for a float
            return False

    return accepts
