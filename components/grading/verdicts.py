"""Submissions, grades and the closed list of reasons for verdicts, which are counted over many responses."""

from dataclasses import dataclass
from enum import StrEnum

from components.shared.answer_policy import AnswerPolicy


class Reason(StrEnum):
    """The rule that decided a verdict.

    Details of one response, such as the two units that differ, are in `Grade.detail`.
    """

    rule: str
    """The rule in a sentence."""

    def __new__(cls, phrase: str, rule: str = "") -> "Reason":
        """Make a member whose value is the phrase."""
        member = str.__new__(cls, phrase)
        member._value_ = phrase
        member.rule = rule
        return member

    # There is no answer, or it is in a form that is never right.
    NO_ANSWER = "no final answer", "The response states no answer where the grader looks for one."
    TRUNCATED = "truncated at the length limit", "The response was cut off, so its last words may not be its answer."
    TOO_LONG = "too long", "The text is too long for an answer."
    SEVERAL_ANSWERS = "several answers", "The answer offers alternatives, or lists things without choosing one."
    NOT_UNDERSTOOD = "text that is not understood", "The answer contains unknown notation."
    COSTLY = "too large or too deep to compute", "The answer would take too long to read or to evaluate."
    HIDDEN = "hidden parts", "A part of the answer is invisible, struck out or a LaTeX definition."

    # The answer leaves work undone.
    ECHO = "echoes the question", "The answer repeats an expression of the question, and is not in the expected form."
    SETUP = "left to be evaluated", "The answer puts numbers together and leaves their value to be computed."
    NOT_EVALUATED = "still to be evaluated", "The answer contains the sum, integral or limit that is asked for."
    NOT_SOLVED = "still to be solved", "The answer is an equation or inequality where its solution is expected."

    # The same.
    SAME_TEXT = "same text", "The answer is the expected one, letter by letter."
    SAME_NOTATION = "same text in another notation", "The two are the same text once both are in the same notation."
    SAME_NUMBER = "same number", "Both are numbers, and they are equal, or one is the other rounded to a decimal."
    SAME_VALUE = "same value", "Both have the same value for all values of their variables."
    SAME_PARTS = "same parts", "Both have the same values, in the same order where brackets require one."
    SAME_RELATION = "same relation", "The two equations, inequalities or regions have the same solutions."
    SAME_WORDS = "same words", "Both are the same words, or name the same choice."
    SAME_TESTS = "all tests passed", "The code returns what each unit test expects."

    # Different.
    OTHER_NUMBER = "different number", "Both are numbers, and their values or units differ."
    OTHER_VALUE = "different value", "Their values differ, for some values of their variables at least."
    OTHER_PARTS = "different parts", "The parts differ in a value, a name, their number, their order or the brackets."
    OTHER_RELATION = "different relation", "The two equations, inequalities or regions have different solutions."
    OTHER_WORDS = "different words", "The words differ, or the answer names another choice."
    OTHER_KIND = "different kinds of answers", "The answer is of a different kind from the expected one."
    UNIT = "unit", "The answer and the expected one have units of different kinds."
    FAILED_TESTS = "failed tests", "The code fails, or returns a value that a unit test does not expect."
    NO_CODE = "no code block", "The response has no code that could be run on the unit tests."

    # No verdict is possible.
    TIME = "time", "Comparing the answer took longer than the deadline."
    MEMORY = "memory", "Comparing the answer took too much memory."
    CRASH = "crash", "The grader ended without a verdict."
    FAILED = "comparison failed", "A library failed on this answer."
    NO_GOLD = "the expected answer is empty", "There is nothing to compare with."
    UNREADABLE_GOLD = "the expected answer cannot be read", "It is neither mathematics nor words that are understood."
    UNREADABLE_TESTS = "the unit tests cannot be read", "The unit tests are not in a form that is understood."
    NO_SANDBOX = "no sandbox", "Code runs in a sandbox only, and this machine has none."
    ENVIRONMENT = "environment", "The model's environment failed, so the response is incomplete."


@dataclass(frozen=True, slots=True)
class Submission:
    """A response to be graded, and its expected answer."""

    gold: str
    response: str
    policy: AnswerPolicy
    """Where the response has to state its final answer."""
    question: str = ""
    """The question, so that an echo of it does not count as an answer; empty if it is not known."""


class Verdict(StrEnum):
    """The verdict on a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNSCORABLE = "unscorable"
    """No verdict is possible: the expected answer cannot be read, or the comparison did not end."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict, the answer that was compared (None without one), and the reason."""

    verdict: Verdict
    extracted: str | None
    reason: Reason
    tests_passed: float | None = None
    """Fraction of the unit tests that passed; None if the gold is not unit tests."""
    detail: str = ""
    """Details of the reason in this response, such as the two units that differ."""

    @property
    def why(self) -> str:
        """The reason, with its detail."""
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)
