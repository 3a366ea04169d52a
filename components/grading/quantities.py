"""The exact values of numbers in answers, written in digits or in words."""

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value and, for a decimal, its number of decimal places."""

    value: Fraction
    places: int | None
    """Digits after the decimal point; None for anything but a decimal."""

    def equals(self, other: "Number") -> bool:
        """Tell whether two numbers are the same, or one is the other rounded to a decimal."""
        return self.value == other.value or self.rounds(other.value) or other.rounds(self.value)

    def rounds(self, value: Fraction) -> bool:
        """Tell whether this decimal is `value` rounded to its places; False for a value with a finite decimal form."""
        # A fraction has a finite decimal form if its denominator has no prime factors other than 2 and 5.
        is_finite = 10 ** value.denominator.bit_length() % value.denominator == 0
        if self.places is None or is_finite or not self.has_digits(_MIN_DIGITS):
            return False
        return abs(value - self.value) * 2 * Fraction(10) ** self.places <= 1

    def has_digits(self, num_digits: int) -> bool:
        """Tell whether this is a decimal with at least `num_digits` significant digits."""
        return self.places is not None and abs(self.value) * Fraction(10) ** self.places >= 10 ** (num_digits - 1)


_MIN_DIGITS = 3
_SIGNED_DIGITS = r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)?(?:\.[0-9]*)?"
_DECIMAL = re.compile(_SIGNED_DIGITS)
# A mixed number has a space or a LaTeX fraction: `1-1/2` is a difference.
_FRACTION = re.compile(
    r"([-+]?)(?:([0-9]+) ?)?\\frac\{(-?[0-9]+)\}\{([0-9]+)\}"
    r"|([-+]?)(?:([0-9]+) )?([0-9]+)/([0-9]+)"
)
_IN_BRACKETS = re.compile(r"(?<![0-9)}])\(([0-9]+(?:/[0-9]+)?)\)(?![0-9({])")
_SCIENTIFIC = re.compile(rf"({_SIGNED_DIGITS})(?:\\(?:times|cdot)10\^\{{?(-?[0-9]{{1,3}})\}}?|[eE]([-+]?[0-9]{{1,3}}))")
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{?([0-9]+)\}?")
_THOUSANDS_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def parse_number(text: str) -> Number | None:
    """Return the exact value of a decimal, a fraction, a mixed number or scientific notation; None for other text."""
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, repeated = match.groups()  # 0.1666... is (1 + 6/9) / 10
        value = Fraction(int(whole + fixed or 0)) + Fraction(int(repeated), 10 ** len(repeated) - 1)
        return Number(Fraction(f"{sign}1") * value / 10 ** len(fixed), None)
    if match := _FRACTION.fullmatch(_without_brackets(text)):
        in_latex, in_ascii = match.groups()[:4], match.groups()[4:]
        return _fraction(*(in_latex if match[4] else in_ascii))
    if (match := _SCIENTIFIC.fullmatch(text)) and (mantissa := _decimal(match[1])):
        return Number(mantissa.value * Fraction(10) ** int(match[2] or match[3]), None)
    return None


def _without_brackets(text: str) -> str:
    """A fraction without brackets around its numbers and without thousands separators."""
    text = _THOUSANDS_COMMA.sub("", text)
    # A bracket after a digit means a product, as in 3(1/2), so it stays.
    if text.startswith(("(", "-", "+")) or "/(" in text:
        text = _IN_BRACKETS.sub(r"\1", text)
    return text


def _decimal(text: str) -> Number | None:
    digits = text.replace(",", "").replace(" ", "")
    if not any("0" <= character <= "9" for character in digits):
        return None
    _, point, places = digits.partition(".")
    return Number(Fraction(digits), len(places) if point else None)


def _fraction(sign: str | None, whole: str | None, numerator: str, denominator: str) -> Number | None:
    """The value of a fraction, or of a mixed number if it has a whole part; the fraction must then be below 1."""
    if int(denominator) == 0 or (whole and not 0 <= int(numerator) < int(denominator)):
        return None
    value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    return Number(-value if sign == "-" else value, None)


_ONES = "zero one two three four five six seven eight nine"
_TEN_TIMES = "twenty thirty forty fifty sixty seventy eighty ninety"
_DIGITS = {word: number for number, word in enumerate(_ONES.split())}
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = {word: 10 * number for number, word in enumerate(_TEN_TIMES.split(), start=2)}
_SMALL = _DIGITS | {word: number for number, word in enumerate(_TEENS.split(), start=10)} | _TENS
_SCALES = {"trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 10**3, "hundred": 10**2}
_GROUPS = _SCALES | {"dozen": 12}
_ORDINALS = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth twentieth"
)
_PART = {word: number for number, word in enumerate(_ORDINALS.split(), start=3)}
_PART |= {"half": 2, "quarter": 4, "hundredth": 100, "thousandth": 1000, "millionth": 10**6}
_PARTS = {f"{word}s": number for word, number in _PART.items() if word != "half"} | {"halves": 2}
NUMBER_WORDS = frozenset({*_SMALL, *_GROUPS, *_PART, *_PARTS, "point", "minus", "negative"})
"""Words of numbers, which change the value of a number that they follow."""
_COUNT = re.compile("[0-9]{1,3}")
_MAX_WORDS = 24


def parse_number_in_words(text: str) -> Number | None:
    """Return the value of a number with words in it: "forty-two", "two and a half", "1.5 million"; None for other text.

    Words in a wrong order, such as "two-three" and "hundred and one five", are not a number.
    """
    words = text.casefold().split()
    if len(words) > _MAX_WORDS:
        return None
    words = _without_hyphens(words)
    if NUMBER_WORDS.isdisjoint(words):
        return None
    if words[0] in {"minus", "negative"}:
        number = parse_number(" ".join(words[1:])) or _unsigned(words[1:])  # "minus 5" or "minus five"
        return Number(-number.value, number.places) if number and number.value > 0 else None
    return _unsigned(words)


def _without_hyphens(words: list[str]) -> list[str]:
    """The words, split at hyphens that may join number words: `twenty-three`, `three-fourths`, `two-and-a-half`."""
    split = []
    for word in words:
        parts = word.split("-")
        split += parts if all(map(_may_be_joined, parts, parts[1:])) else [word]
    return split


def _may_be_joined(word: str, next_word: str) -> bool:
    """Whether there may be a hyphen between two words of a number."""
    if word in _TENS and next_word in _DIGITS:
        return next_word != "zero"
    return next_word in _PART | _PARTS | _GROUPS or "and" in (word, next_word) or "a" in (word, next_word)


def _unsigned(words: list[str]) -> Number | None:
    """The value of a number in words without a sign."""
    if not words:
        return None
    if "point" in words:
        place = words.index("point")
        whole = _cardinal(words[:place]) if place else 0
        digits = [_DIGITS.get(word) for word in words[place + 1 :]]
        if whole is None or not digits or None in digits:
            return None
        return _decimal(f"{whole}.{''.join(map(str, digits))}")
    for read in (_cardinal, _part, _mixed, _multiple):
        if (value := read(words)) is not None:
            return Number(Fraction(value), None)
    return None


def _cardinal(words: list[str]) -> int | None:
    """The value of a whole number: groups of up to three digits, each with its scale, from trillions to hundreds."""
    total = 0
    for scale, size in _SCALES.items():
        if scale not in words:
            continue
        place = words.index(scale)
        is_single = not total and words[:place] in ([], ["a"])  # "hundred" or "a hundred"
        count = 1 if is_single else _cardinal(words[:place])
        # "nine thousand nine hundred", but not "ten hundred thousand": a smaller scale never precedes a larger one.
        if not count or count >= (100 if size == 100 else 1000):
            return None
        total, words = total + count * size, words[place + 1 :]
        if words[:1] == ["and"]:
            words = words[1:]
            small = _small(words)
            return total + small if small else None
        if not words:
            return total
    small = _small(words)
    if small is None or (small == 0 and total):  # "hundred zero" is not a number
        return None
    return total + small


def _small(words: list[str]) -> int | None:
    """The value of a whole number below 100."""
    if len(words) == 2 and words[0] in _TENS and _DIGITS.get(words[1]):
        return _TENS[words[0]] + _DIGITS[words[1]]
    return _SMALL.get(words[0]) if len(words) == 1 else None


def _part(words: list[str]) -> Fraction | None:
    """The value of a fraction: half, a third, 3 fourths, twenty-one hundredths."""
    *count, name = words
    if name in _PART:
        is_one = count in (["a"], ["one"], ["1"]) or words == ["half"]
        return Fraction(1, _PART[name]) if is_one else None
    if name not in _PARTS:
        return None
    number = int(count[0]) if len(count) == 1 and _COUNT.fullmatch(count[0]) else _small(count)
    return None if number is None else Fraction(number, _PARTS[name])


def _mixed(words: list[str]) -> Fraction | None:
    """The value of a mixed number: two and a half, 2 and three quarters."""
    if "and" not in words:
        return None
    place = len(words) - words[::-1].index("and") - 1  # of the last "and"
    whole = int(words[0]) if place == 1 and _COUNT.fullmatch(words[0]) else _cardinal(words[:place])
    part = _part(words[place + 1 :]) if place + 1 < len(words) else None
    return whole + part if whole is not None and part and part < 1 else None


def _multiple(words: list[str]) -> Fraction | None:
    """The value of a number of hundreds, millions or dozens: 2.5 million, 5 hundred thousand, half a dozen."""
    *count, group = words
    if group not in _GROUPS:
        return None
    if count in ([], ["a"]):
        return Fraction(_GROUPS[group])
    if count == ["half", "a"]:
        return Fraction(_GROUPS[group], 2)
    if len(count) == 2 and count[1] == "hundred" and group in {"thousand", "million", "billion", "trillion"}:
        value = _multiple(count) or None  # "zero hundred thousand" is no number
    elif number := parse_number(" ".join(count)):
        value = number.value
    else:
        value = _mixed(count)
    if value is None and group == "dozen" and (cardinal := _cardinal(count)) is not None:
        value = Fraction(cardinal)
    return None if value is None else value * _GROUPS[group]
