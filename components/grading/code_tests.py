"""The grade of a response that is code: how many of a problem's unit tests it passes, in a sandbox."""

import re

from components.grading.answer import outside_thoughts
from components.grading.code_block import last_code_block
from components.grading.sandbox.run import Failed, Gave, Outcome, run
from components.grading.unit_tests import UnitTest, UnreadableTestsError, read_tests
from components.grading.verdict import Grade, Verdict
from components.shared.errors import PipelineError

_ASSERT = re.compile(r"(?:\s|#[^\n]*\n)*assert\b")
_MAX_CODE_CHARACTERS = 50_000
_MAX_EXTRACTED_CHARACTERS = 2_000
_MAX_SHOWN_CHARACTERS = 80


def is_tests(gold: str) -> bool:
    """Tell whether an expected answer is unit tests: its first statement is an assert."""
    return _ASSERT.match(gold) is not None


def grade_code(gold: str, response: str) -> Grade:
    """Return whether the code of `response` passes all unit tests of `gold`, and what share of them it passes."""
    try:
        tests = read_tests(gold)
    except UnreadableTestsError as error:
        return Grade(Verdict.UNSCORABLE, None, str(error))
    code = last_code_block(outside_thoughts(response))
    if code is None:
        return Grade(Verdict.WRONG, None, "no code block", tests_passed=0.0)
    extracted = code[:_MAX_EXTRACTED_CHARACTERS]
    if len(code) > _MAX_CODE_CHARACTERS:
        reason = f"code is longer than {_MAX_CODE_CHARACTERS} characters"
        return Grade(Verdict.WRONG, extracted, reason, tests_passed=0.0)
    try:
        outcomes = run(code, [test.call for test in tests])
    except PipelineError as error:
        return Grade(Verdict.UNSCORABLE, extracted, str(error))
    return _grade(tests, outcomes, extracted)


def _grade(tests: list[UnitTest], outcomes: list[Outcome], extracted: str) -> Grade:
    failures = [
        f"{_in_one_line(test.call)} {_what_happened(outcome)}"
        for test, outcome in zip(tests, outcomes, strict=True)
        if not (isinstance(outcome, Gave) and test.accepts(outcome.value))
    ]
    num_passed = len(tests) - len(failures)
    reason = "; ".join([f"{num_passed} of {len(tests)} tests passed", *failures[:1]])
    verdict = Verdict.WRONG if failures else Verdict.RIGHT
    return Grade(verdict, extracted, reason, tests_passed=num_passed / len(tests))


def _what_happened(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        return _in_one_line(outcome.reason)
    try:
        return f"gave {_in_one_line(repr(outcome.value))}"
    except ValueError:  # Python writes out no number of more than some thousand digits
        return "gave a very long number"


def _in_one_line(text: str) -> str:
    """The beginning of a text, without what would break a line or a terminal."""
    shown = "".join(character if character.isprintable() else " " for character in text[:_MAX_SHOWN_CHARACTERS])
    return shown if len(text) <= _MAX_SHOWN_CHARACTERS else f"{shown}..."
