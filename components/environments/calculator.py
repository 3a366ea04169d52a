"""A calculator: exact arithmetic with fractions, for expressions of a small grammar and of bounded size."""

import re
from collections.abc import Callable
from fractions import Fraction

from components.environments.environment import ToolEnvironment
from components.shared.tools import CalculatorArguments, CallError, ToolsConfig

_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|\*\*|//|[-+*/%()])")
_MAX_CHARACTERS = 500
_MAX_LINES = 20
_MAX_BITS = 10_000
"""Of a numerator or a denominator, about 3,000 digits."""
_MAX_DEPTH = 50
_ACCEPTED = "accepted: numbers, + - * / // % ** and parentheses"


class Calculator(ToolEnvironment):
    """Computes each line of a call."""

    name = "calculator"

    def __init__(self, config: ToolsConfig) -> None:
        arguments = CalculatorArguments.model_validate(config.arguments)
        super().__init__(config.call_format, arguments.max_calls)
        self._decimals = arguments.decimals

    def use(self, text: str) -> str:
        """Return the value of each line."""
        lines = [line for line in text.split("\n") if line.strip()]
        if not 0 < len(lines) <= _MAX_LINES:
            raise CallError(f"there are {len(lines)} lines; accepted: 1 to {_MAX_LINES}")
        return "\n".join(format_number(value_of(line), self._decimals) for line in lines)


def value_of(expression: str) -> Fraction:
    """Return the exact value of an expression; CallError where it has no value or does not follow the grammar.

    sum: product (("+" | "-") product)*        power: atom ["**" signed]
    product: signed (("*" | "/" | "//" | "%") signed)*        atom: number | "(" sum ")"
    signed: ("+" | "-") signed | power
    """
    if len(expression) > _MAX_CHARACTERS:
        raise CallError(f"the expression is longer than {_MAX_CHARACTERS} characters")
    return _Parser(_tokens(expression)).whole()


def format_number(value: Fraction, decimals: int) -> str:
    """Return a number as decimal text, rounded to `decimals`; one that rounds to 0 in scientific notation."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**decimals)
    if not scaled:
        return f"{float(value):.{max(decimals, 1)}g}"
    whole, places = divmod(abs(scaled), 10**decimals)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{places:0{decimals}}".rstrip("0").rstrip(".") if decimals else f"{sign}{whole}"


def _tokens(expression: str) -> list[str]:
    tokens, place = [], 0
    expression = expression.rstrip()
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            rest = expression[place:].strip()[:20]
            raise CallError(f'"{rest}" cannot be read; {_ACCEPTED}')
        tokens.append(match[1])
        place = match.end()
    return tokens


class _Parser:
    """A recursive-descent parser that evaluates while it reads."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._next():
            raise CallError(f'"{self._next()}" is unexpected; {_ACCEPTED}')
        return value

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, *accepted: str) -> str:
        token = self._next()
        if token not in accepted:
            return ""
        self._place += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while operator := self._take("+", "-"):
            value = _computed(operator, value, self._product())
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while operator := self._take("*", "/", "//", "%"):
            value = _computed(operator, value, self._signed())
        return value

    def _signed(self) -> Fraction:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CallError(f"the expression is nested more than {_MAX_DEPTH} times")
        sign = self._take("+", "-")
        value = self._signed() if sign else self._power()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Fraction:
        base = self._atom()
        return _computed("**", base, self._signed()) if self._take("**") else base

    def _atom(self) -> Fraction:
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise CallError('a ")" is missing')
            return value
        token = self._next()
        if not token or not (token[0].isdigit() or token[0] == "."):
            place = f'before "{token}"' if token else "at the end"
            raise CallError(f"a number is missing {place}")
        self._place += 1
        return Fraction(f"{token}0" if token.endswith(".") else token)


_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
    "//": lambda left, right: left // right,
    "%": lambda left, right: left % right,
}


def _computed(operator: str, left: Fraction, right: Fraction) -> Fraction:
    try:
        value = _power(left, right) if operator == "**" else Fraction(_OPERATORS[operator](left, right))
    except ZeroDivisionError:
        raise CallError("division by zero") from None
    if _bits(value) > _MAX_BITS:
        raise _too_large()
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CallError("an exponent has to be a whole number")
    if abs(exponent) * (_bits(base) - 1) > _MAX_BITS:  # never so for 0, 1 and -1
        raise _too_large()
    return Fraction(base**exponent.numerator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _too_large() -> CallError:
    return CallError("the number is too large")
