"""The one grader: compares the final answer of a response with the expected one, or runs its code on unit tests."""

import re

from components.grading.comparison import compare
from components.grading.evasion import evasion
from components.grading.extract import final_answer, find_answer
from components.grading.parsing import is_integer, parse
from components.grading.text_rules import Decision, RejectedError
from components.grading.units import read_question
from components.grading.verdicts import Grade, Reason, Verdict
from components.shared.answer_policy import AnswerPolicy

_MAX_ANSWER_CHARACTERS = 300
_UNCLOSED_BOX = re.compile(r"^\\+boxed\s*\{(?=[^{}]*(?:\{[^{}]*\}[^{}]*)*$)")  # in a data set that cut its end off
_ASSERT = re.compile(r"(?:\s|#[^\n]*\n)*assert\b")


def is_unit_tests(gold: str) -> bool:
    """Tell whether an expected answer is unit tests: its first statement is an assert."""
    return _ASSERT.match(gold) is not None


def prepare() -> None:
    """Import sympy, which takes long, and compare once, so that it builds its internal tables."""
    from components.grading import algebra

    algebra.same_value(r"\sin{x}\cos{x}", r"\frac{\sin{2x}}{2}")
    algebra.same_relation(("y", "3-2x"), ("2x+y", "3"))


def grade(gold: str, response: str, policy: AnswerPolicy, question: str = "") -> Grade:
    """Return the grade of a response: whether its final answer equals `gold`, or its code passes the tests in `gold`.

    A model's text reaches a parser and sympy here, without a limit on time or memory; verifier.py has limits.
    """
    if is_unit_tests(gold):
        from components.grading.unit_tests import grade_code

        return grade_code(gold, response)
    answer = find_answer(response, policy)
    if answer is None:
        return Grade(Verdict.WRONG, None, Reason.NO_ANSWER)
    for form in dict.fromkeys((answer.text, *answer.others)):  # without repetitions
        verdict, reason, detail = _verdict(gold.strip(), form, question)
        if verdict is not Verdict.RIGHT:
            break
    return Grade(verdict, answer.text, reason, detail=detail)


def _verdict(gold: str, answer: str, question: str) -> tuple[Verdict, Reason, str]:
    """The verdict on one form of the final answer, its reason and its detail."""
    if gold == answer and gold:
        return Verdict.RIGHT, Reason.SAME_TEXT, ""
    if len(answer) > _MAX_ANSWER_CHARACTERS:
        return Verdict.WRONG, Reason.TOO_LONG, f"more than {_MAX_ANSWER_CHARACTERS} characters"
    try:
        equal, reason, detail = _compared(gold, answer, question)
        return Verdict.RIGHT if equal else Verdict.WRONG, reason, detail
    except RejectedError as rejected:
        is_fault_of_gold = rejected.reason in {Reason.NO_GOLD, Reason.UNREADABLE_GOLD}
        return Verdict.UNSCORABLE if is_fault_of_gold else Verdict.WRONG, rejected.reason, ""
    except MemoryError:
        raise
    except Exception as error:  # the parser and sympy may fail in any way on a model's text
        return Verdict.UNSCORABLE, Reason.FAILED, type(error).__name__


def _compared(gold: str, answer: str, question: str) -> Decision:
    """Whether the answer equals the expected one and does not evade the question."""
    may_be_solution = any(mark in gold for mark in ("box", "####", "answer")) or len(gold) > _MAX_ANSWER_CHARACTERS
    if may_be_solution:
        gold = final_answer(_UNCLOSED_BOX.sub("", gold), AnswerPolicy.STATED) or gold
    if is_integer(gold) and is_integer(answer):
        return Decision.on("number", int(gold) == int(answer))  # ten times as fast as the general case
    context = read_question(question, gold)
    expected, actual = parse(gold, context), parse(answer, context)
    decision = compare(expected, actual)
    if decision.equal and (evaded := evasion(question, expected, actual)):
        return Decision(False, evaded)
    return decision
