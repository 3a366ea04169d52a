r"""A parser of expressions in LaTeX, as parsing.py normalizes it, with a closed grammar.

Nothing is skipped: a command, letter or sign that is not in the grammar makes the text unreadable. Ambiguous notation
is read as follows:

- An unbracketed argument of a function ends at an operator, at the next function, and at a bracket that does not follow
  a number: `\sin 2x\cos x` and `\ln 2\cdot\ln 3` are products, `\sin x(1+x)` too, and `\sin 2(x+1)` is not.
- `\sin(x)^2` is the square of the sine, `1/2x` is one over `2x`, and `2\frac{1}{2}x` holds a mixed number.
- `f(x+1)` is a value of f, as are g and h; for other letters `n(n+1)` is a product and `P(2)` or `C(5,2)` is not.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, reduce
from math import factorial, isqrt
from typing import Any

from components.grading.vocabulary import FUNCTION_NAMES, TEXT_STYLES

_MAX_DEPTH = 60
_MAX_BITS = 20_000
_MAX_FACTORIAL = 200


class UnreadableError(Exception):
    """A text is not a mathematical expression."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operation on expressions, a number or a name."""

    operation: str
    """`number`, `name`, `constant`, `+`, `*`, `/`, `^`, `-`, `apply`, `matrix`, or a function such as `sin`."""
    operands: tuple["Node", ...] = ()
    value: Fraction | str = ""
    """The number, the name, or how many columns a matrix has."""


_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_NAMES = frozenset(_GREEK.split())
_SERIES = frozenset({"sum", "prod"})
_CONSTANTS = {"pi": "pi", "infty": "infinity"}
_TYPED_FUNCTIONS = (*FUNCTION_NAMES, "arccot", "coth", "ln")
_FUNCTIONS_OF_LISTS = frozenset({"max", "min", "gcd", "lcm"})
_FUNCTIONS = _FUNCTIONS_OF_LISTS | {*_TYPED_FUNCTIONS, "lg"}
_UNKNOWN_FUNCTIONS = frozenset("fghFGH")
_TYPED = re.compile(rf"(?:{'|'.join(_TYPED_FUNCTIONS)}|sqrt)(?![a-df-hj-wyzA-Z])")
_WITH_TWO_ARGUMENTS = {"frac": "/", "binom": "binomial"}
_ACCENTS = frozenset({"bar", "hat", "tilde", "overline", "vec", "overrightarrow", "dot"})
_STYLES = frozenset(TEXT_STYLES)
_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", "|": "|"}
_BEGIN_FACTOR = (
    _NAMES | _ACCENTS | _STYLES | _FUNCTIONS | {*_CONSTANTS, *_WITH_TWO_ARGUMENTS, "sqrt", "begin", "degree"}
)
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_PRODUCTS = frozenset({r"\cdot", r"\times", "*", r"\ast"})
_QUOTIENTS = frozenset({"/", r"\div"})
_SPACES = frozenset([" ", r"\,", r"\;", r"\:", r"\ "])  # parsing.py leaves those behind `\\`
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_MAX_AHEAD = 40
_NUMERAL = r"(?:\s*\{\s*[0-9]+\s*\}|\s*[0-9])"
_PROPER_FRACTION = re.compile(rf"\s*\\frac{_NUMERAL}{_NUMERAL}")
_POWER_OF_FUNCTION = re.compile(r"\s*\^(?:\s*\{\s*-?[0-9]+\s*\}|\s*[0-9])\s*\(")
_WORD = re.compile(r"[a-zA-Z]{2,}")


_INFINITY = Node("constant", value="infinity")


@lru_cache(maxsize=4096)
def parse_expression(latex: str) -> Node:
    """Return the expression that a text denotes; raise UnreadableError if any part of it is not in the grammar."""
    return _Parser(latex).parse()


def variables(node: Node) -> set[str]:
    """Return the variables of an expression, and its values of unknown functions such as `f(2)`."""
    if node.operation == "name":
        return {str(node.value)}
    if node.operation == "apply":
        return {repr(node)}
    return set[str]().union(*map(variables, node.operands))


def within(node: Node) -> Iterator[Node]:
    """Yield an expression and all its parts, at any depth."""
    yield node
    for operand in node.operands:
        yield from within(operand)


def _nested(read: Callable[..., Node]) -> Callable[..., Node]:
    """Return a method of the parser that raises UnreadableError if it is called within itself too deeply."""

    def read_deeper(parser: "_Parser", **options: bool) -> Node:
        parser.depth += 1
        if parser.depth > _MAX_DEPTH:
            raise UnreadableError
        node = read(parser, **options)
        parser.depth -= 1
        return node

    return read_deeper


