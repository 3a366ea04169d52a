r"""Values of ordinary expressions, such as `3\cdot 2^5`, `\frac{1+\sqrt5}{2}` and `x^2-4`, without computer algebra.

Most answers need no more, and a value here takes microseconds where algebra takes milliseconds. Only what every reader
of LaTeX reads alike is understood; for everything else there is no value, and algebra decides.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from zlib import crc32

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\(?:frac|sqrt|cdot|times|div|pi)(?![a-zA-Z]))"
    r"|(?P<letter>[a-zA-Z])|(?P<sign>[-+*/^(){}!]))\s*"
)
_NOT_VARIABLES = frozenset("deiI")
r"""`d` may be a differential, `i` and `I` are the imaginary unit, and `e` has a value."""
_CONSTANTS = {r"\pi": math.pi, "e": math.e}
_MAX_CHARACTERS = 600
_MAX_DEPTH = 30
_MAX_BITS = 4096
_MAX_FACTORIAL = 200
_ROUNDING = 2.0**-50


class _NoValueError(Exception):
    """The expression is not understood, or has no value at this point."""


@dataclass(frozen=True, slots=True)
class Approximation:
    """A real number that is known to within an error."""

    value: float
    error: float


Value = Fraction | Approximation
"""Exact where it is rational and computed without roots; otherwise an approximation."""


def exact_value(latex: str) -> Fraction | None:
    """Return the value of a constant expression; None if it is not known exactly."""
    value = value_at(latex, {})
    return value if isinstance(value, Fraction) else None


def differ(latex: str, other: str) -> bool:
    """Tell whether two expressions certainly have different values, for some values of their variables at least.

    False proves nothing: the expressions may be equal, or not understood.
    """
    point = _Point()
    first = value_at(latex, point)
    second = None if first is None else value_at(other, point)
    if first is None or second is None:
        return False
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first != second
    try:
        one, two = _approximate(first), _approximate(second)
    except _NoValueError:
        return False
    return abs(one.value - two.value) > 2 * (one.error + two.error) + _ROUNDING * abs(one.value)


def is_understood(latex: str) -> bool:
    """Tell whether an expression has a value here."""
    return value_at(latex, _Point()) is not None


def value_at(latex: str, point: Mapping[str, Fraction]) -> Value | None:
    """Return the value of an expression for given values of its variables; None where it has none."""
    if len(latex) > _MAX_CHARACTERS:
        return None
    try:
        return _Reader(latex, point).value()
    except (_NoValueError, KeyError, OverflowError, ZeroDivisionError):
        return None


class _Point(dict[str, Fraction]):
    """A positive fraction for each letter, always the same."""

    def __missing__(self, letter: str) -> Fraction:
        if letter in _NOT_VARIABLES:
            raise _NoValueError
        bits = crc32(letter.encode("ascii"))
        return Fraction(1009 + bits % 9973, 1000 + (bits >> 16) % 89)


class _Reader:
    """Reads an expression from left to right and computes its value."""

    def __init__(self, latex: str, point: Mapping[str, Fraction]) -> None:
        self._tokens: list[str] = []
        self._is_number: list[bool] = []
        self._point, self._next, self._depth = point, 0, 0
        position = 0
        while position < len(latex):
            match = _TOKEN.match(latex, position)
            if match is None:
                raise _NoValueError
            self._tokens.append(match[match.lastgroup or 0])
            self._is_number.append(match.lastgroup == "number")
            position = match.end()
        self._tokens.append("")
        self._is_number.append(False)

    def value(self) -> Value:
        value = self._sum()
        self._expect("")
        return value

    def _expect(self, token: str) -> None:
        if self._tokens[self._next] != token:
            raise _NoValueError
        self._next += 1

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _NoValueError
        value: Value = Fraction(0)
        is_first = True
        while is_first or self._tokens[self._next] in {"+", "-"}:
            sign = self._tokens[self._next]
            if sign in {"+", "-"}:
                self._next += 1
            term = self._product()
            value = _add(value, _negative(term) if sign == "-" else term)
            is_first = False
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value, is_quotient = self._power(), False
        while True:
            token = self._tokens[self._next]
            if token in {"*", r"\cdot", r"\times"}:
                self._next += 1
                value = _multiply(value, self._power())
            elif token in {"/", r"\div"}:
                self._next += 1
                value, is_quotient = _divide(value, self._power()), True
            elif token in {"", "+", "-", ")", "}"}:
                return value
            else:
                self._check_juxtaposed(is_quotient)
                value = _multiply(value, self._power())

    def _check_juxtaposed(self, is_quotient: bool) -> None:
        r"""`1/2x` has two meanings, `2\frac13` is a mixed number, and `f(x)` may be a function."""
        before, token = self._tokens[self._next - 1], self._tokens[self._next]
        if is_quotient or self._is_number[self._next] or token in {"^", "{", "!"}:
            raise _NoValueError
        if self._is_number[self._next - 1] and token == r"\frac":
            raise _NoValueError
        if before.isalpha() and token == "(":
            raise _NoValueError

    def _power(self) -> Value:
        base = self._operand()
        if self._tokens[self._next] == "!":
            self._next += 1
            return _factorial(base)
        if self._tokens[self._next] != "^":
            return base
        self._next += 1
        token = self._tokens[self._next]
        if token == "{":
            exponent = self._group()
        elif token.isalnum() and len(token) == 1:
            exponent = self._operand()
        else:
            raise _NoValueError
        if self._tokens[self._next] == "^":
            raise _NoValueError
        return _raise(base, exponent)

    def _operand(self) -> Value:
        token, is_number = self._tokens[self._next], self._is_number[self._next]
        self._next += 1
        if is_number:
            return Fraction(token)
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        if token == r"\frac":
            return _divide(self._argument(), self._argument())
        if token == r"\sqrt":
            return _root(self._argument())
        if token in _CONSTANTS:
            return Approximation(_CONSTANTS[token], _ROUNDING)
        if len(token) == 1 and token.isalpha():
            return self._point[token]
        raise _NoValueError

    def _argument(self) -> Value:
        r"""What a command applies to: a group, or one digit as in `\frac12`."""
        token = self._tokens[self._next]
        if token == "{":
            return self._group()
        if len(token) == 1 and token.isalnum():
            return self._operand()
        if len(token) == 2 and token.isdigit() and self._tokens[self._next - 1] == r"\frac":
            # `\frac12`: both arguments were read as one number.
            self._tokens[self._next : self._next + 1] = list(token)
            self._is_number[self._next : self._next + 1] = [True, True]
            return self._operand()
        raise _NoValueError

    def _group(self) -> Value:
        self._expect("{")
        value = self._sum()
        self._expect("}")
        return value


def _approximate(value: Value) -> Approximation:
    if isinstance(value, Approximation):
        return value
    number = float(value)
    return Approximation(number, abs(number) * _ROUNDING)


def _checked(value: float, error: float) -> Approximation:
    error += abs(value) * _ROUNDING
    if not math.isfinite(value) or not math.isfinite(error):
        raise _NoValueError
    return Approximation(value, error)


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
        raise _NoValueError
    return value


def _negative(value: Value) -> Value:
    return Approximation(-value.value, value.error) if isinstance(value, Approximation) else -value


def _add(one: Value, other: Value) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return _bounded(one + other)
    if one == 0 or other == 0:
        return other if one == 0 else one
    first, second = _approximate(one), _approximate(other)
    return _checked(first.value + second.value, first.error + second.error)


def _multiply(one: Value, other: Value) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return _bounded(one * other)
    first, second = _approximate(one), _approximate(other)
    error = abs(first.value) * second.error + abs(second.value) * first.error + first.error * second.error
    return _checked(first.value * second.value, error)


def _divide(one: Value, other: Value) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return _bounded(one / other)
    first, second = _approximate(one), _approximate(other)
    smallest = abs(second.value) - second.error
    if smallest <= second.error:
        raise _NoValueError
    quotient = first.value / second.value
    return _checked(quotient, (first.error + abs(quotient) * second.error) / smallest)


def _factorial(value: Value) -> Fraction:
    if not isinstance(value, Fraction) or value not in range(_MAX_FACTORIAL + 1):
        raise _NoValueError
    return Fraction(math.factorial(int(value)))


def _raise(base: Value, exponent: Value) -> Value:
    if not isinstance(exponent, Fraction):
        raise _NoValueError
    if exponent.denominator == 1 and isinstance(base, Fraction):
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if bits * abs(exponent) > _MAX_BITS or base == 0 >= exponent:
            raise _NoValueError
        return Fraction(base**exponent.numerator)
    start, power = _approximate(base), float(exponent)
    if start.value <= 0 or abs(power) * start.error > start.value / 8:
        raise _NoValueError
    value = start.value**power
    # So close to the base, the relative error is no more than twice what it is in first order.
    return _checked(value, 2 * abs(power) * value * (start.error / start.value) + 4 * value * _ROUNDING)


def _root(value: Value) -> Value:
    if isinstance(value, Fraction):
        if value < 0:
            raise _NoValueError
        over, under = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if over * over == value.numerator and under * under == value.denominator:
            return Fraction(over, under)
    return _raise(value, Fraction(1, 2))
