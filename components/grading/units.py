"""Units of the numbers in answers, and their conversion.

The units of measurement are a closed list. All other words after a number name the counted things and are ignored,
except for a closed list of words that may change the value.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile
from string import ascii_lowercase

from components.grading.quantities import NUMBER_WORDS, parse_number_in_words
from components.grading.vocabulary import FUNCTION_WORDS, STYLE, STYLED


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number."""

    kind: str
    """Units of one kind, such as `length^2`, can be converted; all counted things are of the kind `things`."""
    factor: Fraction
    """Its size in base units of the kind."""


DEGREE = Unit("degree", Fraction(1))
PERCENT = Unit("percent", Fraction(1, 100))


@dataclass(frozen=True, slots=True)
class Context:
    """What the question says about words and letters in the answer."""

    asked: frozenset[str] = frozenset()
    """Words after "how many", without a plural s: a word such as `dozen` then names the counted things."""
    symbols: frozenset[str] = frozenset()
    """Letters that are variables, not units."""


NO_CONTEXT = Context()

_POWER = r"(?:(?:\s*\^\s*\{?\s*|(?<=[a-zA-Z]))([23])\s*\}?)?"  # "5 feet 3" are not cubic feet
_STYLED_UNIT = re.compile(r"(.*?[0-9}a-zA-Z)])\s*" + STYLE + r"\{([a-zA-Z/. -]+)" + _POWER + r"\}" + _POWER)
_PLAIN_UNIT = re.compile(r"(.*?[0-9})])(\s*)([a-zA-Z][a-zA-Z/. -]*)" + _POWER)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_PERCENT = re.compile(r"(.+?)\s*(?:\\?%|(?:" + STYLE + r"\{)?\s*(?:per ?cent|pct|percentage)\b\s*(?:points?)?\s*\}?)")
_DEGREES = re.compile(r"(.+?)\s*(?:\\degree|(?:" + STYLE + r"\{)?\s*\bdegrees?\s*\}?)\s*")
_TEMPERATURE = re.compile(
    r"(.+?)\s*(?:\\degree|(?:" + STYLE + r"\{)?\s*\bdegrees?)\s*(?:" + STYLE + r"\{)?\s*"
    r"(C|F|Celsius|Fahrenheit)\s*\}?"
)
_ANGLE_INSIDE = re.compile(r"degree|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_TAKES_LETTER = re.compile(r"\^\{?[0-9]+\}?$|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)")
_SUM = re.compile(r"[0-9a-zA-Z)}]\s*[-+]")
_CURRENCY = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<before>\\\$|\\pounds?(?![a-zA-Z])|[€£])\s*(?P<value>.+)"
    r"|(?P<amount>.+?)\s*(?P<after>\\\$|[€£])"
)
_MAY_HAVE_UNIT = re.compile(r"[^\W\d_]|[%€£]|\\\$")
_RADIANS = re.compile(r"(.+?)\s*(?:" + STYLE + r"\{)?\s*\b(?:radians?|rad)\s*\}?")

