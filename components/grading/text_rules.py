"""What is decided by how two answers are written: rejected answers, words, choices, other bases, ratios and times."""

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
        """Return that two answers have the same or a different number, value, parts, relation or words."""
        return cls(equal, Reason(f"same {what}" if equal else f"different {what}"))


class RejectedError(Exception):
    """An answer that cannot be right for any expected answer, or an expected answer that cannot be read."""

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
_ONLY_IF_EXPECTED = (
    (_COSTLY, Reason.COSTLY),
    (_HIDES, Reason.HIDDEN),
    (_ASKS, Reason.NOT_EVALUATED),
)
_MAX_DEPTH = 8
_MAX_BARS = 8


def reject_evasions(gold: Answer, answer: Answer) -> None:
    """Raise RejectedError for an answer that hides something, or leaves the work to the grader.

    "gcd(12, 18)" is the question again, not its answer.
    """
    if r"\boxed" in answer.latex:
        raise RejectedError(Reason.SEVERAL_ANSWERS)
    # Parsing takes exponentially long in how deeply brackets are nested.
    if _depth(answer.latex) > _MAX_DEPTH or answer.latex.count("|") > _MAX_BARS:
        raise RejectedError(Reason.COSTLY)
    for pattern, reason in _ONLY_IF_EXPECTED:
        latex = _answering_side(answer.latex, gold) if pattern is _ASKS else answer.latex
        if pattern.search(latex) and not pattern.search(gold.latex):
            raise RejectedError(reason)


def _depth(latex: str) -> int:
    """How deeply brackets are nested, where they are too many to be nested just a little."""
    num_opened = latex.count("(") + latex.count("[") + latex.count("{")
    if num_opened <= _MAX_DEPTH:
        return num_opened
    return max(accumulate((character in "([{") - (character in ")]}") for character in latex))


def _answering_side(latex: str, gold: Answer) -> str:
    r"""The last side of an equation, or the one before an approximation that is not the expected number."""
    if not any(sign in latex for sign in ("=", r"\approx", r"\in", r"\equiv")):
        return latex
    structure = parse_structure(latex)
    if structure.kind is not Kind.EQUATION:
        return latex
    return structure.parts[-1] if approximates(structure, gold) else exact_parts(structure)[-1]


def approximates(equation: Structure, gold: Answer) -> bool:
    r"""Tell whether the number behind an approximation is the expected one, as in `481+362-17 \approx 826`."""
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


def decide_by_wording(gold: Answer, answer: Answer) -> Decision | None:
    """Return what the first rule that fits decides; None where two answers are to be compared as mathematics.

    Raises RejectedError for one value "or" another one.
    """
    for rule in (_choices, _words, _bases, _ratios):
        if decision := rule(gold, answer):
            return decision
    return None


def is_wording(answer: Answer) -> bool:
    """Tell whether an answer is compared by its wording, not as mathematics."""
    return (
        _has_words(answer)
        or bool(_BASED.search(answer.text))
        or any(pattern.fullmatch(answer.text) for pattern in (_LETTERS, _RATIO))
    )


def _choices(gold: Answer, answer: Answer) -> Decision | None:
    """`(D) Alina` and "option D" are choice D."""
    for one, other in ((gold, answer), (answer, gold)):
        if re.fullmatch("[A-H]", one.text) and (letter := _chosen(unstyled(other.latex).strip())):
            return Decision.on("words", letter == one.text)
    return None


def _chosen(text: str) -> str | None:
    """The letter of the one choice that a text names; a small letter needs a label or brackets to be one."""
    match = _CHOICE.fullmatch(text)
    if not match or not (match["label"] or match["closing"]) or _OTHER_CHOICE.search(match["meaning"] or ""):
        return None
    is_bracketed = match["opening"] and match["closing"]
    return match["letter"].upper() if match["label"] or is_bracketed or match["letter"].isupper() else None


def _words(gold: Answer, answer: Answer) -> Decision | None:
    kinds = [parse_structure(each.latex).kind for each in (gold, answer)]
    if kinds[1] is Kind.EXPRESSION and _ALTERNATIVE.search(answer.latex):
        raise RejectedError(Reason.SEVERAL_ANSWERS)
    wordy = [_has_words(each) for each in (gold, answer)]
    # Letters alone are a word, not a product: otherwise "on" would be "no".
    if all(wordy) or all(_LETTERS.fullmatch(each.text) for each in (gold, answer)):
        same = _letters_and_numbers(gold) == _letters_and_numbers(answer)
        return Decision.on("words", same) if same or set(kinds) == {Kind.EXPRESSION} else None
    if any(wordy) and not _WITH_PARTS & set(kinds):
        return Decision(False, Reason.OTHER_KIND)
    return None


def _has_words(answer: Answer) -> bool:
    words: list[str] = _LONG_WORD.findall(_COMMAND.sub(" ", answer.latex))
    return answer.number is None and any(word.lower() not in _FUNCTIONS for word in words)


def _letters_and_numbers(answer: Answer) -> tuple[bool, str, list[str]]:
    """Whether a minus sign comes first; the words without article, case, spaces and punctuation; the numbers."""
    letters = _BETWEEN_WORDS.sub("", _ARTICLE.sub("", unstyled(answer.latex).casefold().strip(" {")))
    return answer.latex.lstrip(" {").startswith("-"), letters, _NUMBER.findall(answer.latex)


def _bases(gold: Answer, answer: Answer) -> Decision | None:
    """Digits with a base equal nothing but the same digits."""
    if not _BASED.search(gold.text) and not _BASED.search(answer.text):
        return None
    same = _without_variable(gold.text) == _without_variable(answer.text)
    return Decision(same, Reason.SAME_NOTATION if same else Reason.OTHER_NUMBER)


def _without_variable(text: str) -> str:
    """The value of `x = 52_8`."""
    structure = parse_structure(text)
    names_it = structure.kind is Kind.EQUATION and len(structure.parts) == 2 and is_name(structure.parts[0])
    return structure.parts[1] if names_it else text


def _ratios(gold: Answer, answer: Answer) -> Decision | None:
    ratios = [_RATIO.fullmatch(each.text) for each in (gold, answer)]
    if all(ratios):  # times look the same, and 1:20 is not 2:40
        return Decision(False, Reason.OTHER_NUMBER)
    for ratio, other in zip(ratios, (answer, gold), strict=True):
        if ratio and ratio[3]:
            return Decision(False, Reason.OTHER_KIND)
        if ratio and any("clock" in each.unit.kind for each in (gold, answer) if each.unit):
            return Decision(False, Reason.OTHER_NUMBER)
        if ratio and other.number and int(ratio[2]):
            return Decision.on("value", Fraction(int(ratio[1]), int(ratio[2])) == other.number.value)
    return None
