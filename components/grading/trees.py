r"""The structure of expressions as they are written: a tree for each, the same for trivially different notation.

Nothing is evaluated, expanded or simplified here, so `2 + 3` and `5` differ, as do `(x+1)^2` and `x^2+2x+1`. The same
are sums and products in another order, `\frac{a}{b}`, `a/b` and `a b^{-1}`, `\sqrt{x}` and `x^{1/2}`, with brackets or
without, with `+ 0`, `\cdot 1` or two minus signs, in any spelling of operators, functions and spaces.

Any text can be read, in linear time: what is no expression separates those around it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from components.grading.vocabulary import FUNCTION_NAMES


class Tree(NamedTuple):
    """An expression: a number, a name, or an operation on others."""

    head: str
    """`number`, `name`, `+`, `*`, `^`, or the name of a function or a pair of brackets."""
    value: Fraction | str = ""
    """Of a number or name."""
    parts: tuple["Tree", ...] = ()


def number(value: Fraction | int) -> Tree:
    """Return the tree of a number."""
    return Tree("number", Fraction(value))


_ZERO, _ONE, _MINUS_ONE, _HALF = (number(value) for value in (0, 1, -1, Fraction(1, 2)))
_MAX_CHARACTERS = 4000
_MAX_DEPTH = 12
_MAX_SUFFIXES = 4
_MAX_SIGNS = 8
_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2013", "-")
    | dict.fromkeys("\u00b7\u22c5\u00d7\u2217", "*")
    | dict.fromkeys("\u00f7\u2044", "/")
    | {"\u00b2": "^2", "\u00b3": "^3", "\u00b0": " ", "\u221a": r"\sqrt ", "\u03c0": r"\pi "}
    | {"\u2264": "<", "\u2265": ">", "\u2260": "=", "\u2248": "="}
)
_SPACING = re.compile(
    r"\\[dtc]frac(?![a-zA-Z])|\\[dt]binom(?![a-zA-Z])|\*\*"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|degree|q?quad)(?![a-zA-Z])\.?"
    r"|\\[,;:! ]|\\[()\[\]]|\$|~|(?<=[0-9])\{,\}(?=[0-9]{3})|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))"
)
_REPLACED = {"**": "^", "{,}": "", ",": ""}
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|operatorname)\*?\s*\{([^{}]*)\}")
_TOKEN = re.compile(
    r"(?P<number>[0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})|(?P<command>\\[a-zA-Z]+|\\.)|(?P<word>[a-zA-Z]{2,}(?:'[a-z]+)?)"
    r"|(?P<letter>[^\W\d_])|(?P<sign>[-+*/^_!|(){}\[\]%])|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_FUNCTIONS = frozenset([*FUNCTION_NAMES, "ln", "det", "dim", "gcd", "lcm", "max", "min", "arg", "deg"])
_BIG = frozenset({r"\sum", r"\prod", r"\int", r"\lim"})
_ALIASES = {"lg": "log", r"\lvert": "|", r"\rvert": "|", r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "("}
_ALIASES |= {r"\rparen": ")", r"\cdot": "*", r"\times": "*", r"\ast": "*", r"\div": "/", r"\over": "/", r"\{": "("}
_ALIASES |= {r"\}": ")", r"\%": "%"}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\langle": r"\rangle"}
_SEPARATING = (
    r"\le \leq \leqslant \ge \geq \geqslant \ne \neq \lt \gt \approx \equiv \in \cup \cap \to \rightarrow \implies "
    r"\Rightarrow \mid \begin \end \item \\ \& \pm \mp \ldots \dots \cdots \choose \atop"
)
_SEPARATORS = frozenset(_SEPARATING.split())
_WORDS = {"sqrt": r"\sqrt", "pi": r"\pi", "times": "*", "lg": "log"}
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_ARTICLE = re.compile(r"(?<![a-zA-Z\\$])(?:[aAI]|A\.)(?=\s+[a-zA-Z0-9$\\(])(?!\s+[a-zA-Z](?![a-zA-Z]))")


class _NoExpressionError(Exception):
    """No expression begins here."""


def whole(latex: str) -> Tree | None:
    """Return the tree of a text that is nothing but an expression; None for any other."""
    tokens = _tokens(_TEXT.sub(" ", latex), words=False)
    reader = _Reader(tokens)
    try:
        tree = reader.sum()
    except _NoExpressionError:
        return None
    return tree if reader.position == len(tokens) else None


@lru_cache(maxsize=512)
def all_within(text: str) -> tuple[Tree, ...]:
    """Return the longest expressions that stand in a text, in their order."""
    text = _TEXT.sub(r" ; \1 ; ", text[:_MAX_CHARACTERS])
    prose = _tokens(_ARTICLE.sub(" ; ", text), words=True)
    formulas = (_tokens(next(filter(None, match.groups())), words=False) for match in _FORMULA.finditer(text))
    return tuple(dict.fromkeys(tree for tokens in (prose, *formulas) for tree in _read_all(tokens)))


def _read_all(tokens: list[str]) -> list[Tree]:
    reader = _Reader(tokens)
    found: list[Tree] = []
    while reader.position < len(tokens):
        start = reader.position
        try:
            found.append(reader.sum())
        except _NoExpressionError:
            reader.position = start + 1
    return found


def subtrees(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and all trees in it."""
    yield tree
    for part in tree.parts:
        yield from subtrees(part)


