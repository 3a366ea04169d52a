"""Answers that are no mathematics: words, choices, numbers in another base, ratios and times."""

import re
from fractions import Fraction

from components.grading.decision import Decision, RefusedError
from components.grading.spelling import Spelling, unstyled
from components.grading.structure import Kind, structure

_FUNCTIONS = frozenset(
    {"arccos", "arcsin", "arctan", "cos", "cosh", "cot", "csc", "exp", "gcd", "inf", "lcm", "log", "max", "min", "mod"}
    | {"sec", "sin", "sinh", "sqrt", "sup", "tan", "tanh"}
)
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|\\[a-zA-Z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_ARTICLE = re.compile(r"^(?:a|an|the)\s+")
_ALTERNATIVE = re.compile(r"(?<![a-zA-Z\\])or(?![a-zA-Z])", re.IGNORECASE)
_CHOICE = re.compile(r"\(?([A-H])[).:](?P<meaning>.+)", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![a-zA-Z])[A-H](?![a-zA-Z])|\b(?:or|not|no|wrong|incorrect|false)\b")
_BETWEEN_WORDS = re.compile(r"[\s.,;:!?'\"{}()$~\u2019-]")
_NUMBER = re.compile(r"-?[0-9](?:[0-9.,]*[0-9])?")
_BASED = re.compile(r"[0-9A-F]_\{?[0-9]")
_RATIO = re.compile(r"([0-9]+):([0-9]+)(:[0-9]+)*")
_WITH_PARTS = {Kind.EQUATION, Kind.LIST, Kind.SET, Kind.UNION}


def decide_by_wording(expected: Spelling, given: Spelling) -> Decision | None:
    """Return what the words of two answers decide; None where they are to be read as mathematics.

    Raises RefusedError for one value "or" another one.
    """
    return _choices(expected, given) or _words(expected, given) or _bases(expected, given) or _ratios(expected, given)


def is_wording(spelling: Spelling) -> bool:
    """Tell whether an answer is not to be read as mathematics."""
    others = (_LETTERS, _RATIO)
    return (
        _has_words(spelling)
        or bool(_BASED.search(spelling.text))
        or any(each.fullmatch(spelling.text) for each in others)
    )


def _choices(expected: Spelling, given: Spelling) -> Decision | None:
    """`(D) Alina` is choice D."""
    for one, other in ((expected, given), (given, expected)):
        if re.fullmatch("[A-H]", one.text) and (found := _CHOICE.fullmatch(unstyled(other.latex))):
            is_one = not _OTHER_CHOICE.search(found["meaning"])
            return Decision.between(is_one and found[1] == one.text, "choice")
    return None


def _words(expected: Spelling, given: Spelling) -> Decision | None:
    kinds = [structure(each.latex).kind for each in (expected, given)]
    if kinds[1] is Kind.EXPRESSION and _ALTERNATIVE.search(given.latex):
        raise RefusedError("several answers")
    wordy = [_has_words(each) for each in (expected, given)]
    # Letters alone are a word, not a product: otherwise "on" would be "no".
    if all(wordy) or all(_LETTERS.fullmatch(each.text) for each in (expected, given)):
        same = _letters(expected) == _letters(given) and _numbers(expected) == _numbers(given)
        return Decision.between(same, "words") if same or set(kinds) == {Kind.EXPRESSION} else None
    if any(wordy) and not _WITH_PARTS & set(kinds):
        return Decision(False, "words where an expression is expected" if wordy[1] else "an expression, not the words")
    return None


def _has_words(spelling: Spelling) -> bool:
    words: list[str] = _LONG_WORD.findall(_COMMAND.sub(" ", spelling.latex))
    return spelling.number is None and any(word.lower() not in _FUNCTIONS for word in words)


def _letters(spelling: Spelling) -> str:
    """A text without its article, its capitals, and what stands between words."""
    return _BETWEEN_WORDS.sub("", _ARTICLE.sub("", unstyled(spelling.latex).casefold().strip(" {")))


def _numbers(spelling: Spelling) -> list[str]:
    found: list[str] = _NUMBER.findall(spelling.latex)
    return found


def _bases(expected: Spelling, given: Spelling) -> Decision | None:
    """Digits with a base equal nothing but the same text, which was compared before."""
    is_based = _BASED.search(expected.text) or _BASED.search(given.text)
    return Decision(False, "not the same digits in the same base") if is_based else None


def _ratios(expected: Spelling, given: Spelling) -> Decision | None:
    ratios = [_RATIO.fullmatch(each.text) for each in (expected, given)]
    if all(ratios):  # times look the same, and 1:20 is not 2:40
        return Decision(False, "another time or ratio")
    for ratio, other in zip(ratios, (given, expected), strict=True):
        if ratio and ratio[3]:
            return Decision(False, "a ratio of several")
        if ratio and other.number and int(ratio[2]):
            return Decision.between(Fraction(int(ratio[1]), int(ratio[2])) == other.number.value, "ratio")
    return None
