"""One spelling for what is written in many ways: wrappings, styles, signs, numbers and units of an answer."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from components.grading.answer import find_boxes
from components.grading.number import Number, read_number
from components.grading.structure import Kind, structure
from components.grading.units import Unit, split_unit


@dataclass(frozen=True, slots=True)
class Spelling:
    """One answer, read."""

    text: str
    """Canonical: two answers with the same text are the same answer."""
    number: Number | None
    """Its exact value, where it is written as an integer, a decimal, a fraction or a mixed number."""
    unit: Unit | None
    """What it is measured in, where that is written."""
    latex: str
    """The answer without its wrapping and its unit, still spaced as it was."""


_PLAIN = re.compile(r"-?[0-9]{1,18}")
_STYLES = r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|boldsymbol|bm|operatorname)\*?\s*"
_STYLED = re.compile(_STYLES + r"\{([^{}]*)\}")
_SIGNS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/"}
    | {
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u222a": r"\cup ",
        "\u2208": r"\in ",
        "\u00b1": r"\pm ",
    }
    | {
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00b0": r"^\circ",
        "\u2248": r"\approx ",
    }
    | {
        "\u00bd": r"\frac{1}{2}",
        "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}",
        "\u221a": r"\sqrt ",
        "\u2220": r"\angle ",
    }
    | {"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u2044": "/"}
)
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_END = "(?![a-zA-Z])"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # What only looks different.
        (rf"\\\\(?=(?:left|right|frac|sqrt|boxed|text|pi|cdot){_END})", r"\\"),  # escaped once too often
        (rf"\\!\s*|\\(?:left|right|[bB]igg?[lr]?|limits){_END}\.?|\\displaystyle{_END}", ""),
        (r"US\s*\\?\$", r"\\$"),
        (r"\\(?:text)?color\s*\{[a-zA-Z]+\}\s*", ""),
        (rf"\\q?quad{_END}|(?<!\\)\\[,;:> ]|~|\s", " "),
        (rf"\\[dtc]frac{_END}", r"\\frac"),
        (rf"\\(?:lbrace){_END}", r"\\{"),
        (rf"\\(?:rbrace){_END}", r"\\}"),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
        (rf"<=|\\leq(?:slant)?{_END}", r"\\le "),
        (rf">=|\\geq(?:slant)?{_END}", r"\\ge "),
        (rf"!=|\\neq{_END}", r"\\ne "),
        (rf"\\varnothing{_END}|\\\{{\s*\\\}}", r"\\emptyset "),
        (rf"\^\s*\{{?\s*\\circ\s*\}}?|\\degrees?{_END}", r"\\degree "),
        (r"^(?:\\text\s*\{\s*)?(?:\\approx|approximately|about|roughly|around)(?![a-zA-Z])(?:\s*\})?", ""),
        (r"(?i)^(?:\\text\s*\{)?all real(?: numbers|s)\}?$|^\\mathbb\{?\s*R\}?$", r"(-\\infty,\\infty)"),
        (r"(?i)^(?:\\text\s*\{)?no (?:real )?solutions?\}?$", r"\\emptyset"),
        # Numbers: separators, bases, ratios; 3(4) is a product, not a mixed number.
        (r"(?<=[0-9])\{,\}(?=[0-9]{3})", ""),
        (r"\{,\}", ","),
        (r"(?<![_0-9])([0-9]+)\(([0-9]+)\)", r"\1\\cdot(\2)"),
        (r"\(([0-9A-F]+)\)\s*_", r"\1_"),
        (r"(?<=[0-9A-F])\s*(?:\\text\s*\{)?\s*(?:in )?base[\s-]*\}?\s*([0-9]+)\s*\}?", r"_\1"),
        *((rf"_\s*\{{?\s*(?:\\text\s*\{{)?\s*{word}\s*\}}{{0,2}}", f"_{base}") for base, word in enumerate(_BASES, 2)),
        (r"(?<=[0-9])\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=[0-9])", ":"),
        # Mathematics typed without LaTeX.
        (r"\*\*(?=[0-9({])", "^"),
        (r"(?<=[0-9a-zA-Z)}\s])\*(?=[\s0-9a-zA-Z(\\])", r"\\cdot "),
        (rf"(?<![a-zA-Z\\])pi{_END}", r"\\pi "),
        (rf"(?:\+\s*)?(?:(?<![a-zA-Z\\])(?:inf|infinity|oo)|\\infty){_END}", r"\\infty "),
        (r"(?:\\|(?<![a-zA-Z\\]))sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\^)\s*([0-9])(?=\s*[0-9a-zA-Z\\])", r"\1{\2} "),
    ]
]
_CANONICAL = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"([_^])\s*([0-9]+|[a-zA-Z])", r"\1{\2}"),
        # `1 1/2` is not `11/2`: a space between digits stays, all others go.
        (r"(?<![0-9])\s+|\s+(?![0-9])", ""),
        (r"^\(([A-Z])\)$", r"\1"),
    ]
]
_EDGES = re.compile(r"^(?:\\[(\[,;:! ]|\*\*|\$|\s)+|(?:\\[)\],;:! ]|\*\*|(?<!\\)\$|[.,;:]|\\\\|\\$|\s)+$")
_DOTS = re.compile(r"\.{2,}|\u2026")
_LISTED = re.compile(r",\s+[0-9]")  # `1, 234` are two numbers
_MAY_BE_LIST = re.compile(r"[,;]|and|or|\\pm")
_DOLLARS = re.compile(r"(?<!\\)\$")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_PRODUCT = re.compile(r"(?<![a-zA-Z\\_])([ie])\(")


@lru_cache(maxsize=8192)
def read(written: str) -> Spelling:
    """Return what `written` says; any text can be read."""
    if _PLAIN.fullmatch(written):
        return Spelling(text=written, number=Number(Fraction(written), None), unit=None, latex=written)
    text = _unwrapped(written)
    # The members of a list have units of their own.
    is_list = _MAY_BE_LIST.search(text) and structure(text).kind is Kind.LIST
    return _spelling(text, None) if is_list else _spelling(*split_unit(text))


def unstyled(latex: str) -> str:
    r"""Return the text without commands such as `\text{}`, but with what they hold."""
    while (plain := _STYLED.sub(r"\1", latex)) != latex:
        latex = plain
    return latex


def _spelling(latex: str, unit: Unit | None) -> Spelling:
    text = unstyled(latex)
    for pattern, replacement in _CANONICAL:
        text = pattern.sub(replacement, text)
    number = None if _LISTED.search(latex) else read_number(text)
    return Spelling(text=text, number=number, unit=unit, latex=latex)


def _unwrapped(written: str) -> str:
    """The answer without delimiters and styles around it, and with one sign for each meaning."""
    text = _EDGES.sub("", _DOTS.sub(r"\\ldots ", written))
    boxes = find_boxes(text)
    if len(boxes) == 1 and (boxes[0].start, boxes[0].end) == (0, len(text)):
        text = boxes[0].content
    text = text.translate(_SIGNS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _EDGES.sub("", text)
    while styled := _STYLED.fullmatch(text):
        text = _EDGES.sub("", styled[1])
    text = _PRODUCT.sub(r"\1\\cdot(", _DOLLARS.sub(" ", text)).strip()
    has_elements = text[:1] in {"(", "["} or text[:2] == r"\{"
    return text if has_elements else _GROUPS.sub(lambda found: found[0].replace(",", ""), text)
