"""Whether two expressions are equal, with sympy behind math-verify's reader of LaTeX.

Imported where it is needed: most verdicts need no algebra, and these libraries take a quarter of a second to import.
Nothing here has a time limit: whoever compares what a model wrote does so in a process that can be killed.
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

from components.grading.decision import UnreadableError
from components.grading.number import Number

_DEGREE = re.compile(r"\\degree\s*")
_DIGITS = 400
_POINTS = 8
_MIN_POINTS = 3

# It warns, at every call, that nobody limits its time: the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def is_readable(latex: str) -> bool:
    """Tell whether a text is a mathematical expression."""
    try:
        _read(latex)
    except UnreadableError:
        return False
    return True


def value_of(latex: str) -> Fraction | None:
    """Return the value of an expression without variables, if it is rational."""
    expression = _read(latex)
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    simple = expression.doit()
    return Fraction(int(simple.p), int(simple.q)) if isinstance(simple, sympy.Rational) else None


def rounds_to(latex: str, decimal: Number) -> bool:
    """Tell whether a constant expression, rounded to the places of a decimal, is that decimal."""
    expression = _read(latex)
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return False
    value = decimal.value
    difference = sympy.N(expression - sympy.Rational(value.numerator, value.denominator), 15)
    return bool(difference.is_real and 2 * abs(difference) * 10 ** (decimal.places or 0) <= 1)


def same_value(latex: str, other: str) -> bool:
    """Tell whether two expressions have the same value, whatever their variables are.

    Raises UnreadableError for an expression that cannot be read; the second one is read first.
    """
    second, first = _read(other), _read(latex)
    if first == second:
        return not _is_undefined(first)
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr):
        return _equal(first, second)
    return _verified(first, second)


def same_relation(sides: tuple[str, str], others: tuple[str, str]) -> bool:
    """Tell whether two equations say the same: their differences of sides are multiples, or one solves the other."""
    first, second = (_read(f"({left})-({right})") if right != "0" else _read(left) for left, right in (sides, others))
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return False
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    if _unknown_functions(first) or _unknown_functions(second):
        return 0 in {sympy.expand(first - second), sympy.expand(first + second)}
    if any(_equal(each, sympy.Integer(0)) for each in (first, second)):  # it says nothing
        return False
    return _are_multiples(first, second) or _describes(first, second) or _describes(second, first)


def _are_multiples(first: Any, second: Any) -> bool:
    start, *points = _points(first.free_symbols)
    ours, theirs = first.subs(start), second.subs(start)
    if 0 in {_evaluate(ours, {}), _evaluate(theirs, {})}:
        return False
    found = [_agree(first * theirs, second * ours, point) for point in points]
    known = [agrees for agrees in found if agrees is not None]
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
        if slope != 0 and shared.is_number and _equal(other.subs(symbol, value), sympy.Integer(0)):
            return True
    return False


def verified(latex: str, other: str) -> bool:
    """Tell whether math-verify finds two sets, relations or other objects equal, whichever is put first."""
    first, second = _read(latex), _read(other)
    return not _is_undefined(first) and not _is_undefined(second) and _verified(first, second)


def _verified(first: Any, second: Any) -> bool:
    return any(
        verify([gold], [answer], timeout_seconds=None, raise_on_error=True)
        for gold, answer in ((first, second), (second, first))
    )


@lru_cache(maxsize=2048)
def _read(latex: str) -> Any:
    try:
        found = latex2sympy(
            _DEGREE.sub(r"\\cdot\\frac{\\pi}{180} ", latex),
            # Without its own idea of units, boxes and equations: it would drop whatever looks like one.
            normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none"),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except MemoryError:
        raise
    except Exception as error:  # a reader of whatever a model wrote may fail in any way
        raise UnreadableError from error
    if found is None or isinstance(found, str):
        raise UnreadableError
    return _with_constants(found)


def _with_constants(expression: Any) -> Any:
    """The expression with decimals as the exact numbers they write, and `i` as what it nearly always is."""
    if not isinstance(expression, sympy.Basic):
        return expression
    exact = {decimal: sympy.Rational(str(decimal)) for decimal in expression.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(exact) if exact else expression


def _is_undefined(expression: Any) -> bool:
    return _has(expression, sympy.nan, sympy.zoo)


def _has(expression: Any, *kinds: Any) -> bool:
    return isinstance(expression, sympy.Basic) and expression.has(*kinds)


def _unknown_functions(expression: Any) -> bool:
    return bool(expression.atoms(AppliedUndef))


def _equal(first: Any, second: Any) -> bool:
    """Equality of two expressions: at several points with many digits, which no rounding passes off as equal."""
    if any(_has(each, sympy.nan, sympy.zoo, sympy.oo) for each in (first, second)):
        return False
    if _unknown_functions(first) or _unknown_functions(second):
        return bool(sympy.expand(first - second) == 0)
    symbols = first.free_symbols | second.free_symbols
    if not symbols:
        return _agree(first, second, {}) is True
    complex_ = first.has(sympy.I) or second.has(sympy.I)
    found = [_agree(first, second, point, real=not complex_) for point in _points(symbols)]
    known = [agrees for agrees in found if agrees is not None]
    return len(known) >= _MIN_POINTS and all(known)


def _points(symbols: Any) -> list[dict[Any, Any]]:
    """Values to put for the variables, the same at every call: fractions, negative ones, and whole numbers."""
    draw = random.Random(7)
    ordered = sorted(symbols, key=str)

    def value(index: int) -> Any:
        if index % 2:
            return sympy.Integer(draw.randint(2, 9))
        return sympy.Rational(draw.randint(101, 499), 200) * (1, draw.choice((1, -1)), -1, 1)[index // 2]

    return [{symbol: value(index) for symbol in ordered} for index in range(_POINTS)]


def _agree(first: Any, second: Any, point: dict[Any, Any], *, real: bool = False) -> bool | None:
    """Whether two expressions are equal at a point; None where they have no (real) value."""
    left, right = _evaluate(first, point), _evaluate(second, point)
    if left is None or right is None:
        return None
    if real and not (_is_real(first, point) and _is_real(second, point)):
        return None
    difference = _evaluate(first - second, point)
    return difference is not None and _is_zero(difference, left)


def _is_real(expression: Any, point: dict[Any, Any]) -> bool:
    """Whether an expression is real at a point, and so are the roots and logarithms in it."""
    roots = [power for power in expression.atoms(sympy.Pow) if not power.exp.is_integer]
    parts = [expression, *roots, *expression.atoms(sympy.log)]
    return all(_value.is_real for part in parts if (_value := part.subs(point).evalf()).is_number)


def _evaluate(expression: Any, point: dict[Any, Any]) -> Any:
    """The value at a point to hundreds of digits where it takes them; None where there is none."""
    value = expression.subs(point).doit().evalf(15, maxn=_DIGITS)
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def _is_zero(difference: Any, scale: Any) -> bool:
    """Whether hundreds of digits show no difference."""
    bound = sympy.Float(10) ** -30 * max(1, abs(scale))
    return all(part == 0 or (part._prec == 1 and abs(part) < bound) for part in difference.as_real_imag())
