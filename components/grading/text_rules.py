"""Decisions by the text of two answers: forms that are rejected, words, choices, bases, ratios and times."""

import re
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from components.grading.parsing import Answer, Kind, Structure, exact_parts, is_name, parse, parse_structure, unstyled
from components.grading.verdicts import Reason
from components.grading.vocabulary import FUNCTION_NAMES


class Decision(NamedTuple):
    """Whether two answers are equal, and why."""

    equal: bool
    reason: Reason
    detail: str = ""

    @classmethod
    def on(cls, what: str, equal: bool) -> "Decision":
        """Return a decision whose reason is "same ..." or "different ...": number, value, parts, relation or words."""
        return cls(equal, Reason(f"same {what}" if equal else f"different {what}"))


class RejectedError(Exception):
    """The answer cannot be right for any expected answer, or the expected answer cannot be read."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


_HIDES = re.compile(r"\\(?:[hv]?phantom|not|b?cancel|sout|def|newcommand|renewcommand|let)(?![a-z])|(?<![0-9}])\s*%|!!")
_ASKS = re.compile(
    r"\\(?:sum|prod|int|oint|iint|lim|gcd|lcm|det|operatorname|bmod|max|min)(?![a-z])"
    r"|\\frac\{(?:d|\\partial)\s?\w?\}\{(?:d|\\partial)|[vV]matrix|lcm|gcd"
)
_COSTLY = re.compile(
    r"[0-9]{5,}\s*\}?\)?\s*!|\^\s*\{?\s*-?[0-9]{5,}|\^\s*\{?\s*-?[0-9]+\s*\^"
    r"|\\binom\s*\{[^{}]*[0-9]{5,}|\\binom\s*\{[^{}]*\^"
)
_MAX_DEPTH = 8
_MAX_BARS = 8
_DEPTH_CHANGES = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)


def reject_evasions(gold: Answer, answer: Answer) -> None:
    """Raise RejectedError for an answer that hides a part, costs too much to evaluate, or is a question: "gcd(12, 18)".

    Notation that the patterns find is allowed if the expected answer has it, too.
    """
    if r"\boxed" in answer.latex:
        raise RejectedError(Reason.SEVERAL_ANSWERS)
    # The time to parse brackets grows exponentially with how deeply they are nested.
    depth = max(accumulate(_DEPTH_CHANGES.get(character, 0) for character in answer.latex), default=0)
    if depth > _MAX_DEPTH or answer.latex.count("|") > _MAX_BARS:
        raise RejectedError(Reason.COSTLY)
    for pattern, latex, reason in (
        (_COSTLY, answer.latex, Reason.COSTLY),
        (_HIDES, answer.latex, Reason.HIDDEN),
        (_ASKS, _answering_side(answer.latex, gold), Reason.NOT_EVALUATED),
    ):
        if pattern.search(latex) and not pattern.search(gold.latex):
            raise RejectedError(reason)


def _answering_side(latex: str, gold: Answer) -> str:
    """The last side of an equation, or the one before an approximation that is not the expected number."""
    structure = parse_structure(latex)
    if structure.kind is not Kind.EQUATION:
        return latex
    return structure.parts[-1] if approximates(structure, gold) else exact_parts(structure)[-1]


def approximates(equation: Structure, gold: Answer) -> bool:
    r"""Tell whether an equation ends in an approximation by the expected number: `481+362-17 \approx 826`."""
    if len(exact_parts(equation)) == len(equation.parts):
        return False
    number = parse(equation.parts[-1]).number
    return bool(gold.number and number and number.equals(gold.number))


_FUNCTIONS = frozenset([*FUNCTION_NAMES, "gcd", "inf", "lcm", "max", "min", "mod", "sqrt", "sup"])
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z*]+\}(?:\s*\{[clr|\s]+\})?|\\[a-zA-Z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_ARTICLE = re.compile(r"^(?:a|an|the)\s+")
_ALTERNATIVE = re.compile(r"(?<![a-zA-Z\\])or(?![a-zA-Z])", re.IGNORECASE)
_CHOICE = re.compile(
    r"(?P<label>(?:(?:the )?(?:correct |final |right )?(?:answer|option|choice|letter)(?: is)?[: ]+){0,2})"
    r"(?P<opening>[(\[]?)(?P<letter>[A-H])(?:(?P<closing>[).:\]]+)(?P<meaning>(?![(\[]).*))?",
    re.DOTALL | re.IGNORECASE,
)
_OTHER_CHOICE = re.compile(r"(?<![a-zA-Z])[A-H](?![a-zA-Z])|\b(?:or|not|no|wrong|incorrect|false|maybe|perhaps)\b")
_BETWEEN_WORDS = re.compile(r"[\s.,;:!?'\"{}()$~\u2019-]")
_NUMBER = re.compile(r"-?[0-9](?:[0-9.,]*[0-9])?")
_BASED = re.compile(r"[0-9A-F]_\{?[0-9]")
_RATIO = re.compile(r"([0-9]+):([0-9]+)(:[0-9]+)*")
_WITH_PARTS = {Kind.EQUATION, Kind.LIST, Kind.SET, Kind.UNION}


def decide_by_text(gold: Answer, answer: Answer) -> Decision | None:
    """Return the decision of the first rule that applies; None for answers to be compared as mathematics.

    Raises RejectedError for an answer that offers one value "or" another.
    """
    for rule in (_choices, _words, _bases, _ratios):
        if decision := rule(gold, answer):
            return decision
    return None


def is_text(answer: Answer) -> bool:
    """Tell whether an answer is compared by its text, not as mathematics."""
    text = answer.text
    return _has_words(answer) or any((_BASED.search(text), _LETTERS.fullmatch(text), _RATIO.fullmatch(text)))


def _choices(gold: Answer, answer: Answer) -> Decision | None:
    """`(D) Alina` and "option D" are choice D."""
    for one, other in ((gold, answer), (answer, gold)):
        if re.fullmatch("[A-H]", one.text) and (letter := _chosen(unstyled(other.latex).strip())):
            return Decision.on("words", letter == one.text)
    return None


def _chosen(text: str) -> str | None:
    """The letter of the only choice that a text names; a lower-case letter needs a label or brackets."""
    match = _CHOICE.fullmatch(text)
    if not match or not (match["label"] or match["closing"]) or _OTHER_CHOICE.search(match["meaning"] or ""):
        return None
    is_marked = match["label"] or (match["opening"] and match["closing"])
    return match["letter"].upper() if is_marked or match["letter"].isupper() else None


def _words(gold: Answer, answer: Answer) -> Decision | None:
    """Words equal the same words, and words with numbers the same words with the same numbers."""
    kinds = {parse_structure(each.latex).kind for each in (gold, answer)}
    if parse_structure(answer.latex).kind is Kind.EXPRESSION and _ALTERNATIVE.search(answer.latex):
        raise RejectedError(Reason.SEVERAL_ANSWERS)
    has_words = [_has_words(each) for each in (gold, answer)]
    # Letters alone are a word, not a product: otherwise "on" would equal "no".
    if all(has_words) or all(_LETTERS.fullmatch(each.text) for each in (gold, answer)):
        is_equal = _sign_letters_and_numbers(gold) == _sign_letters_and_numbers(answer)
        # Different texts with parts may still have the same parts.
        return Decision.on("words", is_equal) if is_equal or kinds == {Kind.EXPRESSION} else None
    return Decision(False, Reason.OTHER_KIND) if any(has_words) and not _WITH_PARTS & kinds else None


def _has_words(answer: Answer) -> bool:
    """Whether an answer that is not a number has a word of at least three letters, other than names of functions."""
    words: list[str] = _LONG_WORD.findall(_COMMAND.sub(" ", answer.latex))
    return answer.number is None and any(word.lower() not in _FUNCTIONS for word in words)


def _sign_letters_and_numbers(answer: Answer) -> tuple[bool, str, list[str]]:
    """Whether the text begins with a minus sign; its letters without article, case and punctuation; its numbers."""
    letters = _BETWEEN_WORDS.sub("", _ARTICLE.sub("", unstyled(answer.latex).casefold().strip(" {")))
    return answer.latex.lstrip(" {").startswith("-"), letters, _NUMBER.findall(answer.latex)


def _bases(gold: Answer, answer: Answer) -> Decision | None:
    """A number in a base equals only the same digits in the same base."""
    if not _BASED.search(gold.text) and not _BASED.search(answer.text):
        return None
    is_equal = _without_variable(gold.text) == _without_variable(answer.text)
    return Decision(is_equal, Reason.SAME_NOTATION if is_equal else Reason.OTHER_NUMBER)


def _without_variable(text: str) -> str:
    """The right side of an equation such as `x = 52_8`; any other text unchanged."""
    structure = parse_structure(text)
    if structure.kind is Kind.EQUATION and len(structure.parts) == 2 and is_name(structure.parts[0]):
        return structure.parts[1]
    return text


def _ratios(gold: Answer, answer: Answer) -> Decision | None:
    """A ratio equals its quotient; two that differ as texts are never equal, since they may be times."""
    ratios = [_RATIO.fullmatch(each.text) for each in (gold, answer)]
    if all(ratios):
        return Decision(False, Reason.OTHER_NUMBER)
    ratio, other = (ratios[0], answer) if ratios[0] else (ratios[1], gold)
    if not ratio:
        return None
    if ratio[3]:  # a ratio of more than two numbers
        return Decision(False, Reason.OTHER_KIND)
    if any("clock" in each.unit.kind for each in (gold, answer) if each.unit):
        return Decision(False, Reason.OTHER_NUMBER)
    if other.number and int(ratio[2]):
        return Decision.on("value", Fraction(int(ratio[1]), int(ratio[2])) == other.number.value)
    return None