_UNITS_OF = {
    "length": "mm millimeter millimetre:1/1000 cm centimeter centimetre:1/100 dm decimeter decimetre:1/10 "
    "m meter metre:1 km kilometer kilometre:1000 in inch inches:127/5000 ft foot feet:381/1250 yd yard:1143/1250 "
    "mi mile:201168/125",
    "area": "acre:1 hectare:312500000/126464",
    "mass": "mg milligram:1/1000000 g gram:1/1000 kg kilogram:1 "
    "oz ounce:45359237/1600000000 lb pound:45359237/100000000 ton:45359237/50000 tonne:1000",
    "volume": "ml milliliter millilitre:1/1000 cl centiliter centilitre:1/100 l liter litre:1 kl kiloliter:1000",
    "measure": "teaspoon tsp:1/768 tablespoon tbsp:1/256 cup:1/16 pint pt:1/8 quart qt:1/4 gallon gal:1",
    "time": "ms millisecond:1/1000 s sec second:1 min minute:60 h hr hour:3600 day:86400 week wk:604800",
    "years": "month:1/12 yr year:1 decade:10 century centuries:100",
    "money": "cent:1/100 dollar buck usd:1",
    "euros": "euro eur:1",
    "pounds sterling": "sterling gbp:1",
    "yuan": "yuan rmb:1",
    "yen": "yen jpy:1",
    "rupees": "rupee:1",
    "pesos": "peso:1",
    "energy": "joule:1 kilojoule kj:1000 kwh:3600000",
    "heat": "calorie cal:1 kilocalorie kcal:1000",
    "power": "watt:1 kilowatt kw:1000",
    "data": "byte:1 kilobyte kb:1000 megabyte mb:1000000 gigabyte gb:1000000000 terabyte tb:1000000000000",
    "frequency": "hertz hz:1",
    "force": "newton:1",
    "charge": "volt:1",
    "current": "ampere amp:1",
    "resistance": "ohm:1",
    "temperature": "kelvin:1",
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
_ALIASES = {"mph": "miles per hour", "kph": "km per hour", "kmh": "km per hour", "mpg": "miles per gallon"}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}

# Words after a unit that do not change the value.
_ENDINGS = (
    *("in total", "in all", "in length", "total", "altogether", "left", "remaining", "each", "now", "needed", "so far"),
    *("old", "long", "wide", "tall", "high", "deep", "away", "apart", "ago", "later", "more", "fewer"),
)
_THINGS = Unit("things", Fraction(1))
_BEFORE_THINGS = {"total", "more", "fewer"}
_CAPITALS = frozenset("MSGH")
_MAX_UNIT_WORDS = 8


def split_unit(latex: str, context: Context = NO_CONTEXT) -> tuple[str, Unit | None]:
    """Return a value and the unit after it, or the currency before it; the whole text and None if it has no unit."""
    if not _MAY_HAVE_UNIT.search(latex):
        return latex, None
    return _angle_or_percent(latex) or _money(latex, context) or _unit_in_words(latex, context) or (latex, None)


def _angle_or_percent(latex: str) -> tuple[str, Unit] | None:
    """The value and unit of a percentage, a temperature or an angle; None for any other text."""
    # The patterns are slow, so a quick test precedes each.
    if ("%" in latex or "cent" in latex or "pct" in latex) and (match := _PERCENT.fullmatch(latex)):
        return match[1], PERCENT
    if "degree" in latex:
        if match := _TEMPERATURE.fullmatch(latex):
            return match[1], Unit(f"degree {match[2][0]}", Fraction(1))
        if (match := _DEGREES.fullmatch(latex)) and not _ANGLE_INSIDE.search(match[1]):
            return match[1], DEGREE
    if "rad" in latex and (match := _RADIANS.fullmatch(latex)):
        return match[1], Unit("radian", Fraction(1))
    return None


def _money(latex: str, context: Context) -> tuple[str, Unit] | None:
    """The value and unit of an amount with a currency sign, such as `$5` or `$5 per hour`; None for any other text."""
    match = _CURRENCY.fullmatch(latex)
    if not match:
        return None
    value, unit = split_unit(match["amount"] or match["sign"] + match["value"], context)
    sign = match["before"] or match["after"]
    money = _UNITS["dollar" if "$" in sign else "euro" if sign == "€" else "sterling"]
    if unit and unit.kind.startswith("per "):
        return value, Unit(f"{money.kind} {unit.kind}", money.factor * unit.factor)
    return value, unit or money


def _unit_in_words(latex: str, context: Context) -> tuple[str, Unit] | None:
    """The value and unit of a number with a unit or a counted thing after it, such as `5 cm` or `5 apples`."""
    if match := _STYLED_UNIT.fullmatch(latex):
        value, words, inner_power, outer_power = match.groups()
        power, is_attached = inner_power or outer_power, False
    elif match := _PLAIN_UNIT.fullmatch(latex):
        value, space, words, power = match.groups()
        is_attached = not space
        if len(words) == 1 and _is_symbol(words, value):
            return None
    else:
        return _number_in_words_and_unit(latex, context)
    unit = _unit(words, power, context, is_attached=is_attached)
    if unit and any(character.isdigit() for character in value):
        return value.strip(), unit
    return _number_in_words_and_unit(latex, context)


