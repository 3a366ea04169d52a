"""Units of measurement behind a value: the same unit in other words, and how many of one make another."""

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts or measures."""

    kind: str
    """Units of the same kind can be converted: `length^2`; a word for what is merely counted: `apple`."""
    factor: Fraction
    """How many of the kind's base unit it makes."""


DEGREE = Unit("degree", Fraction(1))
PERCENT = Unit("percent", Fraction(1, 100))

_STYLES = r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|operatorname)\s*"
_POWER = r"(?:\s*\^?\s*\{?\s*([23])\s*\}?)?"
_STYLED_UNIT = re.compile(r"(.*?[0-9}a-zA-Z)])\s*" + _STYLES + r"\{([a-zA-Z/. ]+)" + _POWER + r"\}" + _POWER)
_PLAIN_UNIT = re.compile(r"(.*?[0-9})])(\s*)([a-zA-Z][a-zA-Z/. ]*)" + _POWER)
_PERCENT = re.compile(r"(.+?)\s*(?:\\?%|(?:" + _STYLES + r"\{)?\s*(?:percent|pct|percentage)\s*(?:points?)?\s*\}?)")
_DEGREES = re.compile(r"(.+?)\s*(?:\\degree|(?:" + _STYLES + r"\{)?\s*\bdegrees?\s*\}?)\s*")
_TEMPERATURE = re.compile(r"(.+?)\s*\\degree\s*(?:" + _STYLES + r"\{)?\s*([CF])\s*\}?")
_ANGLE_INSIDE = re.compile(r"degree|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_CURRENCY = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<before>\\\$|\\pounds?(?![a-zA-Z])|[€£])\s*(?P<value>.+)"
    r"|(?P<amount>.+?)\s*(?P<after>\\\$|[€£])"
)
_RADIANS = re.compile(r"(.+?)\s*(?:" + _STYLES + r"\{)?\s*(?:radians|rad)\s*\}?")
_TABLE = {
    "length": "mm millimeter millimetre:1/1000 cm centimeter centimetre:1/100 m meter metre:1 "
    "km kilometer kilometre:1000 in inch inches:127/5000 ft foot feet:381/1250 yd yard:1143/1250 mi mile:201168/125",
    "mass": "mg milligram:1/1000000 g gram:1/1000 kg kilogram:1 "
    "oz ounce:45359237/1600000000 lb pound:45359237/100000000",
    "volume": "ml milliliter millilitre:1/1000 l liter litre:1",
    "time": "s sec second:1 min minute:60 h hr hour:3600 day:86400 week:604800",
    "money": "cent:1/100 dollar:1 usd:1",
    "euros": "euro:1 eur:1",
    "pounds sterling": "sterling:1",
    "clock am": "am:1",
    "clock pm": "pm:1",
}
_ALIASES = {"mph": "miles per hour", "kph": "km per hour"}
_PREFIXES = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
# Words behind a number that change its value.
_NO_UNITS = frozenset(
    {"base", "dozen", "half", "third", "quarter", "hundred", "thousand", "million", "billion", "trillion", "percent"}
    | {"plus", "minus", "times", "over", "divided", "squared", "cubed", "factorial", "more", "less", "than", "fewer"}
    | {"not", "and", "or", "but", "to", "is", "if", "cos", "cot", "csc", "exp", "gcd", "infty", "lcm", "ln", "log"}
    | {"max", "mod", "pi", "sin", "sqrt", "tan"}
)


def _named() -> dict[str, Unit]:
    found: dict[str, Unit] = {}
    for kind, line in _TABLE.items():
        for group in re.findall(r"([a-z ]+):([0-9/]+)", line):
            for name in group[0].split():
                found[name] = found[name + "s"] = Unit(kind, Fraction(group[1]))
    return found


_NAMED = _named()


def split_unit(latex: str) -> tuple[str, Unit | None]:
    """Return a value and the unit behind it (or the currency before it); no unit where the words are none."""
    return _signed(latex) or _paid(latex) or _worded(latex) or (latex, None)


def _signed(latex: str) -> tuple[str, Unit] | None:
    """Percent and angles."""
    if found := _PERCENT.fullmatch(latex):
        return found[1], PERCENT
    if found := _TEMPERATURE.fullmatch(latex):
        return found[1], Unit(f"degree {found[2]}", Fraction(1))
    if (found := _DEGREES.fullmatch(latex)) and not _ANGLE_INSIDE.search(found[1]):
        return found[1], DEGREE
    if found := _RADIANS.fullmatch(latex):
        return found[1], Unit("radian", Fraction(1))
    return None


def _paid(latex: str) -> tuple[str, Unit] | None:
    """An amount of money, and what it is paid for."""
    if not (found := _CURRENCY.fullmatch(latex)):
        return None
    value, unit = split_unit(found["amount"] or found["sign"] + found["value"])
    sign = found["before"] or found["after"]
    money = _NAMED["dollar" if "$" in sign else "euro" if sign == "€" else "sterling"]
    if unit and unit.kind.startswith("per "):
        return value, Unit(f"{money.kind} {unit.kind}", money.factor * unit.factor)
    return value, unit or money


def _worded(latex: str) -> tuple[str, Unit] | None:
    if found := _STYLED_UNIT.fullmatch(latex):
        value, words, inner, outer = found.groups()
        power, attached = inner or outer, False
    elif found := _PLAIN_UNIT.fullmatch(latex):
        value, space, words, power = found.groups()
        attached = not space
    else:
        return None
    unit = _unit(words, power, attached=attached)
    return (value.strip(), unit) if unit and any(character.isdigit() for character in value) else None


def _unit(written: str, power: str | None, *, attached: bool) -> Unit | None:
    """The unit that some words name; None where they name none."""
    words = _ALIASES.get(written.strip(), written).replace("/", " per ").replace(".", "").lower().split()
    dimension = f"^{power}" if power else ""
    if len(words) > 1 and words[0] in _PREFIXES:
        dimension = _PREFIXES[words.pop(0)]
    known = all(word in _NAMED or word == "per" for word in words)
    if not words or (attached and not known) or any(word in _NO_UNITS for word in words):
        return None
    if words.count("per") > 1 or words[-1] == "per":
        return None
    if not known and any(len(word) < 3 for word in words if word != "of"):
        return None
    if len(words) == 1 and known:
        unit = _NAMED[words[0]]
        return Unit(unit.kind + dimension, unit.factor ** int(dimension[1:] or 1))
    if len(words) in {2, 3} and words[-2] == "per":
        *over, under = (_NAMED.get(word, Unit(word.removesuffix("s"), Fraction(1))) for word in words if word != "per")
        kind = " ".join([*(unit.kind for unit in over), "per", under.kind])
        return Unit(kind, (over[0].factor if over else 1) / under.factor)
    return Unit(" ".join(word.removesuffix("s") for word in words) + dimension, Fraction(1))
