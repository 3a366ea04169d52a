"""Whether two expressions are equal, with sympy behind math-verify's parser of LaTeX.

Imported where it is needed: most verdicts need no algebra, and these libraries take a quarter of a second to import.
Nothing here has a time limit: compare what a model wrote in a process that can be killed.
"""

import logging
import random
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.function import AppliedUndef

from components.grading.quantities import Number

_DEGREE = re.compile(r"\\degree\s*")
_MIN_IRRATIONAL_DIGITS = 5
_MAX_DIGITS = 400
_NUM_POINTS = 8
_MIN_POINTS = 3
_ZERO = sympy.Integer(0)

# It warns, at every call, that nobody limits its time: the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class UnreadableError(Exception):
    """A text is not a mathematical expression."""


def is_readable(latex: str) -> bool:
    """Tell whether a text is a mathematical expression."""
    try:
        _parse(latex)
    except UnreadableError:
        return False
    return True


def equals_decimal(latex: str, decimal: Number) -> bool:
    """Tell whether a decimal is the value of a constant expression, or rounds it."""
    expression = _parse(latex)
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return False
    simple = expression.doit()
    if isinstance(simple, sympy.Rational):
        return Number(Fraction(int(simple.p), int(simple.q)), None).equals(decimal)
    if not decimal.has_digits(_MIN_IRRATIONAL_DIGITS):
        return False
    value = decimal.value
    difference = sympy.N(expression - sympy.Rational(value.numerator, value.denominator), 15)
    return bool(difference.is_real and 2 * abs(difference) * 10 ** (decimal.places or 0) <= 1)


def same_value(latex: str, other: str) -> bool:
    """Tell whether two expressions have the same value for all values of their variables.

    Raises UnreadableError for an expression that cannot be parsed; the second one is parsed first.
    """
    second, first = _parse(other), _parse(latex)
    if first == second:
        return not _has(first, sympy.nan, sympy.zoo)
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr):
        return _equal(first, second)
    return _verified(first, second)


def same_relation(sides: tuple[str, str], others: tuple[str, str]) -> bool:
    """Tell whether two equations are equivalent: multiples of each other, or one solves the other."""
    first, second = (_parse(f"({left})-({right})") if right != "0" else _parse(left) for left, right in (sides, others))
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return False
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    if _has_unknown_functions(first, second):
        return 0 in {sympy.expand(first - second), sympy.expand(first + second)}
    if any(_equal(each, _ZERO) for each in (first, second)):  # it holds for all values
        return False
    return _are_multiples(first, second) or _describes(first, second) or _describes(second, first)


def verified(latex: str, other: str) -> bool:
    """Tell whether math-verify finds two sets, relations or other objects equal, whichever is put first."""
    first, second = _parse(latex), _parse(other)
    return not any(_has(each, sympy.nan, sympy.zoo) for each in (first, second)) and _verified(first, second)


def _verified(first: Any, second: Any) -> bool:
    return any(
        verify([gold], [answer], timeout_seconds=None, raise_on_error=True)
        for gold, answer in ((first, second), (second, first))
    )


