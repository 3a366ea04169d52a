r"""Whether an answer that has the right value leaves to others what the expected answer has done.

"Compute 513^2 - 487^2" has the answer 26000; `513^2 - 487^2` has the same value, and is the question. The rules do not
ask how an answer was found. Those about parts of the question need the question; that about sums and products does not.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from components.grading.expression import Node, UnreadableError, exact_value, parse_expression
from components.grading.parsing import Answer, Kind, Structure, exact_parts, is_name, parse, parse_structure
from components.grading.quantities import parse_number
from components.grading.text_rules import approximates
from components.grading.units import DEGREE, FORMULA, PERCENT
from components.grading.verdicts import Reason

_FREE = frozenset(map(Fraction, (1, 2, 100)))
"""Numbers that stand in formulas rather than in questions: a half, a square, a percentage."""
_CONVERTS = re.compile(
    r"\b(?:fraction|decimal|percent(?:age)?|mixed number|lowest terms|simplest form|scientific notation)", re.IGNORECASE
)
_CONVERTS_UNITS = re.compile(
    r"\b(?:convert|express|write|change)(?:ed|ing)?\b|\bhow many\b|\b(?:as an?|in) (?:decimal|fraction|radian)",
    re.IGNORECASE,
)
_FORMS = {
    "integer": re.compile("-?[0-9,]+"),
    "decimal": re.compile(r"-?[0-9,]*\.[0-9]+"),
    "fraction": re.compile(r"-?\\frac\{-?[0-9]+\}\{[0-9]+\}|-?[0-9]+/[0-9]+"),
    "mixed": re.compile(r"-?[0-9]+ ?\\frac\{[0-9]+\}\{[0-9]+\}|-?[0-9]+ [0-9]+/[0-9]+"),
}
_SPACING = re.compile(r"\s+|\\(?:left|right|[,;:! ])|\$")
_LETTER = re.compile("[A-H]")
_MIN_CHARACTERS = 3
_MAX_PRIME = 10**6


def evasion(question: str, gold: Answer, answer: Answer) -> Reason | None:
    """Return why an answer with the right value is refused: it repeats the question, or is still to be evaluated.

    None for an honest answer, such as one that is written as the expected answer is.
    """
    if _LETTER.fullmatch(gold.text):  # the question has the text of each choice
        return None
    if question and _is_in_old_unit(question, gold, answer):
        return Reason.ECHO
    structure = parse_structure(answer.latex)
    if structure.kind is Kind.EQUATION and approximates(structure, gold):
        return None
    expected, values = _values(gold.latex), _values(answer.latex)
    if question:
        known = {node for _, node in expected if node}
        for latex, node in values:
            if node not in known and (reason := _reason(question, expected, latex, node)):
                return reason
    if answer.number or _computes(structure, gold):
        return None
    wants_numbers = all(r"\infty" in latex or _number(latex) for latex, _ in expected)
    return Reason.SETUP if wants_numbers and any(_is_open(latex) for latex, _ in values) else None


def _computes(structure: Structure, gold: Answer) -> bool:
    """Whether a side of an equation is a number, and not another one than is expected: `48+24 = 72`."""
    sides = exact_parts(structure) if structure.kind is Kind.EQUATION else ()
    numbers = [number for side in sides if (number := parse(side).number)]
    return any(gold.number is None or number.equals(gold.number) for number in numbers)


def _reason(question: str, expected: "list[_Value]", latex: str, node: Node | None) -> Reason | None:
    """Why a value is a part of the question, or puts numbers of it together."""
    asked, wanted = _asked(question), {each for _, each in expected}
    if node is None:
        squeezed = _SPACING.sub("", latex)
        return Reason.ECHO if len(squeezed) >= _MIN_CHARACTERS and squeezed in _SPACING.sub("", question) else None
    if node.operation == "=":
        is_echo = any(side.operands for side in node.operands) and all(
            not side.operands or _stands_in(side, asked) for side in node.operands
        )
        return Reason.ECHO if is_echo else None
    wants_numbers = bool(wanted) and all(each and _is_number(each) for each in wanted)
    if _is_number(node):
        forms = {_form(each) for each, _ in expected}
        if forms == {"integer"} and _form(latex) in {"fraction", "expression"}:
            return Reason.SETUP if _is_setup(question, node) else None  # a division
        return Reason.ECHO if _is_unconverted(question, forms, latex, node) else None
    parts = [each for each in _within(node) if each.operands and not _is_number(each) and not _names(each)]
    if _stands_in(node, asked) or (wants_numbers and any(_stands_in(part, asked) for part in parts)):
        return Reason.ECHO
    to_do = wants_numbers or (_is_open(latex) and not any(_is_open(each) for each, _ in expected))
    return Reason.SETUP if to_do and _is_setup(question, node) else None


def _is_in_old_unit(question: str, gold: Answer, answer: Answer) -> bool:
    """Whether an answer is a measurement of the question that was to be converted."""
    if not answer.unit or answer.unit == gold.unit or not answer.number or not _CONVERTS_UNITS.search(question):
        return False
    return (gold.unit is not None or answer.unit in {DEGREE, PERCENT}) and answer.number.value in _numbers(question)


def _is_unconverted(question: str, forms: set[str], latex: str, node: Node) -> bool:
    """Whether a number is one of the question in another notation than the one expected."""
    form = _form(latex)
    if form == "integer":  # where its powers or factors are expected
        return forms == {"expression"} and node.value in _numbers(question)
    if (form in forms and form != "fraction") or (form == "decimal" and not _CONVERTS.search(question)):
        return False
    return any(each in (node, _negative(node)) for whole in _asked(question) for each in _standing(whole))


def _is_setup(question: str, node: Node) -> bool:
    """Whether an expression does nothing but put numbers of the question together."""
    numbers = {abs(Fraction(each.value)) for each in _within(node) if each.operation == "number"} - {Fraction(1)}
    asked = _numbers(question)
    if any(each.operation == "factorial" for each in _within(node)):  # `n` over `k` has the factorial of n - k
        asked |= {one - other for one in asked for other in numbers}
    copied, strange = numbers & asked, numbers - asked
    return bool(copied) and strange <= _FREE and (not strange or len(copied - _FREE) > 1)


def _form(latex: str) -> str:
    answer = parse(latex)
    if answer.unit == PERCENT:
        return "percent"
    return next((form for form, pattern in _FORMS.items() if pattern.fullmatch(answer.text)), "expression")


def _number(latex: str) -> bool:
    return parse(latex).number is not None


# Sums and products of numbers that could be one number.


def _is_open(latex: str) -> bool:
    if _number(latex):  # a mixed number is a sum, and scientific notation is a product
        return False
    try:
        return _has_open_part(parse_expression(latex))
    except UnreadableError:
        return False


def _has_open_part(node: Node) -> bool:
    if node.operation in {"+", "*"} and sum(map(_is_known, node.operands)) > 1:
        return not _is_closed_form(node)
    return any(map(_has_open_part, node.operands))


def _is_known(node: Node) -> bool:
    """Whether an expression, or an angle in degrees, is a rational number without roots and factorials."""
    node = node.operands[0] if node.operation == "degree" else node
    return exact_value(node) is not None and not any(each.operation in {"root", "factorial"} for each in _within(node))


def _is_closed_form(node: Node) -> bool:
    r"""Whether numbers are left as powers: `2^{10}-1`, `1-(\frac56)^2`, and the prime factorization `2^4\cdot 3`."""
    if node.operation == "*":
        factors = list(_factors(node))
        bases = [exact_value(each.operands[0] if _is_power(each) else each) for each in factors]
        return any(map(_is_power, factors)) and len(set(bases)) == len(bases) and all(map(_is_prime, bases))
    terms = [each.operands[0] if each.operation == "-" else each for each in node.operands]
    return len(terms) == 2 and any(map(_is_power, terms)) and any(each.value == 1 for each in terms)


def _factors(node: Node) -> Iterator[Node]:
    if node.operation != "*":
        yield node
    else:
        for operand in node.operands:
            yield from _factors(operand)


def _is_power(node: Node) -> bool:
    """Whether this is a number to a whole power other than 0 and 1."""
    if node.operation != "^":
        return False
    base, exponent = map(exact_value, node.operands)
    return base not in {None, 0, 1, -1} and exponent not in {None, 0, 1}


def _is_prime(value: Fraction | None) -> bool:
    if value is None or value.denominator > 1 or not 2 <= value < _MAX_PRIME:
        return False
    return all(value.numerator % divisor for divisor in range(2, isqrt(value.numerator) + 1))


# What stands in an answer, and in a question.

_Value = tuple[str, Node | None]
"""A value as it is written, and its canonical expression; None where it is not an expression."""
_NO_FORMULA = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\}|\\(?:begin|end)\{[a-z*]+\}|\\\\|&|\\q?quad(?![a-zA-Z])|\\(?:to|implies)\b"
)
_TERM = r"[-(\[|]*(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+|[a-zA-Z](?![a-zA-Z]))[!)\]|]*"
_TYPED = re.compile(rf"(?<![\w\\.]){_TERM}(?:\s*(?:\*\*|[-+*/^=\u00d7\u00f7\u00b7\u2212])?\s*{_TERM})*")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)?")
_DIGITS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+")
_MAX_CHARACTERS = 4000


def _values(latex: str) -> list[_Value]:
    """The values of an answer: its parts, and of an equation its last side, or all where it is one in unknowns."""
    structure = parse_structure(latex)
    if structure.kind is Kind.EXPRESSION:
        return [(latex, _canonical(latex))]
    if structure.kind in {Kind.EQUATION, Kind.INEQUALITY}:
        sides = [_canonical(part) for part in structure.parts]
        is_constant = all(side and not _names(side) for side in sides) or "~" in structure.signs
        if is_name(structure.parts[0]) or is_constant:
            return _values(exact_parts(structure)[-1])
        known = [side for side in sides if side]
        is_whole = len(known) == len(sides)
        return [(latex, Node("=", tuple(sorted(known, key=repr))) if is_whole else None)]
    return [value for part in _parts(latex) for value in _values(part)]


def _parts(latex: str) -> list[str]:
    structure = parse_structure(latex)
    rows = structure.parts
    parts = [part for row in rows for part in row.split("&")] if structure.kind is Kind.MATRIX else rows
    return [part for part in parts if part.strip()]


@lru_cache(maxsize=512)
def _asked(question: str) -> tuple[Node, ...]:
    """The expressions in a question: in its formulas, and what is typed like one."""
    text = question[:_MAX_CHARACTERS]
    formulas = [next(filter(None, match.groups())) for match in FORMULA.finditer(text)]
    pieces = [piece for formula in formulas for piece in _NO_FORMULA.split(formula)]
    pieces += [match.group() for match in _TYPED.finditer(FORMULA.sub(" ; ", text))]
    return tuple(dict.fromkeys(node for piece in pieces for node in _readable(piece.strip(" .,;:?"))))


def _readable(latex: str) -> Iterator[Node]:
    if node := _canonical(parse(latex).latex):
        yield node
    elif len(parts := _parts(parse(latex).latex)) > 1:
        for part in parts:
            yield from _readable(part)


@lru_cache(maxsize=512)
def _numbers(question: str) -> frozenset[Fraction]:
    written = (Fraction(match.group().replace(",", "")) for match in _DIGITS.finditer(question))
    words = (parse_number(match.group().casefold()) for match in _WORD.finditer(question))
    return frozenset([*written, *(each.value for each in words if each)])


def _within(node: Node) -> Iterator[Node]:
    yield node
    for operand in node.operands:
        yield from _within(operand)


def _standing(node: Node) -> Iterator[Node]:
    """An expression and all in it, but no single factors: a half does not stand in `x/2`."""
    yield node
    for part in node.operands:
        yield from (
            _standing(part) if node.operation != "*" else (each for sub in part.operands for each in _standing(sub))
        )


def _stands_in(node: Node, asked: tuple[Node, ...]) -> bool:
    """Whether the question has an expression, or as some of the terms or factors of one; also without a detour."""
    return any(_contains(each, part) for each in asked for part in {node, _without_detour(node)})


def _contains(whole: Node, part: Node) -> bool:
    if part.operation not in {"+", "*"}:
        return part in _within(whole)
    wanted = [Counter(part.operands)]
    if part.operation == "+":
        wanted.append(Counter(map(_negative, part.operands)))
    return any(
        each.operation == part.operation and any(need <= Counter(each.operands) for need in wanted)
        for each in _within(whole)
    )


def _is_number(node: Node) -> bool:
    if node.operation == "*":
        factors = [each for each in node.operands if each != _MINUS_ONE]
        return (
            len(factors) < 3
            and sum(each.operation == "number" for each in factors) < 2
            and all(map(_is_number, factors))
        )
    if node.operation == "^":
        return node.operands[1] == _MINUS_ONE and node.operands[0].operation == "number"
    return node.operation in {"number", "mixed"}


def _names(node: Node) -> bool:
    return any(each.operation in {"name", "apply"} for each in _within(node))


# The same expression for trivially different notation: nothing is evaluated or expanded.


def _of(value: int) -> Node:
    return Node("number", value=Fraction(value))


_ZERO, _ONE, _MINUS_ONE = map(_of, (0, 1, -1))


def _canonical(latex: str) -> Node | None:
    try:
        return canonical(parse_expression(latex))
    except UnreadableError:
        return None


@lru_cache(maxsize=4096)
def canonical(node: Node) -> Node:
    r"""Return an expression with the terms of sums and the factors of products in a fixed order.

    The same are `\frac{a}{b}`, `a/b` and `a b^{-1}`, `\sqrt{x}` and `x^{1/2}`, and what has `+ 0`, `\cdot 1` or two
    minus signs. `2 + 3` and `5` differ, as do `(x+1)^2` and `x^2+2x+1`.
    """
    operands = tuple(map(canonical, node.operands))
    if node.operation in _CANONICAL:
        return _CANONICAL[node.operation](*operands)
    return Node(node.operation, operands, node.value)


def _added(*terms: Node) -> Node:
    is_mixed = len(terms) == 2 and terms[0].operation == "number" and terms[1].operation in {"*", "^"}
    return Node("mixed", terms) if is_mixed and _is_number(terms[1]) else _sum(terms)


def _sum(terms: tuple[Node, ...]) -> Node:
    flat = [each for term in terms for each in (term.operands if term.operation == "+" else (term,)) if each != _ZERO]
    if len(flat) < 2:
        return flat[0] if flat else _ZERO
    return Node("+", tuple(sorted(flat, key=repr)))


def _product(factors: tuple[Node, ...]) -> Node:
    """The product, with its sign in front; equal factors are a power."""
    sign, counts = 1, Counter[Node]()
    for each in (part for factor in factors for part in (factor.operands if factor.operation == "*" else (factor,))):
        is_negative = each.operation == "number" and Fraction(each.value) < 0
        sign = -sign if is_negative else sign
        counts[_negative(each) if is_negative else each] += 1
    del counts[_ONE]
    made = [_repeated(each, count) for each, count in counts.items()]
    product = Node("*", tuple(sorted(made, key=repr))) if len(made) > 1 else made[0] if made else _ONE
    return _negative(product) if sign < 0 else product


def _negative(node: Node) -> Node:
    if node.operation == "number":
        return Node("number", value=-Fraction(node.value))
    if node.operation == "+":
        return _sum(tuple(map(_negative, node.operands)))
    factors = node.operands if node.operation == "*" else (node,)
    if _MINUS_ONE in factors:
        return _product(tuple(each for each in factors if each != _MINUS_ONE))
    return Node("*", tuple(sorted([_MINUS_ONE, *factors], key=repr)))


def _repeated(factor: Node, count: int) -> Node:
    if count == 1:
        return factor
    if factor.operation == "^" and factor.operands[1] == _MINUS_ONE:
        return _power(factor.operands[0], _of(-count))
    return Node("^", (factor, _of(count)))


def _power(base: Node, exponent: Node) -> Node:
    if exponent == _ONE:
        return base
    if exponent == _ZERO or base == _ONE:
        return _ONE
    return _reciprocal(base) if exponent == _MINUS_ONE else Node("^", (base, exponent))


def _reciprocal(base: Node) -> Node:
    if base.operation == "*":
        return _product(tuple(_power(part, _MINUS_ONE) for part in base.operands))
    if base.operation == "number" and Fraction(base.value) < 0:
        return base if base == _MINUS_ONE else _negative(_reciprocal(_negative(base)))
    if base.operation == "^":
        return _power(base.operands[0], _negative(base.operands[1]))
    return Node("^", (base, _MINUS_ONE))


_CANONICAL: dict[str, Callable[..., Node]] = {
    "group": lambda content: content,
    "degree": lambda content: content,
    "-": _negative,
    "+": _added,
    "*": lambda *factors: _product(factors),
    "/": lambda over, under: _product((over, _power(under, _MINUS_ONE))),
    "^": _power,
    "root": lambda base, index: _power(base, _power(index, _MINUS_ONE)),
    "lg": lambda value: Node("log", (value,)),
}


def _without_detour(node: Node) -> Node:
    """A sum without terms that cancel, or a product without factors that do."""
    if node.operation not in {"+", "*"}:
        return node
    counts = Counter(node.operands)
    undo = _negative if node.operation == "+" else lambda each: _power(each, _MINUS_ONE)
    left = Counter({each: count - counts[undo(each)] for each, count in counts.items()})
    return (_sum if node.operation == "+" else _product)(tuple(left.elements()))
