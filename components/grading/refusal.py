"""What is no answer, though it may be equal to the expected one."""

import re

from components.grading.decision import RefusedError
from components.grading.spelling import Spelling

_HIDES = re.compile(r"\\(?:[hv]?phantom|not|b?cancel|sout|def|newcommand|renewcommand|let)(?![a-z])|(?<![0-9}])\s*%|!!")
_ASKS = re.compile(
    r"\\(?:sum|prod|int|oint|iint|lim|gcd|lcm|det|operatorname|bmod|max|min)(?![a-z])"
    r"|\\frac\{(?:d|\\partial)\s?\w?\}\{(?:d|\\partial)|[vV]matrix|lcm|gcd"
)
_ACCENTS = re.compile(
    r"'|\\prime|\^\s*\{?\s*(?:T|\\top|\\intercal)\b|\\(?:bar|hat|tilde|overline|vec|overrightarrow)(?![a-z])"
)
_COSTLY = re.compile(
    r"[0-9]{5,}\s*\}?\)?\s*!|\^\s*\{?\s*-?[0-9]{5,}|\^\s*\{?\s*-?[0-9]+\s*\^|\\binom\s*\{[^{}]*[0-9]{5,}|\\binom\s*\{[^{}]*\^"
)
_MAX_DEPTH = 8
_MAX_BARS = 8
_ROW = re.compile(r"(?:[0-9/]+\s+){12}|(?:\.[0-9]+){6}|(?:[-+]\s*){6}|(?:(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+){12}")


def refuse(expected: Spelling, given: Spelling) -> None:
    """Raise RefusedError for an answer that hides something, or leaves the work to the grader.

    "gcd(12, 18)" is the question again, not its answer; the reader of LaTeX passes over accents and struck-out text.
    """
    if r"\boxed" in given.latex:
        raise RefusedError("several boxes in one answer")
    if _depth(given.latex) > _MAX_DEPTH or given.latex.count("|") > _MAX_BARS:
        raise RefusedError("brackets nested too deeply")
    if _ROW.search(given.latex) and not _ROW.search(expected.latex):
        raise RefusedError("a row of numbers, signs or words")
    if _COSTLY.search(given.latex) and not _COSTLY.search(expected.latex):
        raise RefusedError("a number too large to be worked out")
    if _HIDES.search(given.latex) and not _HIDES.search(expected.latex):
        raise RefusedError("an answer with parts that are not printed or not meant")
    if _ASKS.search(given.latex) and not _ASKS.search(expected.latex):
        raise RefusedError("an expression that is still to be evaluated")
    both_numbers = expected.number and given.number
    if not both_numbers and sorted(_ACCENTS.findall(expected.text)) != sorted(_ACCENTS.findall(given.text)):
        raise RefusedError("other primes, bars or arrows")


def _depth(latex: str) -> int:
    """How deeply brackets are nested: reading takes exponentially long in it."""
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
