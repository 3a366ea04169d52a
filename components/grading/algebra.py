"""Equality of expressions, equations and regions, with sympy.

Imported inside functions: most verdicts need no algebra, and sympy takes a quarter of a second to import. Nothing here
has a time limit, so call it on a model's text only in a process that can be killed.
"""

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from components.grading.expression import ARITHMETIC, Node, UnreadableError, parse_expression
from components.grading.quantities import Number
from components.grading.regions import Interval

_MIN_IRRATIONAL_DIGITS = 5
_MAX_DIGITS = 400
_NUM_POINTS = 8
_MIN_POINTS = 3
_MAX_BITS = 300
_MAX_DEGREE = 6
_FAR_DIGITS = 90
_SAME_DIGITS = 25
_ZERO = sympy.Integer(0)


def is_readable(latex: str) -> bool:
    """Tell whether a text is an expression, or a ratio of expressions."""
    with suppress(UnreadableError):
        for part in latex.split(":"):
            _parse(part)
        return True
    return False


def equals_decimal(latex: str, decimal: Number) -> bool:
    """Tell whether a decimal is the value of a constant expression, exactly or rounded."""
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
    """Tell whether two expressions are equal for all values of their variables; UnreadableError for any other text."""
    first, second = _parse(latex), _parse(other)
    if first == second:
        return not _has(first, sympy.nan, sympy.zoo)
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr):
        return _equal(first, second)
    if isinstance(first, sympy.MatrixBase) and isinstance(second, sympy.MatrixBase):
        return first.shape == second.shape and all(map(_equal, first, second))
    return False


