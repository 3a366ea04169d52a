"""What is graded, the verdict, and why: a closed list of short phrases, which are counted over many responses."""

from dataclasses import dataclass
from enum import StrEnum

from components.shared.answer_policy import AnswerPolicy


class Reason(StrEnum):
    """The rule that decided a verdict; two graders that know the same rules count the same phrases.

    What is particular to one response, such as the two units that differ, is the detail of its grade.
    """

    rule: str
    """The rule in a sentence, for a person who asks why."""

    def __new__(cls, phrase: str, rule: str) -> "Reason":
        """Return a reason, of which the phrase is the value."""
        member = str.__new__(cls, phrase)
        member._value_ = phrase
        member.rule = rule
        return member

    @classmethod
    def of(cls, phrase: str) -> "Reason":
        """Return the reason with this phrase."""
        return cls._value2member_map_.get(phrase, cls.OTHER)  # type: ignore[return-value]

    # Where the answer stands, and whether it is one.
    NO_ANSWER = "no final answer", "The response states no answer where its policy looks for one."
    TRUNCATED = "truncated at the length limit", "The response was cut off, and what it ends in may not be its answer."
    TOO_LONG = "too long", "No answer is that long."
    SEVERAL_BOXES = "several boxes in one answer", "One box holds other boxes, and it is unclear which one counts."
    SEVERAL_ANSWERS = "several answers", "The answer offers alternatives, of which at most one is right."
    NOT_UNDERSTOOD = "text that is not understood", "The answer has something in it that is no known notation."
    NESTED = "brackets nested too deeply", "No answer needs that many brackets within one another."
    ROW = "a row of numbers, signs or words", "The answer lists things without saying which of them it is."
    COSTLY = "a number that is too large to compute", "The answer would take too long to evaluate."
    HIDDEN = (
        "an answer with parts that are not printed or not meant",
        "A part of the answer is invisible, struck out or a definition.",
    )

    # What is left to do.
    ECHO = "echoes the question", "The answer is an expression of the question, and not in the expected form."
    SETUP = "left to be evaluated", "The answer puts numbers together and leaves their value to be computed."
    NOT_EVALUATED = (
        "an expression that is still to be evaluated",
        "The answer asks for a sum, an integral or the like, which is the question again.",
    )
    NOT_SOLVED = "an equation that is still to be solved", "The answer is an equation where its solution is expected."
    INEQUALITY_NOT_SOLVED = (
        "an inequality that is still to be solved",
        "The answer is an inequality where its solution is expected.",
    )

    # The same.
    SAME_TEXT = "same text", "The answer is the expected one, letter by letter."
    SAME_NOTATION = (
        "same text in another notation",
        "The answer is the expected one when both are written in the same notation.",
    )
    SAME_NUMBER = "same number", "Both are numbers, and they are equal, or one is a decimal that rounds the other."
    SAME_VALUE = "same value", "Both are expressions with the same value for all values of their variables."
    SAME_WITHOUT_UNIT = (
        "same value without its unit",
        "The values are equal if a percentage or an angle is taken for the number that it is.",
    )
    SAME_VALUES = "same values", "Both list the same values, in any order."
    SAME_ELEMENTS = "same elements", "Both have the same elements in the same order within the same brackets."
    SAME_EQUATION = "same equation", "The two equations have the same solutions."
    SAME_INEQUALITY = "same inequality", "The two inequalities have the same solutions."
    SAME_REGION = "same region", "Both describe the same numbers, by intervals or by inequalities."
    SAME_ANGLE = "same angle", "The angles are equal in degrees and radians."
    SAME_REMAINDER = "same remainder", "The numbers are equal modulo the same number."
    SAME_WORDS = "same words", "Both are the same words, whatever their case and punctuation."
    SAME_CHOICE = "same choice", "The answer names the letter of the expected choice."
    SAME_RATIO = "same ratio", "The two ratios have the same value."
    SAME_TESTS = "all tests passed", "The code returns what each unit test expects."

    # Different.
    OTHER_NUMBER = "different number", "Both are numbers, and they differ."
    OTHER_VALUE = "different value", "Both are expressions, and their values differ for some values of their variables."
    UNIT = "unit", "The answer is in a unit of another kind than the expected one."
    OTHER_VALUES = "different values", "The answer has a value too many or too few, or another one."
    OTHER_ELEMENTS = "different elements", "The answer has another element at some place."
    OTHER_SIZE = "different brackets or size", "The brackets, or the numbers of rows or elements, differ."
    OTHER_NAMES = "different names", "The answer gives values to other names, or in another order."
    OTHER_KIND = "different kinds of answers", "The answer is of another kind, such as an equation for a number."
    OTHER_EQUATION = "different equation", "The two equations have different solutions."
    OTHER_INEQUALITY = "different inequality", "The two inequalities have different solutions."
    OTHER_REGION = "different region", "The answer describes other numbers than the expected ones."
    OTHER_VARIABLE = "an inequality in another variable", "The answer is about another variable."
    OTHER_ANGLE = "different angle", "The angles differ in degrees and radians."
    OTHER_REMAINDER = "different remainder", "The numbers differ modulo the expected one."
    OTHER_WORDS = "different words", "Both are words, and they differ."
    OTHER_CHOICE = "different choice", "The answer names another choice, or several."
    OTHER_RATIO = "different ratio", "The two ratios have different values."
    TIME_OR_RATIO = "different time or ratio", "Times look like ratios, so only the same digits are the same."
    LONG_RATIO = "a ratio of more than two numbers", "A ratio of more than two numbers has no single value."
    BASE = "not the same digits in the same base", "A number in a base is right in that base only."
    ACCENTS = "different primes, bars or arrows", "A prime, bar or arrow makes it another thing."
    ALL_OR_ANY = (
        "all solutions where one is expected, or one where all are",
        "Conditions that must all hold are not conditions of which one must hold.",
    )
    NOT_WORDS = "words where an expression is expected", "The answer is in words, the expected one is an expression."
    NOT_EXPRESSION = "an expression, not the words", "The answer is an expression, the expected one is in words."
    EQUATION_AND_VALUE = "an equation and a value", "The answer or the expected one is an equation that gives no value."
    FALSE_CHAIN = "an equation between different numbers", "A chain of equations is worth nothing if it is false."
    FALSE_EQUATION = (
        "an equation between different constants",
        "A chain of equations is worth nothing if it is false.",
    )
    FAR_APPROXIMATION = "an approximation that is not near", "The number behind the sign is not close to the value."
    EMPTY_SIDE = "an equation with an empty side", "An equation says nothing if one of its sides is missing."
    OTHER_ORDER = "components in another order", "The components are named in another order than their values."
    FAILED_TESTS = "failed tests", "The code returns another value than some unit test expects, or fails."
    NO_CODE = "no code block", "The response has no code that could be run on the unit tests."
    OTHER = "another rule", "A rule without a name of its own."

    # No verdict is possible.
    TIME = "time", "Comparing the answer took longer than the deadline."
    MEMORY = "memory", "Comparing the answer took too much memory."
    CRASH = "crash", "The grader ended without a verdict."
    FAILED = "comparison failed", "A library failed on this answer."
    NO_GOLD = "the expected answer is empty", "There is nothing to compare with."
    UNREADABLE_GOLD = "the expected answer cannot be read", "It is neither mathematics nor words that are understood."
    UNREADABLE_TESTS = "the unit tests cannot be read", "The unit tests are not in a form that is understood."
    NO_SANDBOX = "no sandbox", "Code can only be run in a sandbox, and there is none."
    ENVIRONMENT = "environment", "The environment that the model acted in failed, and the response is not whole."


@dataclass(frozen=True, slots=True)
class Submission:
    """A response to be graded, and its expected answer."""

    gold: str
    response: str
    policy: AnswerPolicy
    """Where the response has to state its final answer."""
    question: str = ""
    """What was asked, of which a part is no answer; empty where it is not known."""


class Verdict(StrEnum):
    """The verdict on a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNSCORABLE = "unscorable"
    """No verdict is possible: the expected answer cannot be read, or the comparison did not end."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict, the answer that was compared, and why."""

    verdict: Verdict
    extracted: str | None
    reason: Reason
    tests_passed: float | None = None
    """Fraction of the unit tests that passed; None where the gold is not unit tests."""
    detail: str = ""
    """What the reason is about in this response, such as the two units that differ."""

    @property
    def why(self) -> str:
        """The reason, with its detail."""
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)
