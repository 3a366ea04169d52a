"""The exact value of an expression of numbers, brackets, percent and `+ - * / ^`.

Nothing is handed to an interpreter and every size is bounded: the expressions come from a policy, which may write
anything, power towers included.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul, sub

_NUMBER = re.compile(r"(?=\.?\d)(?!0\d)(?:\d{1,20}|\d{1,3}(?:,\d{3}){1,6})?(?:\.\d{1,20})?")
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3}
_OPERATIONS = {"+": add, "-": sub, "*": mul}
_SYMBOLS = frozenset([*_BINDING, "(", ")", "%"])
_END = ""
_MAX_TOKENS = 100
_MAX_POWER_BITS = 4096
_MAX_DECIMALS = 10
"""What a calculator prints beyond is its own rounding error: 0.5 - 0.4 = 0.09999999999999998."""


@dataclass(frozen=True)
class Expression:
    """What an expression comes to."""

    value: Fraction | None
    """None where it divides by zero."""
    operands: tuple[Fraction, ...]
    """Its numbers, sorted and unsigned, without 0 and 1: calculating with those changes little."""
    place: Fraction
    """What one more in the last digit of a lone number would add, such as 1/100 for 3.14; 0 for a calculation."""

    @property
    def calculates(self) -> bool:
        """Whether it is more than a number."""
        return self.place == 0


def is_arithmetic(token: str) -> bool:
    """Return whether a token can be part of an expression; 007 and 3:45 are no numbers."""
    return token in _SYMBOLS or bool(_NUMBER.fullmatch(token))


def evaluate(tokens: Sequence[str]) -> Expression | None:
    """Return what all the tokens together come to; None where they are no expression, or one too large."""
    if len(tokens) > _MAX_TOKENS:
        return None
    reader = _Reader([*tokens, _END])
    try:
        value = reader.expression()
        reader.expect(_END)
    except _UnreadableError:
        return None
    operands = tuple(sorted(number for number in reader.numbers if number not in (0, 1)))
    return Expression(value, operands, Fraction(0) if reader.calculates else _place(tokens))


def _place(tokens: Sequence[str]) -> Fraction:
    decimals = sum(len(token.partition(".")[2]) for token in tokens)
    return Fraction(1, 10 ** (min(decimals, _MAX_DECIMALS) + 2 * tokens.count("%")))


class _UnreadableError(Exception):
    """The tokens are no expression, or one too large."""


class _Reader:
    """Operator-precedence parser; a value is None where it divides by zero."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.numbers: list[Fraction] = []
        self.calculates = False
        self._tokens = tokens
        self._position = 0

    def expression(self, binding: int = 0) -> Fraction | None:
        """Read an operand and all that operators tighter than `binding` join to it."""
        value = self._operand()
        while _BINDING.get(operator := self._tokens[self._position], 0) > binding:
            self._position += 1
            # Powers are taken from the right: 2^3^2 is 2^9.
            right = self.expression(_BINDING[operator] - (operator == "^"))
            self.calculates = True
            value = None if value is None or right is None else _calculate(operator, value, right)
        return value

    def expect(self, token: str) -> None:
        """Read this token."""
        if self._tokens[self._position] != token:
            raise _UnreadableError
        self._position += 1

    def _operand(self) -> Fraction | None:
        token = self._tokens[self._position]
        self._position += 1
        if token == "-":
            value = self.expression(_BINDING["*"])
            return None if value is None else -value
        if token == "(":
            value = self.expression()
            self.expect(")")
            return value
        return self._number(token)

    def _number(self, token: str) -> Fraction:
        if not _NUMBER.fullmatch(token):
            raise _UnreadableError
        number = Fraction(token.replace(",", ""))
        self.numbers.append(number)
        if self._tokens[self._position] != "%":
            return number
        self._position += 1
        return number / 100


def _calculate(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    if operator == "/":
        return left / right if right else None
    if operator == "^":
        return _power(left, right)
    value: Fraction = _OPERATIONS[operator](left, right)
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = base.numerator.bit_length() + base.denominator.bit_length()
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_POWER_BITS // bits:
        raise _UnreadableError
    return Fraction(base**exponent.numerator)