@lru_cache(maxsize=2048)
def _parse(latex: str) -> Any:
    """The expression, with decimals as the exact numbers they write, and `i` as the imaginary unit."""
    try:
        expression = latex2sympy(
            _DEGREE.sub(r"\\cdot\\frac{\\pi}{180} ", latex),
            # Without its own rules for units, boxes and equations: it would drop everything that looks like one.
            normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none"),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except MemoryError:
        raise
    except Exception as error:  # the parser may fail in any way on what a model wrote
        raise UnreadableError from error
    if expression is None or isinstance(expression, str):
        raise UnreadableError
    if not isinstance(expression, sympy.Basic):
        return expression
    exact = {decimal: sympy.Rational(str(decimal)) for decimal in expression.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(exact) if exact else expression


def _has(expression: Any, *kinds: Any) -> bool:
    return isinstance(expression, sympy.Basic) and expression.has(*kinds)


def _has_unknown_functions(*expressions: Any) -> bool:
    return any(expression.atoms(AppliedUndef) for expression in expressions)


def _equal(first: Any, second: Any) -> bool:
    """Equality of two expressions: at several points, with enough digits that rounding cannot hide a difference."""
    if any(_has(each, sympy.nan, sympy.zoo, sympy.oo) for each in (first, second)):
        return False
    if _has_unknown_functions(first, second):
        return bool(sympy.expand(first - second) == 0)
    symbols = first.free_symbols | second.free_symbols
    if not symbols:
        return _agree(first, second, {}) is True
    return _agree_at(_points(symbols), first, second, real=not (first.has(sympy.I) or second.has(sympy.I)))


def _are_multiples(first: Any, second: Any) -> bool:
    start, *points = _points(first.free_symbols)
    ours, theirs = first.subs(start), second.subs(start)
    if 0 in {_evaluate(ours, {}), _evaluate(theirs, {})}:
        return False
    return _agree_at(points, first * theirs, second * ours)


def _agree_at(points: list[dict[Any, Any]], first: Any, second: Any, *, real: bool = False) -> bool:
    """Whether two expressions are equal at all points where they have values, and those are not too few."""
    known = [agrees for point in points if (agrees := _agree(first, second, point, real=real)) is not None]
    return len(known) >= _MIN_POINTS and all(known)


def _describes(solved: Any, other: Any) -> bool:
    """Whether `y - f(x)` is zero just where another difference is, which is linear in y: `y = 6/x` and `xy = 6`."""
    for symbol in solved.free_symbols:
        value = sympy.expand(symbol - solved)
        if symbol in value.free_symbols or sympy.diff(other, symbol, 2) != 0:
            continue
        slope = sympy.expand(sympy.diff(other, symbol))
        # `xy = x^2` holds for y = x, but also wherever x is zero.
        shared = sympy.gcd(slope, sympy.expand(other.subs(symbol, 0)))
        if slope != 0 and shared.is_number and _equal(other.subs(symbol, value), _ZERO):
            return True
    return False


def _points(symbols: Any) -> list[dict[Any, Any]]:
    """Values of the variables, the same at every call: positive and negative fractions, and whole numbers."""
    generator = random.Random(7)
    ordered = sorted(symbols, key=str)

    def value(index: int) -> Any:
        if index % 2:
            return sympy.Integer(generator.randint(2, 9))
        size = sympy.Rational(generator.randint(101, 499), 200)
        return size * (1, generator.choice((1, -1)), -1, 1)[index // 2]

    return [{symbol: value(index) for symbol in ordered} for index in range(_NUM_POINTS)]


def _agree(first: Any, second: Any, point: dict[Any, Any], *, real: bool = False) -> bool | None:
    """Whether two expressions are equal at a point; None where they have no (real) value."""
    left, right = _evaluate(first, point), _evaluate(second, point)
    if left is None or right is None:
        return None
    if real and not (_is_real(first, point) and _is_real(second, point)):
        return None
    difference = _evaluate(first - second, point)
    if difference is None:
        return False
    # Zero to hundreds of digits.
    bound = sympy.Float(10) ** -30 * max(1, abs(left))
    return all(part == 0 or (part._prec == 1 and abs(part) < bound) for part in difference.as_real_imag())


def _is_real(expression: Any, point: dict[Any, Any]) -> bool:
    """Whether an expression is real at a point, and so are the roots and logarithms in it."""
    roots = [power for power in expression.atoms(sympy.Pow) if not power.exp.is_integer]
    values = (part.subs(point).evalf() for part in (expression, *roots, *expression.atoms(sympy.log)))
    return all(value.is_real for value in values if value.is_number)


def _evaluate(expression: Any, point: dict[Any, Any]) -> Any:
    """The value at a point, computed to hundreds of digits where that is needed; None where there is none."""
    value = expression.subs(point).doit().evalf(15, maxn=_MAX_DIGITS)
    return value if value.is_number and value.is_finite and not value.free_symbols else None