def same_relation(sides: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Tell whether two equations, as pairs of sides, are multiples of each other, or one is the other's solution."""
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
    """The sympy expression of a text, with decimals as exact rationals, and `i` as the imaginary unit."""
    try:
        return _to_sympy(parse_expression(latex))
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # a sum of a number and a matrix, for example
        raise UnreadableError from error


def _root(value: Any, index: Any) -> Any:
    """The root, which is real for a negative number and an odd index, unlike sympy's."""
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
    **ARITHMETIC,
    "^": operator.pow,
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
    """Whether two expressions are equal at several points, to so many digits that rounding hides no difference."""
    if any(_has(each, sympy.nan, sympy.zoo, sympy.oo) for each in (first, second)):
        return False
    if _has_unknown_functions(first, second):
        return bool(sympy.expand(first - second) == 0)
    if _is_extreme(first) != _is_extreme(second):
        return False
    if not first.free_symbols | second.free_symbols:
        return _agree(first, second, {}) is True  # None without values
    first, second = (_in_floors_and_absolutes(each) for each in (first, second))
    steps = _steps(first)
    if steps != _steps(second):  # points between the steps would not show a difference
        return False
    # The names must not depend on earlier comparisons, since they decide the points.
    names = {step: sympy.Dummy(f"step{index}") for index, step in enumerate(sorted(steps, key=str))}
    first, second = (each.xreplace(names) for each in (first, second))
    points = _points(first, second)
    is_real = not (first.has(sympy.I) or second.has(sympy.I))
    return _agree_at(points, first, second, real=is_real) and _agree_around_kinks(first, second, points[0])


def _is_extreme(expression: Any) -> bool:
    """Whether a constant part is so large or small that the compared digits could hide it."""
    for part in sympy.preorder_traversal(expression):
        is_constant = isinstance(part, sympy.Expr) and not part.free_symbols
        if isinstance(part, sympy.Rational):
            if max(int(part.p).bit_length(), int(part.q).bit_length()) > _MAX_BITS:
                return True
        elif is_constant and (part.is_Pow or part.is_Function or part.is_Mul):
            size = sympy.Abs(part).evalf(3)
            if size.is_number and size.is_finite and size != 0 and abs(sympy.log(size, 2).evalf(5)) > _MAX_BITS:
                return True
    return False


def _in_floors_and_absolutes(expression: Any) -> Any:
    """The expression with floors instead of ceilings, and absolute values instead of maxima and minima."""
    # Expanded arguments: floors of equal arguments must be the same text.
    expression = expression.replace(sympy.ceiling, lambda value: -sympy.floor(-value))
    expression = expression.replace(sympy.floor, lambda value: sympy.floor(sympy.expand(value)))
    return expression.rewrite((sympy.Max, sympy.Min), sympy.Abs)


def _steps(expression: Any) -> set[Any]:
    """The parts of an expression that jump: floors, signs, remainders, and powers of zero."""
    steps: set[Any] = expression.atoms(sympy.floor, sympy.sign, sympy.Mod)
    return steps | {power for power in expression.atoms(sympy.Pow) if power.base == 0}


def _agree_around_kinks(first: Any, second: Any, point: dict[Any, Any]) -> bool:
    """Whether two expressions are equal on both sides of each zero of an absolute value or a root in them."""
    expressions = (first, second)
    kinks = {part.args[0] for each in expressions for part in each.atoms(sympy.Abs)}
    kinks |= {part.base for each in expressions for part in each.atoms(sympy.Pow) if not part.exp.is_integer}
    difference = sympy.expand(first - second)
    terms = sympy.Add.make_args(difference)
    for symbol in first.free_symbols | second.free_symbols:
        others = {name: value for name, value in point.items() if name != symbol}
        roots = sorted(root for kink in kinks for root in _real_roots(kink.subs(others), symbol))
        for value in _between(roots):
            values = [term.subs(others).subs(symbol, value).evalf(_FAR_DIGITS) for term in terms]
            if not all(each.is_real and each.is_finite for each in values):
                continue
            rounding_error = sympy.Float(10) ** -_SAME_DIGITS * max(map(abs, values))
            if abs(sum(values)) > rounding_error:
                return False
    return True


def _real_roots(expression: Any, symbol: Any) -> list[Any]:
    """The real zeros of a product of polynomials of low degree; none for any other expression."""
    while expression.is_Pow:
        expression = expression.base
    if expression.is_Mul:
        return [root for factor in expression.args for root in _real_roots(factor, symbol)]
    if not expression.is_polynomial(symbol) or not 0 < sympy.degree(expression, symbol) <= _MAX_DEGREE:
        return []
    roots = sympy.Poly(expression, symbol).nroots(n=20)
    real_roots = (sympy.re(root) for root in roots if abs(sympy.im(root)) <= abs(root) / 10**6)
    return [sympy.Float(root, _FAR_DIGITS) for root in real_roots]


def _between(roots: Sequence[Any]) -> list[Any]:
    """A value between each two neighbours of sorted roots, and one beyond each end."""
    if not roots:
        return []
    # Odd fractions: different expressions may well agree at midpoints and other round values.
    below = roots[0] - (1 + abs(roots[0])) * sympy.Rational(3, 7)
    above = roots[-1] + (1 + abs(roots[-1])) * sympy.Rational(4, 9)
    middle = [one + (other - one) * sympy.Rational(5, 11) for one, other in pairwise(roots)]
    return [sympy.Float(value, _FAR_DIGITS) for value in (below, *middle, above)]


def _are_multiples(first: Any, second: Any) -> bool:
    """Whether one expression is a constant times the other: the factor at one point must hold at all others."""
    start, *points = _points(first, second)
    value, other = first.subs(start), second.subs(start)
    if 0 in {_evaluate(value, {}), _evaluate(other, {})}:
        return False
    return _agree_at(points, first * other, second * value)


def _agree_at(points: list[dict[Any, Any]], first: Any, second: Any, *, real: bool = False) -> bool:
    """Whether two expressions are equal at all points where both have values, of which there must be enough."""
    known = [agrees for point in points if (agrees := _agree(first, second, point, real=real)) is not None]
    return len(known) >= _MIN_POINTS and all(known)


def _describes(solved: Any, other: Any) -> bool:
    """Whether `solved` is y - f(x) and has the same zeros as `other`, which is linear in y: `y = 6/x` and `xy = 6`."""
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
    """Values for the symbols of two expressions at several points, always the same for the same expressions.

    Points with an even index have fractions (positive, of either sign, negative, positive), the others whole numbers.
    """
    generator = random.Random(f"{sorted(map(str, (first, second)))}")
    symbols = first.free_symbols | second.free_symbols
    ordered = sorted(symbols, key=lambda symbol: (str(symbol), isinstance(symbol, sympy.Dummy)))

    def value(index: int) -> Any:
        if index % 2:
            return sympy.Integer(generator.randint(2, 40 if index > 1 else 9))
        size = sympy.Rational(generator.randint(101, 499), 200)
        return size * (1, generator.choice((1, -1)), -1, 1)[index // 2]

    return [{symbol: value(index) for symbol in ordered} for index in range(_NUM_POINTS)]


def _agree(first: Any, second: Any, point: dict[Any, Any], *, real: bool = False) -> bool | None:
    """Whether two expressions are equal at a point; None if either has no value there, or with `real` no real value."""
    value, other = _evaluate(first, point), _evaluate(second, point)
    if value is None or other is None:
        return None
    if real and not (_is_real(first, point) and _is_real(second, point)):
        return None
    difference = _evaluate(first - second, point)
    if difference is None:  # although both have values
        return False
    # A precision of 1 says that evaluation to hundreds of digits found no digit other than 0.
    bound = sympy.Float(10) ** -30 * max(1, abs(value))
    return all(part == 0 or (part._prec == 1 and abs(part) < bound) for part in difference.as_real_imag())


def _is_real(expression: Any, point: dict[Any, Any]) -> bool:
    """Whether an expression, its roots and its logarithms are real at a point."""
    roots = [power for power in expression.atoms(sympy.Pow) if not power.exp.is_integer]
    values = (part.subs(point).evalf() for part in (expression, *roots, *expression.atoms(sympy.log)))
    return all(value.is_real for value in values if value.is_number)


def _evaluate(expression: Any, point: dict[Any, Any]) -> Any:
    """The value at a point, computed to hundreds of digits if necessary; None if it is undefined."""
    value = expression.subs(point).doit().evalf(15, maxn=_MAX_DIGITS)
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def same_region(first: Sequence[Interval], second: Sequence[Interval]) -> bool:
    """Tell whether two unions of intervals with constant ends are the same set of real numbers."""
    ours, theirs = _parts(first), _parts(second)
    return len(ours) == len(theirs) and all(
        closed == other_closed and _same_end(low, other_low) and _same_end(high, other_high)
        for (low, high, closed), (other_low, other_high, other_closed) in zip(ours, theirs, strict=True)
    )


def _same_end(first: Any, second: Any) -> bool:
    return bool(first == second) or (first.is_finite and second.is_finite and _equal(first, second))


def _parts(intervals: Sequence[Interval]) -> list[tuple[Any, Any, tuple[bool, bool]]]:
    """The disjoint parts of a union, in order: both ends, and whether each belongs to the part."""
    union = sympy.Union(*map(_sympy_set, intervals))
    parts: list[tuple[Any, Any, tuple[bool, bool]]] = []
    for part in union.args if isinstance(union, sympy.Union) else (union,):
        if isinstance(part, sympy.Interval):
            parts.append((part.start, part.end, (not part.left_open, not part.right_open)))
        else:
            parts += [(point, point, (True, True)) for point in part]
    return sorted(parts, key=lambda part: float(part[0]))


def _sympy_set(interval: Interval) -> Any:
    """The interval or the single point as a sympy set; raise UnreadableError if its ends are not in order."""
    low, high = _parse(interval.low), _parse(interval.high)
    is_real = low.is_extended_real and high.is_extended_real
    if not is_real or (low.is_infinite and interval.has_low) or (high.is_infinite and interval.has_high):
        raise UnreadableError
    if _same_end(low, high) and interval.has_low and interval.has_high:
        return sympy.FiniteSet(low)
    if not low < high:
        raise UnreadableError
    return sympy.Interval(low, high, not interval.has_low, not interval.has_high)
