r"""Values of ordinary expressions, such as `3\cdot 2^5`, `\frac{1+\sqrt5}{2}` and `x^2-4`, without computer algebra.

Most answers need no more, and a value here takes microseconds where algebra takes milliseconds. What else an expression
may hold has no value here, and algebra decides.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from zlib import crc32

from components.grading.expression import Node, UnreadableError, parse_expression

_NOT_VARIABLES = frozenset("dI")
"""`d` may be a differential, and `I` the imaginary unit."""
_CONSTANTS = {"pi": math.pi, "e": math.e}
_MAX_CHARACTERS = 600
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


def approximate_value(latex: str) -> float | None:
    """Return about the value of a constant expression; None where it has none here."""
    value = value_at(latex, {})
    try:
        return None if value is None else _approximate(value).value
    except OverflowError:
        return None


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
        return _value(parse_expression(latex), point)
    except (UnreadableError, _NoValueError, KeyError, OverflowError, ZeroDivisionError):
        return None


class _Point(dict[str, Fraction]):
    """A positive fraction for each variable, always the same."""

    def __missing__(self, letter: str) -> Fraction:
        if letter in _NOT_VARIABLES:
            raise _NoValueError
        bits = crc32(letter.encode())
        return Fraction(1009 + bits % 9973, 1000 + (bits >> 16) % 89)


def _value(node: Node, point: Mapping[str, Fraction]) -> Value:
    match node.operation:
        case "number":
            return Fraction(node.value)
        case "name":
            return point[str(node.value)]
        case "constant" if node.value in _CONSTANTS:
            return Approximation(_CONSTANTS[str(node.value)], _ROUNDING)
    if node.operation not in _OPERATIONS:
        raise _NoValueError
    return _OPERATIONS[node.operation](*(_value(operand, point) for operand in node.operands))


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


def _root(value: Value, index: Value) -> Value:
    if not isinstance(index, Fraction) or index.denominator != 1 or index < 2:
        raise _NoValueError
    if isinstance(value, Fraction) and index == 2 and value >= 0:
        over, under = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if over * over == value.numerator and under * under == value.denominator:
            return Fraction(over, under)
    return _raise(value, 1 / index)


_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": lambda *values: reduce(_add, values),
    "*": lambda *values: reduce(_multiply, values),
    "-": _negative,
    "/": _divide,
    "^": _raise,
    "root": _root,
    "factorial": _factorial,
    "group": lambda value: value,
}
