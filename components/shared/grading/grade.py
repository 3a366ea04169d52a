"""The one grader: compares the final answer of a response with the expected one, exactly where it can.

Numbers and equal texts are decided in microseconds. Only what is left goes to math-verify, whose deadlines are signals
and hence need the main thread; elsewhere such a comparison is unscorable, since without a deadline one hostile answer
(a power tower, a huge factorial) would hang the run.
"""

import re
import threading
from collections.abc import Iterator
from itertools import pairwise

from components.shared.grading.answer import AnswerPolicy, final_answer
from components.shared.grading.answer_form import AnswerForm, read_form
from components.shared.grading.verdict import Grade, Verdict

_MAX_ANSWER_CHARACTERS = 300
_TIMEOUT_S = 3  # a whole number: math-verify takes a fraction for an error and calls everything wrong
_EQUALS = re.compile(r"(?<![<>!\\:])=")
_NAME = re.compile(r"(?!.*\\sqrt)[^0-9+\-*/^<>]*[a-zA-Z][^+\-*/^<>]*")
_CONSTANT_COMMANDS = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|div|pm|mp|infty|text|mbox|ldots|dots)(?![a-zA-Z])")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|\\[a-zA-Z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_FUNCTIONS = frozenset(
    {"arccos", "arcsin", "arctan", "cos", "cot", "csc", "exp", "gcd", "inf", "lcm", "log", "max", "min", "mod"}
    | {"sec", "sin", "sqrt", "tan"}
)
_RATIO = re.compile(r"[0-9]+(?::[0-9]+)+")
_BASED = re.compile(r"[0-9A-F]_\{?[0-9]")


def grade(gold: str, response: str, policy: AnswerPolicy = AnswerPolicy.DECLARED) -> Grade:
    """Return whether the final answer of `response` is `gold`; never raises, whatever the response is."""
    extracted = final_answer(response, policy)
    if extracted is None:
        return Grade(Verdict.WRONG, None, "no final answer")
    verdict, reason = _compare(gold.strip(), extracted)
    return Grade(verdict, extracted, reason)


def _compare(gold: str, answer: str) -> tuple[Verdict, str]:
    if gold == answer and gold:
        return Verdict.RIGHT, "same text"
    expected = read_form(gold)
    if not expected.text:
        return Verdict.UNSCORABLE, "the expected answer is empty"
    if len(answer) > _MAX_ANSWER_CHARACTERS:
        return Verdict.WRONG, f"answer is longer than {_MAX_ANSWER_CHARACTERS} characters"
    given = read_form(answer)
    return _compare_exactly(expected, given) or _compare_forms(expected, given)


def _compare_exactly(expected: AnswerForm, given: AnswerForm) -> tuple[Verdict, str] | None:
    """The verdict where text or numbers decide; None where they do not."""
    if expected.unit and given.unit and expected.unit != given.unit:
        return Verdict.WRONG, f"unit is {given.unit}, expected {expected.unit}"
    if expected.text == given.text:
        return Verdict.RIGHT, "same text but for its spelling"
    if expected.number is not None and given.number is not None:
        equal = expected.number == given.number
        return (Verdict.RIGHT, "same number") if equal else (Verdict.WRONG, "another number")
    return None


def _compare_forms(expected: AnswerForm, given: AnswerForm) -> tuple[Verdict, str]:
    if refusal := _refusal(expected, given):
        return Verdict.WRONG, refusal
    value, given_value = _value(expected), _value(given)
    if ("=" in expected.text) != ("=" in given.text):
        expected, given = value, given_value
        if decided := _compare_exactly(expected, given):
            return decided
    if _is_sequence(expected.text) != _is_sequence(given.text) and _is_list(expected.text) != _is_list(given.text):
        same = expected.text.strip("()[]") == given.text.strip("()[]")
        return (Verdict.RIGHT, "same list") if same else (Verdict.WRONG, "a list and a tuple")
    if _WORD.fullmatch(expected.text):
        same = expected.text.casefold() == given.text.casefold()
        return (Verdict.RIGHT, "same words") if same else (Verdict.WRONG, "other words")
    if _RATIO.fullmatch(expected.text) and _RATIO.fullmatch(given.text):
        return Verdict.WRONG, "another time or ratio"
    return _compare_symbolically(expected.latex, given.latex)