def contains(tree: Tree, part: Tree) -> bool:
    """Tell whether `part` is in a tree: as one of its subtrees, or as some of the terms or factors of one."""
    if part.head not in {"+", "*"}:
        return part in subtrees(tree)
    wanted = [Counter(part.parts)]
    if part.head == "+":
        wanted.append(Counter(map(_negated, part.parts)))
    return any(
        each.head == part.head and any(need <= Counter(each.parts) for need in wanted) for each in subtrees(tree)
    )


def leaves(tree: Tree) -> Iterator[Tree]:
    """Yield the numbers and names of a tree, without their signs and what makes a power a division."""
    if not tree.parts:
        yield number(abs(tree.value)) if isinstance(tree.value, Fraction) else tree
    for part in tree.parts:
        if not (tree.head == "^" and part == _MINUS_ONE):
            yield from leaves(part)


def _tokens(text: str, *, words: bool) -> list[str]:
    """The tokens of a text; without `words`, letters beside one another are a product."""

    def respaced(match: re.Match[str]) -> str:
        found = match[0]
        if found in _REPLACED:
            return _REPLACED[found]
        return r"\frac" if found.endswith("frac") else r"\binom" if found.endswith("binom") else " "

    spaced = _SPACING.sub(respaced, text.translate(_SIGNS))
    tokens: list[str] = []
    for match in _TOKEN.finditer(spaced):
        token = match[0]
        if match.lastgroup == "space":
            continue
        if match.lastgroup == "word":
            known = _WORDS.get(token, token if token in _FUNCTIONS else None)
            if known is None and not words:
                tokens += token
                continue
            token = known or token
        elif match.lastgroup == "command" and token[1:] in _FUNCTIONS:
            token = token[1:]
        tokens.append(_ALIASES.get(token, token))
    return tokens


