"""A calculator: exact arithmetic with fractions, for a small grammar and numbers of limited size."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from components.environments.environment import ToolEnvironment
from components.shared.tools import CalculatorArguments, CallError, ToolsConfig

_EXPRESSION = re.compile(r"[\d.+\-*/%()\s]+")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
"""Python's grammar refuses them, as in `007`."""
_MAX_CHARACTERS = 500
_MAX_LINES = 20
_MAX_BITS = 10_000
"""Limit of a numerator or a denominator: about 3,000 digits."""
_ACCEPTED, _TOO_LARGE = "accepted: numbers, + - * / // % ** and parentheses", "the number is too large"


class Calculator(ToolEnvironment):
    """Answers a call with the value of each of its lines."""

    name = "calculator"

    def __init__(self, config: ToolsConfig) -> None:
        arguments = CalculatorArguments.model_validate(config.arguments)
        super().__init__(config.call_format, arguments.max_calls)
        self._decimals = arguments.decimals

    def use(self, text: str) -> str:
        """Return the value of each line of `text` that is not empty; CallError if one cannot be computed."""
        lines = [line for line in text.split("\n") if line.strip()]
        if not 0 < len(lines) <= _MAX_LINES:
            raise CallError(f"there are {len(lines)} lines; accepted: 1 to {_MAX_LINES}")
        return "\n".join(format_number(value_of(line), self._decimals) for line in lines)


def value_of(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression in Python's syntax; CallError if it cannot be computed."""
    if len(expression) > _MAX_CHARACTERS:
        raise CallError(f"the expression is longer than {_MAX_CHARACTERS} characters")
    plain = _LEADING_ZEROS.sub("", expression.strip())
    try:
        if not _EXPRESSION.fullmatch(plain):
            raise SyntaxError
        return _value(ast.parse(plain, mode="eval").body, plain)
    except ZeroDivisionError:
        raise CallError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise CallError(f'"{plain[:20]}" cannot be read; {_ACCEPTED}') from None


def format_number(value: Fraction, decimals: int) -> str:
    """Return a number as decimal text, rounded to `decimals`, or in scientific notation if that rounds it to 0."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**decimals)
    if scaled == 0:
        return f"{float(value):.{max(decimals, 1)}g}"
    sign = "-" if scaled < 0 else ""
    whole, fraction = divmod(abs(scaled), 10**decimals)
    return f"{sign}{whole}.{fraction:0{decimals}}".rstrip("0").rstrip(".")


def _value(node: ast.expr, text: str) -> Fraction:
    """Return the value of a node in the syntax tree of `text`; SyntaxError if the calculator does not know its kind."""
    match node:
        case ast.Constant():  # its text is exact, `node.value` is a float
            return Fraction(text[node.col_offset : node.end_col_offset].removesuffix("."))
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand, text)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, text)
        case ast.BinOp(left, sign, right):
            result = Fraction(_OPERATORS[type(sign)](_value(left, text), _value(right, text)))
            if _num_bits(result) > _MAX_BITS:
                raise CallError(_TOO_LARGE)
            return result
    raise SyntaxError


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CallError("an exponent has to be a whole number")
    # The result would have at least this many bits; if they are too many, it is not computed.
    if abs(exponent) * (_num_bits(base) - 1) > _MAX_BITS:
        raise CallError(_TOO_LARGE)
    return Fraction(base**exponent.numerator)


def _num_bits(value: Fraction) -> int:
    """Return the bits of the numerator or of the denominator, whichever has more."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
