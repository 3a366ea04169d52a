"""Whether two expressions are equal, with sympy.

Imported where it is needed: most verdicts need no algebra, and these libraries take a quarter of a second to import.
Nothing here has a time limit: compare what a model wrote in a process that can be killed.
"""

import operator
import random
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from components.grading.expression import Node, UnreadableError, parse_expression
from components.grading.quantities import Number

_MIN_IRRATIONAL_DIGITS = 5
_MAX_DIGITS = 400
_MIN_POINTS = 3
_ZERO = sympy.Integer(0)


def is_readable(latex: str) -> bool:
    """Tell whether a text is a mathematical object of any kind, be it a ratio, which compares with its text alone."""
    with suppress(UnreadableError):
        for part in latex.split(":"):
            _parse(part)
        return True
    return False


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
    if isinstance(first, sympy.MatrixBase) and isinstance(second, sympy.MatrixBase):
        return first.shape == second.shape and all(map(_equal, first, second))
    return False


def same_relation(sides: tuple[str, str], others: tuple[str, str]) -> bool:
    """Tell whether two equations are equivalent: multiples of each other, or one solves the other."""
    first, second = (_parse(left) - _parse(right) for left, right in (sides, others))
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return False
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    if _has_unknown_functions(first, second):
        return 0 in {sympy.expand(first - second), sympy.expand(first + second)}
    if any(_equal(each, _ZERO) for each in (first, second)):  # it holds for all values
        return False
    return _are_multiples(first, second) or _describes(first, second) or _describes(second, first)


@lru_cache(maxsize=2048)
def _parse(latex: str) -> Any:
    """The expression, with decimals as the exact numbers they write, and `i` as the imaginary unit."""
    try:
        return _to_sympy(parse_expression(latex))
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # a sum of a number and a matrix, for example
        raise UnreadableError from error


def _root(value: Any, index: Any) -> Any:
    """The root; for an odd one of a negative number the real one."""
    if value.is_number and value.is_negative and index.is_odd:
        return -sympy.root(-value, index)
    return sympy.root(value, index)


_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infinity": sympy.oo}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc},
    **{"arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot, "exp": sympy.exp},
    **{"sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "coth": sympy.coth},
    **{"abs": sympy.Abs, "floor": sympy.floor, "ceiling": sympy.ceiling, "max": sympy.Max, "min": sympy.Min},
    **{"gcd": lambda *values: reduce(sympy.gcd, values), "lcm": lambda *values: reduce(sympy.lcm, values)},
    **{"ln": sympy.log, "lg": lambda value: sympy.log(value, 10), "log": lambda value, base=10: sympy.log(value, base)},
    **{"factorial": sympy.factorial, "double factorial": sympy.factorial2, "binomial": sympy.binomial},
    "degree": lambda value: value * sympy.pi / 180,
    **{"^": operator.pow, "/": operator.truediv, "-": operator.neg, "group": lambda value: value},
    "+": lambda *values: reduce(operator.add, values),
    "*": lambda *values: reduce(operator.mul, values),
    "root": _root,
    "determinant": lambda matrix: matrix.det(),
}


def _to_sympy(node: Node) -> Any:
    if node.operation == "number":
        return sympy.Rational(Fraction(node.value).numerator, Fraction(node.value).denominator)
    if node.operation == "name":
        return sympy.Symbol(str(node.value))
    if node.operation == "constant":
        return _CONSTANTS[str(node.value)]
    operands = [_to_sympy(operand) for operand in node.operands]
    if node.operation == "apply":
        return sympy.Function(str(node.value))(*operands)
    if node.operation == "matrix":
        columns = int(node.value)
        return sympy.ImmutableMatrix(len(operands) // columns, columns, operands)
    return _FUNCTIONS[node.operation](*operands)


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
    is_real = not (first.has(sympy.I) or second.has(sympy.I))
    return _agree_at(_points(first, second), first, second, real=is_real)


def _are_multiples(first: Any, second: Any) -> bool:
    start, *points = _points(first, second)
    ours, theirs = first.subs(start), second.subs(start)
    if 0 in {_evaluate(ours, {}), _evaluate(theirs, {})}:
        return False
    return _agree_at(points, first * theirs, second * ours)


def _agree_at(points: list[dict[Any, Any]], first: Any, second: Any, *, real: bool = False) -> bool:
    """Whether two expressions are equal at all points where they have values, and those are not too few."""
    num_known = 0
    for point in points:  # the last ones take longest
        agrees = _agree(first, second, point, real=real)
        if agrees is False:
            return False
        num_known += agrees is not None
    return num_known >= _MIN_POINTS


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


def _points(first: Any, second: Any) -> list[dict[Any, Any]]:
    """Values for the variables of two expressions, drawn from a seed that depends on both."""
    generator = random.Random(f"{sorted(map(str, (first, second)))}")
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)

    def fractions(*scales: int) -> dict[Any, Any]:
        values = (sympy.Rational(generator.randint(101, 499), 200) * generator.choice(scales) for _ in symbols)
        return dict(zip(symbols, values, strict=True))

    def wholes(lowest: int, highest: int) -> dict[Any, Any]:
        return {symbol: sympy.Integer(generator.randint(lowest, highest)) for symbol in symbols}

    return [
        *(fractions(1), wholes(2, 9), fractions(1, -1), wholes(2, 40), fractions(-1), wholes(2, 40)),
        *(fractions(1), wholes(2, 40), wholes(100, 1000), wholes(-1000, -100)),
    ]


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
    """The value at a point, computed to hundreds of digits where necessary; None where it is undefined."""
    value = expression.subs(point).doit().evalf(15, maxn=_MAX_DIGITS)
    return value if value.is_number and value.is_finite and not value.free_symbols else None