class _Reader:
    """Reads trees from tokens by recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.position = 0
        self.depth = 0

    def _peek(self, ahead: int = 0) -> str:
        place = self.position + ahead
        return self._tokens[place] if place < len(self._tokens) else ""

    def _take(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self.position += 1
        return True

    def sum(self) -> Tree:
        """A sum; the position is behind it."""
        terms = [self._product()]
        while self._peek() in {"+", "-"}:
            start = self.position
            try:
                terms.append(self._product())
            except _NoExpressionError:  # "3 + apples": what comes before the sign is an expression
                self.position = start
                break
        return make_sum(terms)

    def _product(self) -> Tree:
        """Factors with any signs before them."""
        sign = self._sign()
        factors = [self._factor()]
        while True:
            start = self.position
            try:
                if self._take("*"):
                    factors.append(self._signed_factor())
                elif self._take("/"):
                    factors.append(make_power(self._signed_factor(), _MINUS_ONE))
                elif self._begins_factor():
                    is_mixed = self._peek() == r"\frac" and len(factors) == 1 and factors[0].head == "number"
                    factors.append(self._factor())
                    if is_mixed and is_quotient(factors[1]):
                        factors = [Tree("mixed", parts=tuple(factors))]
                else:
                    break
            except _NoExpressionError:
                self.position = start
                break
        return make_product([sign, *factors])

    def _sign(self) -> Tree:
        negative = False
        for _ in range(_MAX_SIGNS):
            if self._peek() not in {"+", "-"}:
                break
            negative ^= self._peek() == "-"
            self.position += 1
        return _MINUS_ONE if negative else _ONE

    def _begins_factor(self) -> bool:
        token = self._peek()
        return bool(token) and (
            token in {"(", "[", "{", r"\lfloor", r"\lceil", r"\langle"}
            or token[0].isdigit()
            or (len(token) == 1 and token.isalpha())
            or token in _FUNCTIONS
            or (
                token[0] == "\\" and token not in _SEPARATORS and token[1:].isalpha() and token not in _CLOSING.values()
            )
        )

    def _signed_factor(self) -> Tree:
        sign = self._sign()
        return make_product([sign, self._factor()])

    def _factor(self) -> Tree:
        """A primary with what is written behind it: powers, factorials, percent signs."""
        base = self._primary()
        for _ in range(_MAX_SUFFIXES):
            if self._take("^"):
                base = make_power(base, self._argument())
            elif self._take("!"):
                base = Tree("!", parts=(base,))
            elif self._take("%"):
                base = Tree("%", parts=(base,))
            else:
                return base
        raise _NoExpressionError

    def _argument(self) -> Tree:
        """What a command or a power applies to: a group in braces, or one token."""
        if (sign := self._sign()) != _ONE:
            return make_product([sign, self._primary()])
        token = self._peek()
        if len(token) > 1 and token.isdigit():  # `\frac12` and `x^23` take one digit each
            self._tokens[self.position : self.position + 1] = [token[0], token[1:]]
        return self._primary()

    def _primary(self) -> Tree:
        self.depth += 1
        try:
            return self._read_primary()
        finally:
            self.depth -= 1

    def _read_primary(self) -> Tree:
        token = self._peek()
        if not token or self.depth > _MAX_DEPTH:
            raise _NoExpressionError
        if token in _CLOSING:
            return self._bracketed()
        self.position += 1
        if token[-1].isdigit():
            return number(Fraction(token))
        if token == "|":
            return self._absolute()
        if token in _FUNCTIONS or token in _BIG:
            return self._function(token)
        if token[0] == "\\":
            return self._command(token)
        if len(token) == 1 and token.isalpha():
            return self._name(token)
        raise _NoExpressionError

    def _absolute(self) -> Tree:
        inner = self.sum()
        if not self._take("|"):
            raise _NoExpressionError
        return Tree("|", parts=(inner,))

    def _name(self, token: str) -> Tree:
        if self._take("_"):
            index = self._argument()
            return Tree("_", token, (index,))
        return Tree("name", token)

    def _command(self, token: str) -> Tree:
        if token in _SEPARATORS or not token[1:].isalpha():
            raise _NoExpressionError
        if token == r"\frac":
            return make_product([self._argument(), make_power(self._argument(), _MINUS_ONE)])
        if token == r"\sqrt":
            degree = self._bracketed() if self._peek() == "[" else number(2)
            exponent = _HALF_TREE if degree == number(2) else make_power(degree, _MINUS_ONE)
            return make_power(self._argument(), exponent)
        if token == r"\binom":
            return make_binomial(self._argument(), self._argument())
        if self._peek() == "{":  # an accent or a style
            inner = self._bracketed()
            return inner if token.startswith((r"\math", r"\bold", r"\bf", r"\rm")) else Tree(token, parts=(inner,))
        return self._name(token)

    def _function(self, token: str) -> Tree:
        scripts: dict[str, Tree] = {}
        while self._peek() in {"_", "^"}:
            script = self._peek()
            self.position += 1
            scripts[script] = self._script() if token in _BIG else self._argument()
        if self._peek() in {"(", "{"}:
            argument = self._bracketed()
        else:
            factors = [self._factor()]
            while self._begins_factor() and self._peek() not in _FUNCTIONS and self._peek() != "(":
                factors.append(self._factor())
            argument = make_product(factors)
        if token in _BIG:
            return Tree(token, parts=(*scripts.values(), argument))
        lower = (scripts["_"],) if "_" in scripts else ()
        applied = Tree(token, parts=(*lower, argument))
        return make_power(applied, scripts["^"]) if "^" in scripts else applied

    def _script(self) -> Tree:
        """The bounds of a sum or limit, as text: `{k=1}`."""
        if self._peek() != "{":
            return self._argument()
        depth, start = 0, self.position
        while token := self._peek():
            depth += {"{": 1, "}": -1}.get(token, 0)
            self.position += 1
            if depth == 0:
                return Tree("name", "".join(self._tokens[start : self.position]))
        raise _NoExpressionError

    def _bracketed(self) -> Tree:
        opening = self._peek()
        closing = _CLOSING[opening]
        self.position += 1
        items = [self.sum()]
        if opening == "{" and self._take(r"\choose"):
            items = [make_binomial(items[0], self.sum())]
        while self._take(","):
            items.append(self.sum())
        if self._peek() not in {")", "]"} if opening in {"(", "["} else self._peek() != closing:
            raise _NoExpressionError
        self.position += 1
        if len(items) > 1:
            return Tree(f"{opening},", parts=tuple(items))
        return Tree(opening, parts=(items[0],)) if opening.startswith("\\") else items[0]


_HALF_TREE = Tree("^", parts=(number(2), _MINUS_ONE))


def is_quotient(tree: Tree) -> bool:
    """Tell whether this is a fraction of two numbers, or the reciprocal of one."""
    if tree.head == "*" and len(tree.parts) == 2 and any(part.head == "number" for part in tree.parts):
        return any(map(is_quotient, tree.parts))
    return tree.head == "^" and tree.parts[1] == _MINUS_ONE and tree.parts[0].head == "number"


def make_sum(terms: list[Tree]) -> Tree:
    """Return the sum of terms, in an order of its own."""
    flat = [each for term in terms for each in (term.parts if term.head == "+" else (term,)) if each != _ZERO]
    if len(flat) < 2:
        return flat[0] if flat else _ZERO
    return Tree("+", parts=tuple(sorted(flat, key=repr)))


def make_product(factors: list[Tree]) -> Tree:
    """Return the product of factors, in an order of its own, with its sign in front; equal ones are a power."""
    flat = [each for factor in factors for each in (factor.parts if factor.head == "*" else (factor,))]
    sign = 1
    counts: Counter[Tree] = Counter()
    for signed in flat:
        is_negative = isinstance(signed.value, Fraction) and signed.value < 0
        each = _negated(signed) if is_negative else signed
        sign = -sign if is_negative else sign
        if each == _ONE:
            continue
        counts[each] += 1
    made = [_repeated(each, count) for each, count in counts.items()]
    if sign < 0:
        return _negated(make_product(made))
    if len(made) < 2:
        return made[0] if made else _ONE
    return Tree("*", parts=tuple(sorted(made, key=repr)))


def _negated(tree: Tree) -> Tree:
    if tree.head == "number" and isinstance(tree.value, Fraction):
        return number(-tree.value)
    if tree.head == "+":
        return make_sum([_negated(part) for part in tree.parts])
    if tree.head == "*":
        if _MINUS_ONE in tree.parts:
            return make_product([part for part in tree.parts if part != _MINUS_ONE])
        return Tree("*", parts=tuple(sorted([_MINUS_ONE, *tree.parts], key=repr)))
    return Tree("*", parts=tuple(sorted([_MINUS_ONE, tree], key=repr)))


def _repeated(factor: Tree, count: int) -> Tree:
    """The product of equal factors."""
    if count == 1:
        return factor
    if factor.head == "^" and factor.parts[1] == _MINUS_ONE:
        return make_power(factor.parts[0], number(-count))
    return Tree("^", parts=(factor, number(count)))


def without_detour(tree: Tree) -> Tree:
    """Return a sum without terms that cancel, or a product without factors that do."""
    if tree.head not in {"+", "*"}:
        return tree
    undo = _negated if tree.head == "+" else _reciprocal
    counts = Counter(tree.parts)
    left = Counter({each: count - counts[undo(each)] for each, count in counts.items()})
    return (make_sum if tree.head == "+" else make_product)(list(left.elements()))


def make_power(base: Tree, exponent: Tree) -> Tree:
    """Return a power; the reciprocal of a product is one of each factor."""
    if exponent == _ONE:
        return base
    if exponent == _ZERO or base == _ONE:
        return _ONE
    return _reciprocal(base) if exponent == _MINUS_ONE else Tree("^", parts=(base, exponent))


def _reciprocal(base: Tree) -> Tree:
    if base.head == "*":
        return make_product([make_power(part, _MINUS_ONE) for part in base.parts])
    if isinstance(base.value, Fraction) and base.value < 0:
        return base if base == _MINUS_ONE else _negated(_reciprocal(_negated(base)))
    if base.head == "^":
        return make_power(base.parts[0], _negated(base.parts[1]))
    return Tree("^", parts=(base, _MINUS_ONE))


def make_binomial(n: Tree, k: Tree) -> Tree:
    """Return a binomial coefficient; one of numbers is a quotient of factorials."""
    if not (isinstance(n.value, Fraction) and isinstance(k.value, Fraction) and n.value >= k.value >= 0):
        return Tree("binomial", parts=(n, k))
    below = [number(k.value), number(n.value - k.value)]
    return make_product([Tree("!", parts=(n,)), *(_reciprocal(Tree("!", parts=(each,))) for each in below)])