def _is_symbol(letter: str, value: str) -> bool:
    r"""Whether the text before a letter shows that it is a variable: `3 + 5 m`, `m^2 5 m`, `\cos^2 m`, `\ln 2m`."""
    letters = _COMMAND.sub(" ", STYLED.sub(" ", value))
    return letter in letters or bool(_TAKES_LETTER.search(value) or _SUM.search(value))


def _number_in_words_and_unit(latex: str, context: Context) -> tuple[str, Unit] | None:
    """The value and unit of a number in words: "twenty apples", "half an hour", "5 million people"."""
    plain = STYLED.sub(r" \1 ", latex)
    words = plain.split()
    if len(words) > _MAX_UNIT_WORDS or NUMBER_WORDS.isdisjoint(plain.casefold().replace("-", " ").split()):
        return None
    for place in range(1, len(words)):
        value, rest = " ".join(words[:place]), words[place:]
        if value.casefold() == "half" and rest[0] in {"a", "an"} and len(rest) > 1:
            rest = rest[1:]
        is_number = re.fullmatch("[0-9][0-9.,]*", value) or parse_number_in_words(value)
        if is_number and (unit := _unit(" ".join(rest), None, context, is_attached=False)):
            return value, unit
    return None


def _unit(written: str, power: str | None, context: Context, *, is_attached: bool) -> Unit | None:
    """The unit that words such as `miles per hour` name, if any; `is_attached` says that no space precedes them."""
    plain = " ".join(written.replace("/", " per ").replace("-", " ").replace(".", "").lower().split())
    for ending in _ENDINGS:
        plain = plain.removesuffix(f" {ending}")
    if plain in _ENDINGS and not power and not is_attached:
        return _THINGS
    plain = _ALIASES.get(plain, plain)
    words = ["per" if word in {"a", "an"} else word for word in plain.split()]  # "dollars an hour"
    # `5\text{ M}` is not a length, and `5apples` has no unit.
    is_unknown = written.strip() in _CAPITALS or (is_attached and len(words) == 1 and words[0] not in _UNITS)
    if not 0 < len(words) <= _MAX_UNIT_WORDS or words.count("per") > 1 or is_unknown:
        return None
    if "per" not in words:
        return _simple_unit(words, power or "", context)
    place = words.index("per")
    over, under = words[:place], words[place + 1 :]
    below = _simple_unit(under, power or "", context) if under else None
    above = _simple_unit(over, "", context) if over else Unit("", Fraction(1))
    if not below or not above:
        return None
    return Unit(f"{above.kind} per {below.kind}".strip(), above.factor / below.factor)


def _simple_unit(words: list[str], power: str, context: Context) -> Unit | None:
    """The unit that words without "per" name: a measure, or `things` for counted things; None for other words."""
    if len(words) > 1 and words[0] in _BEFORE_THINGS:
        words = words[1:]
    has_exponent = power != ""
    if len(words) > 1 and words[0] in _POWERS and not has_exponent:
        power, words = _POWERS[words[0]], words[1:]
    dimension = f"^{power}" if power else ""
    # "of" may be between words: "cups of tea".
    counted = [word for place, word in enumerate(words) if word != "of" or place in (0, len(words) - 1)]
    are_things = [
        not context.symbols.issuperset(word) and (word.removesuffix("s") in context.asked or _may_be_thing(word))
        for word in counted
    ]
    # `gallons of milk` and `dollars profit` are units; a symbol such as `m` before another word is not.
    is_unit = len(words) == 1 or (not has_exponent and len(words[0]) > 2 and all(are_things[1:]))
    if is_unit and (unit := _UNITS.get(words[0])):
        return Unit(unit.kind + dimension, unit.factor ** int(power or 1))
    if power:
        return Unit(f"unit{dimension}", Fraction(1)) if words in (["unit"], ["units"]) else None
    return _THINGS if all(are_things) else None


