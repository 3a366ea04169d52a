"""Numbers as they are written in answers, read exactly."""

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value and, for a decimal, how far it was written out."""

    value: Fraction
    places: int | None
    """Digits after the decimal point; None for what is no decimal."""

    def equals(self, other: "Number") -> bool:
        """Tell whether two numbers are the same, or one is a decimal that rounds the other."""
        return self.value == other.value or self.rounds(other.value) or other.rounds(self.value)

    def rounds(self, value: Fraction) -> bool:
        """Tell whether this decimal is `value` cut to its places, for a value that no decimal can write out."""
        if self.places is None or _terminates(value) or not self.shows(_MIN_DIGITS):
            return False
        return abs(value - self.value) * 2 * Fraction(10) ** self.places <= 1

    def shows(self, num_digits: int) -> bool:
        """Tell whether at least `num_digits` significant digits stand behind the decimal point or before it."""
        return self.places is not None and abs(self.value) * Fraction(10) ** self.places >= 10 ** (num_digits - 1)


_MIN_DIGITS = 3
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)?(?:\.[0-9]*)?")
_FRACTION = re.compile(
    r"([-+]?)(?:([0-9]+) ?)?\\frac\{(-?[0-9]+)\}\{([0-9]+)\}"
    r"|([-+]?)(?:([0-9]+)[ -])?\(?([0-9]+)\)?/\(?([0-9]+)\)?"
)
_SCIENTIFIC = re.compile(r"(.+?)(?:\\(?:times|cdot)10\^\{?(-?[0-9]{1,3})\}?|[eE]([-+]?[0-9]{1,3}))")
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{?([0-9]+)\}?")
_GROUPED_FRACTION = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_ONES = "zero one two three four five six seven eight nine ten eleven twelve"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety hundred"
_WORDS = {word: number for number, word in enumerate(f"{_ONES} {_TEENS}".split())} | {
    word: 10 * number for number, word in enumerate(_TENS.split(), start=2)
}


def read_number(text: str) -> Number | None:
    """Return the exact value of a number, however it is written; None for anything else."""
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    if found := _REPEATING.fullmatch(text):
        return _repeating(*found.groups())
    if found := _FRACTION.fullmatch(_GROUPED_FRACTION.sub("", text)):
        return _fraction(*(found.groups()[:4] if found[4] else found.groups()[4:]))
    if (found := _SCIENTIFIC.fullmatch(text)) and (mantissa := _decimal_or_none(found[1])):
        return Number(mantissa.value * Fraction(10) ** int(found[2] or found[3]), None)
    words = [_WORDS.get(word) for word in text.casefold().split("-")]
    return None if None in words or len(words) > 2 else Number(Fraction(sum(word or 0 for word in words)), None)


def _decimal_or_none(text: str) -> Number | None:
    return _decimal(text) if _DECIMAL.fullmatch(text) else None


def _decimal(text: str) -> Number | None:
    digits = text.replace(",", "").replace(" ", "")
    if not any("0" <= character <= "9" for character in digits):
        return None
    _, point, places = digits.partition(".")
    return Number(Fraction(digits), len(places) if point else None)


def _repeating(sign: str, whole: str, fixed: str, repeated: str) -> Number:
    places = 10 ** len(fixed)
    value = Fraction(int(whole + fixed or 0), places) + Fraction(int(repeated), places * (10 ** len(repeated) - 1))
    return Number(-value if sign == "-" else value, None)


def _fraction(sign: str | None, whole: str | None, numerator: str, denominator: str) -> Number | None:
    if int(denominator) == 0 or (whole and numerator.startswith("-")):
        return None
    value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    return Number(-value if sign == "-" else value, None)


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
