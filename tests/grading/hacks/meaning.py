r"""A second reader of answers, strict and small, so that a search for wrong answers need not trust the grader.

It reads a subset of LaTeX that has one meaning only, and evaluates it at fixed points to 50 digits with mpmath; sympy
and the grader have no part in it. What it does not understand it refuses, and two readings are `different` only if
nobody could take the one for the other: not for a rounded decimal, for instance, nor for a list in another order.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any

import mpmath  # type: ignore[import-untyped]

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\[{}]|[0-9]+(?:\.[0-9]+)?|[a-zA-Z]|[-+*/^(){}\[\],=!|&]|\\\\")
_SPACES = re.compile(r"\s+|\\[,;!: ]|\\left(?![a-z])|\\right(?![a-z])|\\q?quad(?![a-z])|(?<=[0-9])\{,\}(?=[0-9]{3})")
_THOUSANDS = re.compile(r"[0-9],\s?[0-9]{3}(?![0-9])")
_WORD = re.compile(r"(?<![a-zA-Z\\{])[a-zA-Z]{4}")
_FUNCTIONS = dict(
    [
        *((r"\sin", mpmath.sin), (r"\cos", mpmath.cos), (r"\tan", mpmath.tan), (r"\ln", mpmath.ln)),
        *((r"\arctan", mpmath.atan), (r"\arcsin", mpmath.asin), (r"\arccos", mpmath.acos)),
    ]
)
_NUM_POINTS = 3
_DIGITS = 50
_TOLERANCE = 1e-12
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}"}
_MAX_EXPONENT = 500
_MAX_CHARACTERS = 200


class _RefusedError(Exception):
    """The text is not in the subset that has one meaning only."""


@dataclass(frozen=True)
class Meaning:
    """What an answer says."""

    kind: str
    """`value`, `list`, `set`, `tuple`, `union` or `matrix`."""
    parts: tuple["Meaning", ...] = ()
    brackets: str = ""
    name: str = ""
    """The letter that is given a value."""
    values: tuple[Any, ...] = ()
    """Of a value: what it is at each point; None where it is undefined."""
    is_decimal: bool = False


@lru_cache(maxsize=100_000)
def read(latex: str) -> Meaning | None:
    """Return what an answer says; None for anything that could be read in two ways."""
    if len(latex) > _MAX_CHARACTERS or _THOUSANDS.search(latex) or _WORD.search(latex):
        return None
    tokens = _tokens(latex)
    if None in tokens:
        return None
    try:
        with mpmath.workdps(_DIGITS):
            return _read([token for token in tokens if token])
    except (_RefusedError, RecursionError, OverflowError):
        return None


def differ(one: Meaning, other: Meaning) -> bool:
    """Tell whether two answers certainly do not say the same."""
    with mpmath.workdps(_DIGITS):
        return _differ(one, other)


def agree(one: Meaning, other: Meaning) -> bool:
    """Tell whether two values are certainly the same."""
    with mpmath.workdps(_DIGITS):
        return one.kind == other.kind == "value" and all(map(_close, one.values, other.values))


def _differ(one: Meaning, other: Meaning) -> bool:
    if one.kind == other.kind == "value":
        return _differ_in_value(one, other)
    if "value" in (one.kind, other.kind):
        several = one if other.kind == "value" else other
        return several.kind in ("tuple", "matrix") or len(_distinct(several.parts)) > 1
    if "matrix" in (one.kind, other.kind) and one.kind != other.kind:
        return False
    if one.kind == other.kind and one.kind in ("tuple", "matrix", "row"):
        return (
            len(one.parts) != len(other.parts)
            or one.brackets != other.brackets
            or any(_differ(*pair) for pair in zip(one.parts, other.parts, strict=True))
        )
    return _differ_as_sets(_distinct(one.parts), _distinct(other.parts))


def _differ_in_value(one: Meaning, other: Meaning) -> bool:
    if one.name and other.name and one.name != other.name:
        return True
    # A decimal may be rounded.
    tolerance = 0.03 if one.is_decimal != other.is_decimal else _TOLERANCE
    return any(not _close(*pair, tolerance) for pair in zip(one.values, other.values, strict=True))


def _differ_as_sets(ours: list[Meaning], theirs: list[Meaning]) -> bool:
    if len(ours) != len(theirs):
        return True
    return len(ours) <= 5 and all(any(map(_differ, ours, order)) for order in permutations(theirs))


def _distinct(parts: tuple[Meaning, ...]) -> list[Meaning]:
    distinct: list[Meaning] = []
    for part in parts:
        if all(_differ(part, other) for other in distinct):
            distinct.append(part)
    return distinct


def _close(one: Any, other: Any, tolerance: float = _TOLERANCE) -> bool:
    if one is None or other is None:
        return one is other
    return bool(abs(one - other) <= tolerance * max(abs(one), abs(other)))


def _tokens(latex: str) -> list[str | None]:
    tokens: list[str | None] = []
    position = 0
    while position < len(latex):
        if space := _SPACES.match(latex, position):
            # `1 2` is no number, and `x 2` no product.
            tokens += [" "] if space.group().strip("\\!") else []
            position = space.end()
        elif token := _TOKEN.match(latex, position):
            tokens.append(token.group())
            position = token.end()
        else:
            return [None]
    return [token for index, token in enumerate(tokens) if token != " " or _digits_on_both_sides(tokens, index)]


def _digits_on_both_sides(tokens: list[str | None], index: int) -> bool:
    return 0 < index < len(tokens) - 1 and all((tokens[each] or "")[0].isdigit() for each in (index - 1, index + 1))


def _read(tokens: list[str]) -> Meaning:
    if " " in tokens:
        raise _RefusedError
    for separator, kind in ((",", "list"), (r"\cup", "union")):
        parts = _split(tokens, separator)
        if len(parts) > 1:
            return Meaning(kind, tuple(map(_component, parts)))
    name, *values = _split(tokens, "=")
    if values:
        return _named(name, values)
    if tokens[:1] == [r"\begin"]:
        return _matrix(tokens)
    if tokens and tokens[0] in _CLOSING and _end(tokens) == len(tokens):
        return _bracketed(tokens)
    return _value(tokens)


def _named(name: list[str], values: list[list[str]]) -> Meaning:
    if len(values) > 1 or len(name) != 1 or not name[0].isalpha() or name[0] in "ei":
        raise _RefusedError
    return replace(_read(values[0]), name=name[0])


def _bracketed(tokens: list[str]) -> Meaning:
    inner = _split(tokens[1:-1], ",")
    if tokens[0] == r"\{":
        if tokens[-1] != r"\}":
            raise _RefusedError
        return Meaning("set", tuple(map(_component, inner)))
    if len(inner) == 1:
        return _value(tokens)
    return Meaning("tuple", tuple(map(_infinite, inner)), tokens[0] + tokens[-1])


def _component(tokens: list[str]) -> Meaning:
    component = _read(tokens)
    if component.name:  # it may stand anywhere
        raise _RefusedError
    return component


def _infinite(tokens: list[str]) -> Meaning:
    if tokens in ([r"\infty"], ["+", r"\infty"], ["-", r"\infty"]):
        return Meaning("value", values=(mpmath.mpf(-1e40 if tokens[0] == "-" else 1e40),) * _NUM_POINTS)
    return _component(tokens)


def _matrix(tokens: list[str]) -> Meaning:
    text = "".join(tokens)
    match = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if not match or r"\begin" in match[1]:
        raise _RefusedError
    body = tokens[tokens.index("}") + 1 : len(tokens) - tokens[::-1].index(r"\end") - 1]
    rows = [Meaning("row", tuple(map(_read, _split(row, "&")))) for row in _split(body, "\\\\")]
    return Meaning("matrix", tuple(rows))


def _split(tokens: list[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in ("(", "[", "{", r"\{", r"\begin")) - (token in (")", "]", "}", r"\}", r"\end"))
        if depth < 0:
            raise _RefusedError
        if token == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    if depth:
        raise _RefusedError
    return parts


def _end(tokens: list[str]) -> int:
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if depth == 0:
            return index + 1
    raise _RefusedError


def _value(tokens: list[str]) -> Meaning:
    values = []
    for point in range(_NUM_POINTS):
        try:
            values.append(_Evaluation(tokens, point).result())
        except (ZeroDivisionError, ValueError):
            values.append(None)
    return Meaning("value", values=tuple(values), is_decimal=any("." in token for token in tokens))


class _Evaluation:
    """The value of an expression at one point."""

    def __init__(self, tokens: list[str], point: int) -> None:
        self._tokens, self._point, self._position = tokens, point, 0

    def result(self) -> Any:
        value = self._sum()
        if self._position < len(self._tokens):
            raise _RefusedError
        return value

    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._next()
        if not token or (expected and token != expected):
            raise _RefusedError
        self._position += 1
        return token

    def _sum(self) -> Any:
        sign = self._take() if self._next() in {"+", "-"} else "+"
        value = self._product() if sign == "+" else -self._product()
        while self._next() in {"+", "-"}:
            sign = self._take()
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Any:
        value = self._power(first=True)
        divided = False
        while True:
            token = self._next()
            if token in {r"\cdot", r"\times", "*"}:
                self._take()
                value = value * self._power(first=True)
            elif token in {"/", r"\div"}:
                if divided:
                    raise _RefusedError
                self._take()
                value = value / self._power(first=True)
                divided = True
            elif token and (token.isalpha() or token in {"(", r"\frac", r"\dfrac", r"\sqrt", r"\pi", *_FUNCTIONS}):
                if divided:  # 1/2x
                    raise _RefusedError
                value = value * self._power()
            else:
                return value

    def _power(self, *, first: bool = False) -> Any:
        start = self._position
        base = self._atom()
        if self._next() in {r"\frac", r"\dfrac"} and self._tokens[start][0].isdigit():
            if self._position != start + 1 or "." in self._tokens[start] or not first:
                raise _RefusedError
            return self._mixed(base)
        if self._next() == "^":
            self._take()
            exponent = self._sum_in_braces() if self._next() == "{" else self._single()
            if abs(exponent) > _MAX_EXPONENT:
                raise _RefusedError
            base = base**exponent
        if self._next() in {"!", "^"}:
            raise _RefusedError
        return base

    def _mixed(self, whole: Any) -> Any:
        self._take()
        part = []
        for _ in range(2):
            if self._position + 2 >= len(self._tokens) or self._tokens[self._position + 2] != "}":
                raise _RefusedError
            self._take("{")
            number = self._take()
            if not number.isdigit():
                raise _RefusedError
            part.append(mpmath.mpf(number))
            self._take("}")
        if part[0] >= part[1]:
            raise _RefusedError
        return whole + part[0] / part[1]

    def _sum_in_braces(self) -> Any:
        self._take("{")
        value = self._sum()
        self._take("}")
        return value

    def _single(self) -> Any:
        token = self._take()
        if len(token) != 1 or not token.isalnum():
            raise _RefusedError
        return self._letter(token) if token.isalpha() else mpmath.mpf(token)

    def _atom(self) -> Any:
        token = self._take()
        if token[0].isdigit():
            if len(token) > 1 and token[0] == "0" and token[1] != ".":
                raise _RefusedError
            return mpmath.mpf(token)
        if token.isalpha():
            return self._letter(token)
        if token in _FUNCTIONS:
            return self._applied(_FUNCTIONS[token])
        read_rest = {"(": self._in_brackets, r"\frac": self._quotient, r"\dfrac": self._quotient, r"\sqrt": self._root}
        if token == r"\pi":
            return +mpmath.pi
        if token not in read_rest:
            raise _RefusedError
        return read_rest[token]()

    def _in_brackets(self) -> Any:
        value = self._sum()
        self._take(")")
        return value

    def _quotient(self) -> Any:
        return self._sum_in_braces() / self._sum_in_braces()

    def _root(self) -> Any:
        degree = 2
        if self._next() == "[":
            self._take()
            written = self._take()
            if not written.isdigit():
                raise _RefusedError
            degree = int(written)
            self._take("]")
        return mpmath.root(self._sum_in_braces(), degree)

    def _applied(self, function: Any) -> Any:
        exponent = 1
        if self._next() == "^":
            self._take()
            exponent = self._single() if self._next() != "{" else self._sum_in_braces()
            if exponent < 1:
                raise _RefusedError
        if self._next() == "(":
            self._take()
            argument = self._sum()
            self._take(")")
        elif self._next().isalnum() or self._next() == r"\pi":
            argument = self._atom()
            if self._next().isalpha():
                argument = argument * self._letter(self._take())
        else:
            raise _RefusedError
        if self._next() in {"(", "^", r"\pi", "/"} or self._next().isalnum():
            raise _RefusedError
        return function(argument) ** exponent

    def _letter(self, letter: str) -> Any:
        if letter == "e":
            return +mpmath.e
        if letter == "i":
            return mpmath.mpc(0, 1)
        # Algebraic relations between the values of different letters are as good as impossible.
        seed = mpmath.sqrt(ord(letter) * 7919 + 104729 * (self._point + 1))
        return (1 + mpmath.frac(seed) * 2) * (-1 if (ord(letter) + self._point) % 3 == 0 else 1)