def _refusal(expected: AnswerForm, given: AnswerForm) -> str:
    """Why an answer is not worth a symbolic comparison that would take part of it for the whole; empty if it is."""
    if r"\boxed" in given.latex:
        return "several boxes in one answer"
    if _BASED.search(expected.text) or _BASED.search(given.text):
        return "not the same digits in the same base"
    if _has_prose(given.text) and not _has_prose(expected.text):
        return "words where an expression is expected"
    for equation in _pieces(given.text):
        sides = _EQUALS.split(equation)
        if any(_is_constant(left) and _is_constant(right) for left, right in pairwise(sides)):
            return "an equation between constants"
        if len(sides) > 1 and "=" not in expected.text and not _NAME.fullmatch(sides[0]):
            return "an equation where a value is expected"
    return ""


def _has_prose(text: str) -> bool:
    words: list[str] = _LONG_WORD.findall(_ENVIRONMENT.sub(" ", text))
    return any(word.lower() not in _FUNCTIONS for word in words)


def _is_constant(text: str) -> bool:
    return not re.search(r"[a-zA-Z]", _CONSTANT_COMMANDS.sub("", text))


def _value(form: AnswerForm) -> AnswerForm:
    """What stands right of `x =`; the form itself where it is no such assignment."""
    sides = _EQUALS.split(form.latex)
    if len(sides) != 2 or not _NAME.fullmatch(sides[0]):
        return form
    return read_form(sides[1])


def _is_sequence(text: str) -> bool:
    """Whether one pair of round or square brackets holds the whole of a list: a tuple, a point, an interval."""
    return text[:1] in {"(", "["} and text[-1:] in {")", "]"} and len(list(_pieces(text))) == 1 and "," in text


def _is_list(text: str) -> bool:
    return len(list(_pieces(text))) > 1


def _pieces(text: str) -> Iterator[str]:
    """The parts between the commas and semicolons that no bracket encloses."""
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _compare_symbolically(gold: str, answer: str) -> tuple[Verdict, str]:
    if threading.current_thread() is not threading.main_thread():
        return Verdict.UNSCORABLE, "a symbolic comparison needs the main thread for its deadline"
    from math_verify.errors import TimeoutException

    try:
        return _ask_math_verify(gold, answer)
    except TimeoutException:
        return Verdict.UNSCORABLE, f"comparison took longer than {_TIMEOUT_S} s"
    except Exception as error:  # model output reaches a parser and a simplifier, which may fail in any way
        return Verdict.UNSCORABLE, f"comparison failed ({type(error).__name__})"


def _ask_math_verify(gold: str, answer: str) -> tuple[Verdict, str]:
    # Imported here: most verdicts need neither, and both together take a quarter of a second.
    from math_verify import LatexExtractionConfig, parse, verify

    def read(latex: str) -> list[object]:
        expressions = parse(
            rf"\boxed{{{latex}}}",
            extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            parsing_timeout=_TIMEOUT_S,
            raise_on_error=True,
        )
        return list(expressions)

    expected = read(gold)
    if not expected:
        return Verdict.UNSCORABLE, "the expected answer cannot be read"
    given = read(answer)
    if not given:
        return Verdict.WRONG, "the answer is no mathematical expression"
    equal = verify(expected, given, timeout_seconds=_TIMEOUT_S, raise_on_error=True)
    return (Verdict.RIGHT, "equal by algebra") if equal else (Verdict.WRONG, "not equal by algebra")
