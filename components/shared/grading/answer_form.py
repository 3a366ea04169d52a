"""What a written answer says, apart from how it is written: a canonical text, its exact number, its unit."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from components.shared.grading.boxes import find_boxes


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One answer, read."""

    text: str
    """Canonical: two answers with the same text are the same answer."""
    number: Fraction | None
    """Its exact value, where it is written as an integer, a decimal, a fraction or a mixed number."""
    unit: str
    """Canonical unit, such as `cm^2`; empty where none is written."""
    latex: str
    """The answer without its wrapping and its unit, still spaced as it was."""


_PLAIN = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)?(?:\.[0-9]*)?")
_FRACTION = re.compile(r"([-+]?)(?:([0-9]+) ?)?\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|([-+]?)(?:([0-9]+) )?([0-9]+)/([0-9]+)")

_STYLES = r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf)\s*"
_STYLED = re.compile(_STYLES + r"\{([^{}]*)\}")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\!\s*|\\(?:left|right)(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])", ""),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        ("[\u2212\u2013]", "-"),
        (r"\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\?\$|[€£]", ""),
        (r"(?<![_0-9])([0-9]+)\(([0-9]+)\)", r"\1\\cdot(\2)"),  # 3(4) is a product, not a mixed number
        (r"\\[,;:>]|\\ |~|\\q?quad(?![a-zA-Z])|\s", " "),
        (r"(?:\s*,)?\s*(?:" + _STYLES + r"\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ", "),
    ]
]
_CANONICAL = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"([_^])\s*\{\s*(\w+)\s*\}", r"\1\2"),
        # `1 1/2` is not `11/2`: a space between digits stays, all others go.
        (r"(?<![0-9])\s+|\s+(?![0-9])", ""),
        (r"^\(([A-Z])\)$", r"\1"),
    ]
]
_EDGES = re.compile(r"^(?:\\[(\[]|\*\*|\s)+|(?:\\[)\]]|\*\*|[.,;:]|\s)+$")

_POWER = r"(?:\s*\^?\s*\{?\s*([23²³])\s*\}?)?"
_STYLED_UNIT = re.compile(r"(.*?[0-9}a-zA-Z)])\s*" + _STYLES + r"\{([a-zA-Z/. ]+)" + _POWER + r"\}" + _POWER)
_PLAIN_UNIT = re.compile(r"(.*?[0-9})])(\s*)([a-zA-Z][a-zA-Z/. ]*)" + _POWER)
_UNIT_NAMES = {
    **dict.fromkeys(["inch", "inches", "in"], "in"),
    **dict.fromkeys(["foot", "feet", "ft"], "ft"),
    **dict.fromkeys(["yard", "yards", "yd", "yds"], "yd"),
    **dict.fromkeys(["mile", "miles", "mi"], "mi"),
    **dict.fromkeys(["millimeter", "millimeters", "mm"], "mm"),
    **dict.fromkeys(["centimeter", "centimeters", "cm"], "cm"),
    **dict.fromkeys(["meter", "meters", "metre", "metres", "m"], "m"),
    **dict.fromkeys(["kilometer", "kilometers", "km"], "km"),
    **dict.fromkeys(["gram", "grams", "g"], "g"),
    **dict.fromkeys(["kilogram", "kilograms", "kg"], "kg"),
    **dict.fromkeys(["pound", "pounds", "lb", "lbs"], "lb"),
    **dict.fromkeys(["ounce", "ounces", "oz"], "oz"),
    **dict.fromkeys(["liter", "liters", "litre", "litres", "l"], "l"),
    **dict.fromkeys(["second", "seconds", "sec", "s"], "s"),
    **dict.fromkeys(["minute", "minutes", "min"], "min"),
    **dict.fromkeys(["hour", "hours", "hr", "hrs", "h"], "h"),
    **dict.fromkeys(["am", "pm", "mph"]),
}
_PREFIXES = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
# Words behind a number that change its value.
_NO_UNITS = frozenset(
    {"base", "dozen", "half", "hundred", "thousand", "million", "billion", "trillion", "plus", "minus", "times", "over"}
    | {"divided", "squared", "cubed", "factorial", "not", "cos", "cot", "csc", "exp", "gcd", "lcm", "log", "max"}
    | {"mod", "sin", "sqrt", "tan"}
)


@lru_cache(maxsize=8192)
def read_form(written: str) -> AnswerForm:
    """Return what `written` says; any text has a form."""
    if _PLAIN.fullmatch(written):
        return AnswerForm(text=written, number=Fraction(written), unit="", latex=written)
    latex, unit = _split_unit(_unwrapped(written))
    text = _STYLED.sub(r"\1", latex)
    for pattern, replacement in _CANONICAL:
        text = pattern.sub(replacement, text)
    return AnswerForm(text=text, number=_number(text), unit=unit, latex=latex)


def _unwrapped(written: str) -> str:
    """The answer without delimiters, styles, currency, percent and degree signs, and with plain spaces."""
    text = _EDGES.sub("", written)
    boxes = find_boxes(text)
    if len(boxes) == 1 and (boxes[0].start, boxes[0].end) == (0, len(text)):
        text = boxes[0].content
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _EDGES.sub("", text)
    if styled := _STYLED.fullmatch(text):
        text = _EDGES.sub("", styled[1])
    return text


def _split_unit(latex: str) -> tuple[str, str]:
    """The value and the canonical unit behind it."""
    if found := _STYLED_UNIT.fullmatch(latex):
        value, words, inner, outer = found.groups()
        power = inner or outer
        attached = False
    elif found := _PLAIN_UNIT.fullmatch(latex):
        value, space, words, power = found.groups()
        attached = not space
    else:
        return latex, ""
    unit = _unit(words, power, attached=attached)
    return (value.strip(), unit) if unit and any(character.isdigit() for character in value) else (latex, "")


def _unit(written: str, power: str | None, *, attached: bool) -> str:
    """The canonical name of a unit; empty where the words are no unit."""
    words = written.replace(".", "").lower().split()
    dimension = "^" + power.translate(str.maketrans("²³", "23")) if power else ""
    if len(words) > 1 and words[0] in _PREFIXES:
        dimension = _PREFIXES[words.pop(0)]
    known = all(word in _UNIT_NAMES for word in words)
    if not words or (attached and not known) or any(word in _NO_UNITS for word in words):
        return ""
    if not known and any(len(word) < 3 for word in words):
        return ""
    return " ".join(_UNIT_NAMES.get(word) or word.removesuffix("s") for word in words) + dimension


def _number(text: str) -> Fraction | None:
    """The exact value of a number, however it is written; None for anything else."""
    if _DECIMAL.fullmatch(text):
        digits = text.replace(",", "").replace(" ", "")
        return Fraction(digits) if any("0" <= character <= "9" for character in digits) else None
    if not (found := _FRACTION.fullmatch(text)):
        return None
    sign, whole, numerator, denominator = found.groups()[:4] if found[4] else found.groups()[4:]
    if int(denominator) == 0 or (whole and numerator.startswith("-")):
        return None
    value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    return -value if sign == "-" else value
