"""Numbers and units as they are written in answers: exact values, and how many of one unit make another."""

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value and, for a decimal, how many places were written."""

    value: Fraction
    places: int | None
    """Digits after the decimal point; None for anything but a decimal."""

    def equals(self, other: "Number") -> bool:
        """Tell whether two numbers are the same, or one is a decimal that rounds the other."""
        return self.value == other.value or self.rounds(other.value) or other.rounds(self.value)

    def rounds(self, value: Fraction) -> bool:
        """Tell whether this decimal is `value` rounded to its places, for a value that no finite decimal equals."""
        # A finite decimal equals a fraction whose denominator has no prime factors but 2 and 5.
        terminates = 10 ** value.denominator.bit_length() % value.denominator == 0
        if self.places is None or terminates or not self.has_digits(_MIN_DIGITS):
            return False
        return abs(value - self.value) * 2 * Fraction(10) ** self.places <= 1

    def has_digits(self, num_digits: int) -> bool:
        """Tell whether this is a decimal with at least `num_digits` significant digits."""
        return self.places is not None and abs(self.value) * Fraction(10) ** self.places >= 10 ** (num_digits - 1)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts or measures."""

    kind: str
    """Units of the same kind convert into one another: `length^2`; a plain word for what is counted: `apple`."""
    factor: Fraction
    """How many of the kind's base unit it makes."""


DEGREE = Unit("degree", Fraction(1))
PERCENT = Unit("percent", Fraction(1, 100))

_MIN_DIGITS = 3
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)?(?:\.[0-9]*)?")
_FRACTION = re.compile(
    r"([-+]?)(?:([0-9]+) ?)?\\frac\{(-?[0-9]+)\}\{([0-9]+)\}"
    r"|([-+]?)(?:([0-9]+)[ -])?\(?([0-9]+)\)?/\(?([0-9]+)\)?"
)
_SCIENTIFIC = re.compile(r"(.+?)(?:\\(?:times|cdot)10\^\{?(-?[0-9]{1,3})\}?|[eE]([-+]?[0-9]{1,3}))")
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{?([0-9]+)\}?")
_THOUSANDS_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_ONES = "zero one two three four five six seven eight nine ten eleven twelve"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety hundred"
_WORDS = {word: number for number, word in enumerate(f"{_ONES} {_TEENS}".split())} | {
    word: 10 * number for number, word in enumerate(_TENS.split(), start=2)
}


def parse_number(text: str) -> Number | None:
    """Return the exact value of a number, however it is written; None for anything else."""
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, repeated = match.groups()
        value = Fraction(int(whole + fixed or 0)) + Fraction(int(repeated), 10 ** len(repeated) - 1)
        return Number(Fraction(f"{sign}1") * value / 10 ** len(fixed), None)
    if match := _FRACTION.fullmatch(_THOUSANDS_COMMA.sub("", text)):
        return _fraction(*(match.groups()[:4] if match[4] else match.groups()[4:]))
    if (match := _SCIENTIFIC.fullmatch(text)) and _DECIMAL.fullmatch(match[1]) and (mantissa := _decimal(match[1])):
        return Number(mantissa.value * Fraction(10) ** int(match[2] or match[3]), None)
    words = [_WORDS.get(word) for word in text.casefold().split("-")]
    return None if None in words or len(words) > 2 else Number(Fraction(sum(word or 0 for word in words)), None)


def _decimal(text: str) -> Number | None:
    digits = text.replace(",", "").replace(" ", "")
    if not any("0" <= character <= "9" for character in digits):
        return None
    _, point, places = digits.partition(".")
    return Number(Fraction(digits), len(places) if point else None)


def _fraction(sign: str | None, whole: str | None, numerator: str, denominator: str) -> Number | None:
    if int(denominator) == 0 or (whole and numerator.startswith("-")):
        return None
    value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    return Number(-value if sign == "-" else value, None)


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
_UNITS_OF = {
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
_UNITS = {
    name + plural: Unit(kind, Fraction(factor))
    for kind, line in _UNITS_OF.items()
    for names, factor in re.findall(r"([a-z ]+):([0-9/]+)", line)
    for name in names.split()
    for plural in ("", "s")
}
_ALIASES = {"mph": "miles per hour", "kph": "km per hour"}
_PREFIXES = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
# Words behind a number that change its value.
_NOT_UNIT_WORDS = (
    "base dozen half third quarter hundred thousand million billion trillion percent plus minus times over divided "
    "squared cubed factorial more less than fewer not and or but to is if cos cot csc exp gcd infty lcm ln log max mod "
    "pi sin sqrt tan"
)
_NOT_UNITS = frozenset(_NOT_UNIT_WORDS.split())


def split_unit(latex: str) -> tuple[str, Unit | None]:
    """Return a value and the unit behind it (or the currency before it); the whole text and None without a unit."""
    return _angle_or_percent(latex) or _money(latex) or _unit_in_words(latex) or (latex, None)


def _angle_or_percent(latex: str) -> tuple[str, Unit] | None:
    if match := _PERCENT.fullmatch(latex):
        return match[1], PERCENT
    if match := _TEMPERATURE.fullmatch(latex):
        return match[1], Unit(f"degree {match[2]}", Fraction(1))
    if (match := _DEGREES.fullmatch(latex)) and not _ANGLE_INSIDE.search(match[1]):
        return match[1], DEGREE
    if match := _RADIANS.fullmatch(latex):
        return match[1], Unit("radian", Fraction(1))
    return None


def _money(latex: str) -> tuple[str, Unit] | None:
    """An amount of money, in total or per something."""
    if not (match := _CURRENCY.fullmatch(latex)):
        return None
    value, unit = split_unit(match["amount"] or match["sign"] + match["value"])
    sign = match["before"] or match["after"]
    money = _UNITS["dollar" if "$" in sign else "euro" if sign == "€" else "sterling"]
    if unit and unit.kind.startswith("per "):
        return value, Unit(f"{money.kind} {unit.kind}", money.factor * unit.factor)
    return value, unit or money


def _unit_in_words(latex: str) -> tuple[str, Unit] | None:
    if match := _STYLED_UNIT.fullmatch(latex):
        value, words, inner, outer = match.groups()
        power, attached = inner or outer, False
    elif match := _PLAIN_UNIT.fullmatch(latex):
        value, space, words, power = match.groups()
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
    known = all(word in _UNITS or word == "per" for word in words)
    if not words or (attached and not known) or not _NOT_UNITS.isdisjoint(words):
        return None
    if words.count("per") > 1 or words[-1] == "per":
        return None
    if not known and any(len(word) < 3 for word in words if word != "of"):
        return None
    if len(words) == 1 and known:
        unit = _UNITS[words[0]]
        return Unit(unit.kind + dimension, unit.factor ** int(dimension[1:] or 1))
    if len(words) in {2, 3} and words[-2] == "per":
        *over, under = (_UNITS.get(word, Unit(word.removesuffix("s"), Fraction(1))) for word in words if word != "per")
        kind = " ".join([*(unit.kind for unit in over), "per", under.kind])
        return Unit(kind, (over[0].factor if over else 1) / under.factor)
    return Unit(" ".join(word.removesuffix("s") for word in words) + dimension, Fraction(1))