class _Parser:
    """A recursive-descent parser of one text."""

    def __init__(self, latex: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(latex)
        self._place = 0
        self.depth = 0
        self._is_in_bars = False  # where the next `|` is a closing one
        self._series_above = 0  # sums and products around the place
        self._brackets: dict[int, tuple[Node, int]] = {}
        """Brackets that were already read, by their place: the content and the place after them."""

    def parse(self) -> Node:
        """Return the expression of the whole text; an infinity may only be all of it."""
        node = self._sum()
        infinite = node.operands[0] if node.operation == "-" else node
        if self._peek() or (infinite != _INFINITY and _INFINITY in within(node)):
            raise UnreadableError
        return node

    # Tokens.

    def _token(self) -> str:
        """The next token, which may be a space; empty at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _peek(self) -> str:
        """Skip spaces and return the next token; empty at the end."""
        while self._token() in _SPACES:
            self._place += 1
        return self._token()

    def _next(self) -> str:
        """Consume the next token that is not a space."""
        token = self._peek()
        self._place += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise UnreadableError

    def _command(self) -> str:
        """The name of the command that comes next; empty if none does."""
        token = self._peek()
        return token[1:] if token[:1] == "\\" else ""

    def _follows(self, pattern: re.Pattern[str]) -> bool:
        """Whether the pattern matches the text that comes next."""
        return bool(pattern.match("".join(self._tokens[self._place : self._place + _MAX_AHEAD])))

    # Sums and products.

    def _sum(self) -> Node:
        terms = [self._product(signed=True)]
        while self._peek() in {"+", "-"}:
            is_minus = self._next() == "-"
            term = self._product(signed=True)
            terms.append(Node("-", (term,)) if is_minus else term)
        return terms[0] if len(terms) == 1 else Node("+", tuple(terms))

    def _signs(self) -> int:
        """Consume the signs before a term or a factor; return how many are minus signs."""
        num_minus = 0
        while self._peek() in {"+", "-"}:
            num_minus += self._next() == "-"
        return num_minus

    def _product(self, *, signed: bool) -> Node:
        """Factors with operators or none between them; with `signed` they may begin with signs."""
        num_minus = self._signs() if signed else 0
        left = self._factors()
        while (operator := self._peek()) in _PRODUCTS or operator in _QUOTIENTS:
            self._next()
            num_minus += self._signs()
            left = Node("*" if operator in _PRODUCTS else "/", (left, self._factors()))
        return Node("-", (left,)) if num_minus % 2 else left

    def _factors(self) -> Node:
        """The product of factors without a sign between them, such as `2x(y+1)`."""
        factors = [self._factor()]
        while self._begins_factor():
            if self._peek().isdigit() and factors[-1].operation in {"number", "name"}:
                raise UnreadableError  # `2 3` and `x2` are not products
            factors.append(self._factor())
        return factors[0] if len(factors) == 1 else Node("*", tuple(factors))

    def _begins_factor(self) -> bool:
        token = self._peek()
        if token == "|":
            return not self._is_in_bars
        if token in _BRACKETS or (token.isascii() and token.isalnum()):
            return True
        return self._command() in _BEGIN_FACTOR

    def _factor(self) -> Node:
        if function := self._function_name():
            return self._function(function)
        return self._powers(self._atom())

    def _powers(self, base: Node) -> Node:
        """An atom with the powers, factorials and degree signs after it."""
        while (token := self._peek()) in {"^", "!", "_", "'"} or token == r"\degree":
            if token == "^" and base.operation == "^":
                raise UnreadableError
            self._next()
            if token == "^":
                base = Node("^", (base, self._exponent()))
            elif token == "!" and self._peek() == "!":
                self._next()
                base = Node("double factorial", (base,))
            elif token == "!":
                base = Node("factorial", (base,))
            elif token == r"\degree":
                base = Node("degree", (base,))
            else:  # an index or a prime of something that has no name
                raise UnreadableError
        return base

    def _exponent(self) -> Node:
        """The content of braces, or a number or argument, which may have a sign."""
        if self._peek() == "{":
            return self._atom()
        is_negative = self._peek() in {"+", "-"} and self._next() == "-"
        power = self._number() if self._peek().isdigit() else self._argument()
        return Node("-", (power,)) if is_negative else power

    def _argument(self, *, is_last: bool = False) -> Node:
        r"""The argument of a command such as `\frac`: one group, one digit, one letter or one command."""
        token = self._peek()
        if token.isascii() and token.isdigit():
            digit = self._next()
            if is_last and self._token().isdigit():
                raise UnreadableError  # TeX prints `\sqrt10` as the root of 1, followed by 0
            return Node("number", value=Fraction(digit))
        if token.isalpha() or token in {"{", "("} or token[:1] == "\\":
            return self._atom(indexed=False)
        raise UnreadableError

    # Functions.

    def _function_name(self) -> str:
        r"""Consume the name of a function: a command, a word in `\operatorname` or a typed word; empty without one."""
        name = self._command()
        if name in _FUNCTIONS:
            self._next()
            return name
        if name in _STYLES:
            start = self._place
            self._next()
            if self._peek() == "{" and (word := self._verbatim()) in _FUNCTIONS:
                return word
            self._place = start
        elif name == "" and (typed := self._typed()) != "sqrt":
            self._place += len(typed)
            return typed
        return ""

    def _typed(self) -> str:
        """The function name that comes next, typed without a backslash; empty if none does."""
        match = _TYPED.match("".join(self._tokens[self._place : self._place + 7]))
        return match[0] if match else ""

    def _function(self, name: str) -> Node:
        """The value of a function, with what follows its name: a power, a base and the argument."""
        power, base = self._scripts(name)
        if name in _FUNCTIONS_OF_LISTS:
            self._expect("(")
            arguments = self._separated(",")
            self._expect(")")
            return self._powers(Node(name, arguments))
        if power is not None and exact_value(power) == -1:  # the inverse function, not the reciprocal
            if name not in _INVERSES:
                raise UnreadableError
            name, power = _INVERSES[name], None
        is_bracketed = self._peek() in _BRACKETS
        argument = self._atom() if is_bracketed else self._unbracketed()
        value = Node(name, (argument,) if base is None else (argument, base))
        if power is not None:
            return Node("^", (value, power))
        return self._powers(value) if is_bracketed else value

    def _scripts(self, name: str) -> tuple[Node | None, Node | None]:
        r"""The power and the base after the name of a function, as in `\log_2^3 x`; None for each that is missing."""
        power = base = None
        while (token := self._peek()) in {"^", "_"}:
            self._next()
            if token == "^" and power is None:
                # `\sin^230` is the square of the sine of 30.
                power = self._argument() if self._peek().isdigit() else self._exponent()
            elif token == "_" and base is None and name == "log":
                base = self._number() if self._peek().isdigit() and self._is_long_index() else self._argument()
            else:
                raise UnreadableError
        return power, base

    def _is_long_index(self) -> bool:
        r"""Whether all digits that follow are the base: `\log_10 2` has the base 10, but `\log_28` is the log of 8."""
        start = self._place
        digits, after = self._digits(), self._token()
        self._place = start
        return len(digits) > 1 and after != ""

    @_nested
    def _unbracketed(self) -> Node:
        """The argument of a function without brackets; see the top of this file for its end."""
        if self._signs() % 2:
            return Node("-", (self._unbracketed(),))
        if function := self._function_name():
            return self._function(function)
        factors = [self._powers(self._atom())]
        while self._begins_factor():
            start = self._place
            if self._function_name():  # the next function is not part of the argument
                self._place = start
                break
            is_numeric = all(exact_value(factor) is not None for factor in factors)
            if self._peek() in _BRACKETS and not is_numeric:
                break
            if self._peek().isdigit() and factors[-1].operation in {"number", "name"}:
                raise UnreadableError
            factors.append(self._powers(self._atom()))
        return factors[0] if len(factors) == 1 else Node("*", tuple(factors))

    # Atoms.

    @_nested
    def _atom(self, *, indexed: bool = True) -> Node:
        """A number, a name, a bracket or a command with its arguments; with `indexed`, a name may have an index."""
        token = self._peek()
        if (token.isascii() and token.isdigit()) or token == ".":
            return self._number()
        if token in _BRACKETS:
            return self._bracket()
        if token.isascii() and token.isalpha():
            if self._typed() == "sqrt":
                self._place += 4
                return Node("root", (self._argument(), Node("number", value=Fraction(2))))
            return self._name(self._next(), indexed=indexed)
        return self._command_atom(indexed=indexed)

    def _command_atom(self, *, indexed: bool) -> Node:
        """A constant, a Greek letter, a fraction, a name with an accent, styled text, or a structure."""
        start = self._place
        name = self._command()
        self._next()
        if name in _CONSTANTS:
            return Node("constant", value=_CONSTANTS[name])
        if name in _NAMES:
            return self._name(f"\\{name}", indexed=indexed)
        if name in _WITH_TWO_ARGUMENTS:
            return Node(_WITH_TWO_ARGUMENTS[name], (self._argument(), self._argument(is_last=True)))
        if name in _ACCENTS:
            word = self._verbatim() if self._peek() == "{" else self._next()
            if not re.fullmatch(r"[a-zA-Z]+|\\[a-z]+", word):
                raise UnreadableError
            return self._name(f"\\{name} {word}", indexed=indexed)
        if name in _STYLES and self._peek() == "{":
            text = self._verbatim()
            if _WORD.search(text):
                raise UnreadableError
            # Replace the command by its text, and read that.
            self._tokens[start : self._place] = ["{", *_TOKEN.findall(text), "}"] if len(text) > 1 else [text or " "]
            self._place = start
            return self._atom(indexed=indexed)
        return self._structure(name)

    def _structure(self, name: str) -> Node:
        """A matrix, a series or a root, whose command has been consumed."""
        if name == "begin":
            return self._matrix()
        if name in _SERIES:
            return self._series(name)
        if name != "sqrt":
            raise UnreadableError
        index = Node("number", value=Fraction(2))
        if self._peek() == "[":
            self._next()
            index = self._sum()
            self._expect("]")
        return Node("root", (self._argument(is_last=True), index))

    def _series(self, name: str) -> Node:
        """A sum or product over an index, which is not evaluated: it equals only one with the same bounds and terms."""
        self._expect("_")
        self._expect("{")
        index = self._next()
        self._expect("=")
        low = self._sum()
        self._expect("}")
        self._expect("^")
        high = self._exponent()
        self._series_above += 1
        term = _renamed(self._product(signed=False), index, f"\\index {self._series_above}")
        self._series_above -= 1
        return Node("apply", (low, high, term), f"\\{name}")

    def _verbatim(self) -> str:
        """The text in a group in braces that contains no other group."""
        self._expect("{")
        text = ""
        while (token := self._token()) != "}":
            if token in {"{", ""}:
                raise UnreadableError
            text += token
            self._place += 1
        self._place += 1
        return text.strip()

    def _number(self) -> Node:
        """An integer, a decimal, a repeating decimal or a mixed number."""
        digits = self._digits()
        if self._token() == ".":
            self._place += 1
            places = self._digits()
            if not digits + places:
                raise UnreadableError
            value = Fraction(f"{digits or 0}.{places or 0}")
            if self._command() in {"overline", "bar", "dot"}:
                self._next()
                repeated = self._verbatim() if self._peek() == "{" else self._next()
                if not re.fullmatch("[0-9]{1,40}", repeated):
                    raise UnreadableError
                value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(places))
            return Node("number", value=value)
        number = Node("number", value=Fraction(digits))
        return Node("+", (number, self._atom())) if self._follows(_PROPER_FRACTION) else number

    def _digits(self) -> str:
        start = self._place
        while "0" <= self._token() <= "9":
            self._place += 1
        return "".join(self._tokens[start : self._place])

    def _name(self, name: str, *, indexed: bool) -> Node:
        """A variable with its index and primes, or the value of an unknown function."""
        if not indexed:
            return _named(name)
        if self._peek() == "_":
            self._next()
            name = f"{name}_{self._index()}"
        while self._peek() in {"'", r"\prime"}:
            self._next()
            name += "'"
        is_function = name.rstrip("'") in _UNKNOWN_FUNCTIONS
        if is_function and self._follows(_POWER_OF_FUNCTION):
            self._next()
            name += f"^{exact_value(self._exponent())}"
        return self._applied(name, is_function=is_function or "'" in name) or _named(name)

    def _applied(self, name: str, *, is_function: bool) -> Node | None:
        """The value of a function with this name; None without a bracket, or if name and bracket are factors."""
        if self._peek() != "(" or name in {"e", "i"}:
            return None
        start = self._place
        was_in_bars, self._is_in_bars = self._is_in_bars, False
        self._next()
        arguments = self._separated(",")
        self._expect(")")
        self._is_in_bars = was_in_bars
        if is_function or len(arguments) > 1 or arguments[0].operation in {"name", "number"}:
            return Node("apply", arguments, name)
        # Keep the bracket: reading it again would take time exponential in the depth of nesting.
        self._brackets[start] = _grouped(arguments[0]), self._place
        self._place = start
        return None

    def _index(self) -> str:
        """The index of a name: digits, a letter, a command or a group in braces."""
        if self._peek() != "{":
            index = self._next()
            while index.isdigit() and self._token().isdigit():
                index += self._next()
        else:
            index = "".join(self._verbatim().split())
        if not re.fullmatch(r"(?:[a-zA-Z0-9+,-]|\\[a-z]+)+", index):
            raise UnreadableError
        return index

    # Brackets and matrices.

    def _bracket(self) -> Node:
        """The content of brackets, or a function that is written as brackets: floor, ceiling, absolute value."""
        if known := self._brackets.get(self._place):
            content, self._place = known
            return content
        opening = self._next()
        was_in_bars, self._is_in_bars = self._is_in_bars, opening == "|"
        content = self._sum()
        self._expect(_BRACKETS[opening])
        self._is_in_bars = was_in_bars
        functions = {r"\lfloor": "floor", r"\lceil": "ceiling", "|": "abs"}
        if opening in functions:
            return Node(functions[opening], (content,))
        return _grouped(content)

    def _separated(self, separator: str) -> tuple[Node, ...]:
        """Expressions between separators: the arguments of a function, or the elements in a row of a matrix."""
        nodes = [self._sum()]
        while self._peek() == separator:
            self._next()
            nodes.append(self._sum())
        return tuple(nodes)

    def _matrix(self) -> Node:
        kind = self._verbatim()
        if kind not in {"pmatrix", "bmatrix", "matrix", "vmatrix", "array", "smallmatrix"}:
            raise UnreadableError
        if kind == "array" and not re.fullmatch(r"[clr|\s]+", self._verbatim()):
            raise UnreadableError
        rows = [self._separated("&")]
        while self._peek() == r"\\":
            self._next()
            if self._peek() != r"\end":
                rows.append(self._separated("&"))
        self._expect(r"\end")
        if self._verbatim() != kind or len({len(row) for row in rows}) != 1:
            raise UnreadableError
        matrix = Node("matrix", tuple(each for row in rows for each in row), Fraction(len(rows[0])))
        return Node("determinant", (matrix,)) if kind == "vmatrix" else matrix


def _renamed(node: Node, name: str, new: str) -> Node:
    """An expression with another name for one of its variables."""
    if node.operation in ("name", "constant") and node.value == name:  # `i` may be an index, too
        return Node("name", value=new)
    return Node(node.operation, tuple(_renamed(each, name, new) for each in node.operands), node.value)


def _grouped(node: Node) -> Node:
    """A node for brackets, where they matter: `(2)3` is a product, and `(x^2)^3` is allowed, unlike `x^2^3`."""
    return Node("group", (node,)) if node.operation in {"number", "name", "^"} else node


def _named(name: str) -> Node:
    """A variable, or one of the constants e and i."""
    return Node("constant", value=name) if name in {"e", "i"} else Node("name", value=name)


# Exact arithmetic; an irrational, undefined or huge value is an ArithmeticError.

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": lambda *terms: reduce(operator.add, terms),
    "-": operator.neg,
    "*": lambda *factors: reduce(operator.mul, factors),
    "/": operator.truediv,
    "group": lambda value: value,
}
"""Operations that Python's operators compute, for fractions as well as for the expressions of sympy."""


@lru_cache(maxsize=4096)
def exact_value(node: Node) -> Fraction | None:
    """Return the value of a constant expression; None if it is irrational, undefined or huge, or has variables."""
    try:
        return _evaluate(node)
    except ArithmeticError:
        return None


def _evaluate(node: Node) -> Fraction:
    if node.operation == "number":
        return Fraction(node.value)
    if node.operation not in _EXACT:
        raise ArithmeticError
    value: Fraction = _EXACT[node.operation](*map(_evaluate, node.operands))
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ArithmeticError
    return value


def _root(value: Fraction, index: Fraction) -> Fraction:
    if index == 2 and value >= 0:
        root = Fraction(isqrt(value.numerator), isqrt(value.denominator))
        if root * root == value:
            return root
    raise ArithmeticError


def _factorial(value: Fraction) -> Fraction:
    if value not in range(_MAX_FACTORIAL + 1):
        raise ArithmeticError
    return Fraction(factorial(int(value)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise ArithmeticError
    if abs(base) in {0, 1}:
        return base if exponent % 2 else abs(base)
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > _MAX_BITS:
        raise ArithmeticError
    return base ** int(exponent)


_EXACT = ARITHMETIC | {"^": _power, "root": _root, "factorial": _factorial}