# Beginnings of words that change the value of a number before them: doubled, halves, squares, pairs, scores ...
_CHANGES = re.compile(
    "doubl|tripl|trebl|quadrupl|quintupl|halv|half|squar|cub(?:e|ic)|pair|coupl|scores?$|gross|dozen|grand$|reciproc|inver|"
    "opposit|negat|minus|plus|factorial|roots?$|power|percent|permil|mille$|modul|remain|approx|time|bases?$|multip|divid|subtract|"
    "lakh|crore|[a-z]*fold$|add|increas|decreas|zero|infinit|nearly|equiv|exclud|except|error|guess"
)
_NUMBER_WORDS = NUMBER_WORDS - {"point"}
_FUNCTION_WORDS = frozenset(FUNCTION_WORDS.split())
FORMULA = re.compile(r"\$\$?([^$]{1,300})\$\$?|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)
"""A formula in a question; one of its groups has the content."""
_PROSE = re.compile(r"(?<![a-zA-Z])[a-zA-Z]+\s+[a-zA-Z]{2,}|[a-zA-Z]{2,}\s+[a-zA-Z]+|[a-zA-Z]{5,}")
_HOW_MANY = re.compile(r"\bhow (?:many|much)((?: [a-z]+){1,5})")
_ENDS_ASKED = _FUNCTION_WORDS - {"more", "fewer", "times", "of", "different", "possible"}
_MAX_QUESTION_CHARACTERS = 20_000


@lru_cache(maxsize=512)
def read_question(question: str, gold: str) -> Context:
    """Return the context that a question, which may be empty, and its expected answer give to an answer."""
    if not question and not _MAY_HAVE_UNIT.search(gold):
        return NO_CONTEXT
    question = question[:_MAX_QUESTION_CHARACTERS]
    asked = {
        word.removesuffix("s")
        for match in _HOW_MANY.finditer(question.lower())
        for word in takewhile(lambda word: word not in _ENDS_ASKED, match[1].split())
    }
    return Context(frozenset(asked), _letters_in_formulas(question) | _factors_in_gold(gold, question))


def _letters_in_formulas(question: str) -> frozenset[str]:
    """The letters in the formulas of a question."""
    formulas = (match[1] or match[2] or match[3] for match in FORMULA.finditer(question))
    # Without commands; a "formula" of prose is the text between two amounts in dollars.
    texts = (_COMMAND.sub(" ", STYLED.sub(" ", formula)) for formula in formulas)
    return frozenset(letter for text in texts if not _PROSE.search(text) for letter in text if letter.isalpha())


def _may_be_thing(word: str) -> bool:
    """Whether a word may name counted things, and does not change the value of the number before it."""
    is_word = len(word) > 2 and word.isalpha() and word not in _FUNCTION_WORDS and word not in _UNITS
    return is_word and not {word, word.removesuffix("s")} & _NUMBER_WORDS and not _CHANGES.match(word)


_SYMBOL = re.compile(STYLE + r"\{[^{}]*\}|(?<=[0-9})])(\s*)([a-zA-Z]{1,3})(?![a-zA-Z])")


def _factors_in_gold(gold: str, question: str) -> frozenset[str]:
    """The letters after numbers of an expected answer that are variables, as in `6s^2` and `2 xyz`."""
    symbols = set[str]()
    for space, letters in _SYMBOL.findall(gold):
        is_variable = len(letters) == 1 and not space and not question
        word = letters.lower()
        is_product_of_variables = _may_be_thing(word) and word in ascii_lowercase and word not in question.lower()
        if is_variable or is_product_of_variables:
            symbols.update(letters)
    return frozenset(symbols)


def with_symbols_apart(latex: str, symbols: frozenset[str]) -> str:
    """Return the text with braces around variables that could be read as units: `6{s}^2`."""

    def in_braces(match: re.Match[str]) -> str:
        letters = match[2]
        is_symbol = letters and letters.lower() in _UNITS and symbols.issuperset(letters)
        return f"{{{letters}}}" if is_symbol else match[0]

    return _SYMBOL.sub(in_braces, latex)
