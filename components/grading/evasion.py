r"""Refusal of answers that have the right value but leave the work undone: echoes of the question, unevaluated sums.

"Compute 513^2 - 487^2" has the answer 26000; `513^2 - 487^2` has the same value, but repeats the question. The rules do
not ask how an answer was found. They need the question, except for the rule about sums and products of numbers.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from components.grading.expression import Node, UnreadableError, exact_value, parse_expression, within
from components.grading.parsing import Answer, Kind, Structure, exact_parts, is_name, parse, parse_structure
from components.grading.quantities import parse_number
from components.grading.text_rules import approximates
from components.grading.units import DEGREE, FORMULA, PERCENT
from components.grading.verdicts import Reason

_FREE = frozenset(map(Fraction, (1, 2, 100)))
"""Numbers that an expression needs although they are not in the question: for a half, a square, a percentage."""
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
_CHOICE = re.compile("[A-H]")
_MIN_CHARACTERS = 3
_MAX_PRIME = 10**6


def evasion(question: str, gold: Answer, answer: Answer) -> Reason | None:
    """Return why an answer with the right value is refused; None for an answer that counts."""
    if _CHOICE.fullmatch(gold.text):  # the text of the right choice is in the question
        return None
    if question and _is_in_old_unit(question, gold, answer):
        return Reason.ECHO
    structure = parse_structure(answer.latex)
    if structure.kind is Kind.EQUATION and approximates(structure, gold):
        return None
    expected, values = _values(gold.latex), _values(answer.latex)
    if question:  # each value must be worked out, unless the expected answer has it, too
        known = {node for _, node in expected if node}
        for latex, node in values:
            if node not in known and (reason := _reason_for_value(question, expected, latex, node)):
                return reason
    if answer.number or _has_result(structure, gold):
        return None
    # With or without a question, a sum or product to work out is refused where numbers are expected.
    wants_numbers = all(r"\infty" in latex or parse(latex).number for latex, _ in expected)
    return Reason.SETUP if wants_numbers and any(_is_open(latex) for latex, _ in values) else None


def _has_result(structure: Structure, gold: Answer) -> bool:
    """Whether this is an equation with a number as one side, as in `48+24 = 72`; it must not contradict the gold."""
    sides = exact_parts(structure) if structure.kind is Kind.EQUATION else ()
    numbers = [number for side in sides if (number := parse(side).number)]
    return any(gold.number is None or number.equals(gold.number) for number in numbers)


def _reason_for_value(question: str, expected: "list[_Value]", latex: str, node: Node | None) -> Reason | None:
    """Return why a value of the answer is refused: it is in the question, or only combines numbers of the question."""
    if node is None:  # not readable as mathematics, so the texts are compared
        written = _SPACING.sub("", latex)
        is_echo = len(written) >= _MIN_CHARACTERS and written in _SPACING.sub("", question)
        return Reason.ECHO if is_echo else None
    if node.operation == "=":
        sides = [side for side in node.operands if side.operands]  # without single names and numbers, as y in y = 2x
        asked = _expressions(question)
        if _wants_numbers(expected) and _has_new_number(question, node):  # m + n = 5, where "m + n" is asked for
            return None
        return Reason.ECHO if sides and all(_is_in_any(side, asked) for side in sides) else None
    if not _is_number(node):
        return _reason_for_expression(question, expected, latex, node)
    forms = {_form(each) for each, _ in expected}
    if forms == {"integer"} and _form(latex) in {"fraction", "expression"}:  # maybe a division that is to be done
        return Reason.SETUP if _is_setup(question, node) else None
    return Reason.ECHO if _is_unconverted(question, forms, latex, node) else None


def _reason_for_expression(question: str, expected: "list[_Value]", latex: str, node: Node) -> Reason | None:
    """Why an expression is refused: it or a constant part is in the question, or its numbers are to be combined."""
    asked = _expressions(question)
    wants_numbers = _wants_numbers(expected)
    parts = [node]
    if wants_numbers:  # then its constant parts should have been evaluated, too
        parts += [each for each in within(node) if each.operands and not _is_number(each) and not _has_names(each)]
    if any(_is_in_any(part, asked) for part in parts):
        return Reason.ECHO
    is_unfinished = wants_numbers or (_is_open(latex) and not any(_is_open(each) for each, _ in expected))
    return Reason.SETUP if is_unfinished and _is_setup(question, node) else None


def _wants_numbers(expected: "list[_Value]") -> bool:
    """Whether all expected values are numbers."""
    return bool(expected) and all(each and _is_number(each) for _, each in expected)


def _has_new_number(question: str, equation: Node) -> bool:
    """Whether a side of an equation is a number that is not in the question."""
    values = [exact_value(side) for side in equation.operands if _is_number(side)]
    return any(value is not None and value not in _numbers(question) for value in values)


def _is_in_old_unit(question: str, gold: Answer, answer: Answer) -> bool:
    """Whether an answer repeats, in its old unit, a measurement that the question asks to convert."""
    if not answer.unit or answer.unit == gold.unit or not answer.number or not _CONVERTS_UNITS.search(question):
        return False
    # Only degrees and percent are converted to a number without a unit.
    may_convert = gold.unit is not None or answer.unit in {DEGREE, PERCENT}
    return may_convert and answer.number.value in _numbers(question)


def _is_unconverted(question: str, forms: set[str], latex: str, node: Node) -> bool:
    """Whether a number is in the question, and in another notation than the expected one."""
    form = _form(latex)
    if form == "integer":  # the expected form may be powers or factors
        return forms == {"expression"} and node.value in _numbers(question)
    if (form in forms and form != "fraction") or (form == "decimal" and not _CONVERTS.search(question)):
        return False
    asked_terms = (term for whole in _expressions(question) for term in _terms(whole))
    return any(term in (node, _negative(node)) for term in asked_terms)


def _is_setup(question: str, node: Node) -> bool:
    """Whether an expression only combines numbers of the question.

    Other numbers among 1, 2 and 100 are allowed beside two numbers of the question.
    """
    numbers = {abs(Fraction(each.value)) for each in within(node) if each.operation == "number"} - {Fraction(1)}
    asked = _numbers(question)
    if any(each.operation == "factorial" for each in within(node)):  # a binomial coefficient has (n - k)!
        asked |= {one - other for one in asked for other in numbers}
    copied, others = numbers & asked, numbers - asked
    if others:
        return others <= _FREE and len(copied - _FREE) > 1
    return bool(copied)


def _form(latex: str) -> str:
    """The notation of a value: `integer`, `decimal`, `fraction`, `mixed`, `percent` or `expression`."""
    answer = parse(latex)
    if answer.unit == PERCENT:
        return "percent"
    return next((form for form, pattern in _FORMS.items() if pattern.fullmatch(answer.text)), "expression")


# Sums and products of numbers that could be one number.


def _is_open(latex: str) -> bool:
    """Whether an expression has a sum or product of numbers that is still to be evaluated."""
    if parse(latex).number:  # else mixed numbers count as sums, scientific ones as products
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
    """Whether an expression is a rational number without roots and factorials, or such a number of degrees."""
    node = node.operands[0] if node.operation == "degree" else node
    return exact_value(node) is not None and not any(each.operation in {"root", "factorial"} for each in within(node))


def _is_closed_form(node: Node) -> bool:
    r"""Whether people write this as an answer: `2^{10}-1`, `1-(\frac56)^2`, or a prime factorization `2^4\cdot 3`."""
    if node.operation == "*":
        factors = list(_factors(node))
        bases = [exact_value(each.operands[0] if _is_power(each) else each) for each in factors]
        are_different_primes = len(set(bases)) == len(bases) and all(map(_is_prime, bases))
        return are_different_primes and any(map(_is_power, factors))
    terms = [each.operands[0] if each.operation == "-" else each for each in node.operands]
    return len(terms) == 2 and any(map(_is_power, terms)) and any(each.value == 1 for each in terms)


def _factors(node: Node) -> Iterator[Node]:
    """The factors of a product, and those of products in it."""
    if node.operation != "*":
        yield node
        return
    for operand in node.operands:
        yield from _factors(operand)


def _is_power(node: Node) -> bool:
    """Whether this is a number other than 0, 1 and -1 to a known power other than 0 and 1."""
    if node.operation != "^":
        return False
    base, exponent = map(exact_value, node.operands)
    return base not in {None, 0, 1, -1} and exponent not in {None, 0, 1}


def _is_prime(value: Fraction | None) -> bool:
    if value is None or value.denominator > 1 or not 2 <= value < _MAX_PRIME:
        return False
    return all(value.numerator % divisor for divisor in range(2, isqrt(value.numerator) + 1))


# The values of an answer, and the expressions and numbers of a question.

_Value = tuple[str, Node | None]
"""A value in LaTeX, and its canonical expression; None if it is not an expression."""
_NO_FORMULA = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\}|\\(?:begin|end)\{[a-z*]+\}|\\\\|&|\\q?quad(?![a-zA-Z])|\\(?:to|implies)\b"
)
_TERM = r"[-(\[|]*(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+|[a-zA-Z](?![a-zA-Z]))[!)\]|]*"
_TYPED = re.compile(rf"(?<![\w\\.]){_TERM}(?:\s*(?:\*\*|[-+*/^=\u00d7\u00f7\u00b7\u2212])?\s*{_TERM})*")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)?")
_DIGITS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+")
_MAX_CHARACTERS = 4000


def _values(latex: str) -> list[_Value]:
    """The values of an answer: its parts; for an equation the last side, or the equation if it has unknowns."""
    structure = parse_structure(latex)
    if structure.kind is Kind.EXPRESSION:
        return [(latex, _canonical(latex))]
    if structure.kind in {Kind.EQUATION, Kind.INEQUALITY}:
        sides = [_canonical(part) for part in structure.parts]
        is_constant = all(side and not _has_names(side) for side in sides)
        if is_name(structure.parts[0]) or is_constant or "~" in structure.signs:
            return _values(exact_parts(structure)[-1])
        readable = sorted((side for side in sides if side), key=repr)
        return [(latex, Node("=", tuple(readable)) if len(readable) == len(sides) else None)]
    return [value for part in _parts(latex) for value in _values(part)]


def _parts(latex: str) -> list[str]:
    """The parts of an answer; those of a matrix are its elements."""
    structure = parse_structure(latex)
    parts = "&".join(structure.parts).split("&") if structure.kind is Kind.MATRIX else structure.parts
    return [part for part in parts if part.strip()]


@lru_cache(maxsize=512)
def _expressions(question: str) -> tuple[Node, ...]:
    """The canonical expressions in a question: in its formulas, and in its text if they look like formulas."""
    text = question[:_MAX_CHARACTERS]
    formulas = [next(filter(None, match.groups())) for match in FORMULA.finditer(text)]
    pieces = [piece for formula in formulas for piece in _NO_FORMULA.split(formula)]
    pieces += [match.group() for match in _TYPED.finditer(FORMULA.sub(" ; ", text))]
    return tuple(dict.fromkeys(node for piece in pieces for node in _canonical_parts(piece.strip(" .,;:?"))))


def _canonical_parts(latex: str) -> Iterator[Node]:
    """Yield the canonical expression of a formula, or of each of its parts that is an expression."""
    if node := _canonical(parse(latex).latex):
        yield node
    elif len(parts := _parts(parse(latex).latex)) > 1:
        for part in parts:
            yield from _canonical_parts(part)


@lru_cache(maxsize=512)
def _numbers(question: str) -> frozenset[Fraction]:
    """The numbers in a question, in digits or words."""
    written = (Fraction(match.group().replace(",", "")) for match in _DIGITS.finditer(question))
    words = (parse_number(match.group().casefold()) for match in _WORD.finditer(question))
    return frozenset([*written, *(each.value for each in words if each)])


def _terms(node: Node) -> Iterator[Node]:
    """An expression and its parts at any depth, except the factors of products: `x/2` has no term 1/2."""
    yield node
    for part in node.operands:
        for term in part.operands if node.operation == "*" else [part]:
            yield from _terms(term)


def _is_in_any(node: Node, wholes: tuple[Node, ...]) -> bool:
    """Whether one of `wholes` contains an expression, before or after terms and factors in it cancel."""
    return any(_contains(whole, part) for whole in wholes for part in {node, _without_cancelling(node)})


def _contains(whole: Node, part: Node) -> bool:
    """Whether an expression is in another one, or is some of the terms of a sum or factors of a product in it."""
    if part.operation not in {"+", "*"}:
        return part in within(whole)
    wanted = [Counter(part.operands)]
    if part.operation == "+":
        wanted.append(Counter(map(_negative, part.operands)))
    same_kind = [Counter(each.operands) for each in within(whole) if each.operation == part.operation]
    return any(need <= operands for operands in same_kind for need in wanted)


def _is_number(node: Node) -> bool:
    """Whether a canonical expression is a number: an integer, a decimal, a fraction or a mixed number."""
    if node.operation == "*":
        factors = [each for each in node.operands if each != _MINUS_ONE]
        num_integers = sum(each.operation == "number" for each in factors)
        return len(factors) < 3 and num_integers < 2 and all(map(_is_number, factors))
    if node.operation == "^":
        return node.operands[1] == _MINUS_ONE and node.operands[0].operation == "number"
    return node.operation in {"number", "mixed"}


def _has_names(node: Node) -> bool:
    return any(each.operation in {"name", "apply"} for each in within(node))


# Canonical forms: the same expression for trivially different notation, with nothing evaluated or expanded.


def _number(value: int) -> Node:
    return Node("number", value=Fraction(value))


_ZERO, _ONE, _MINUS_ONE = map(_number, (0, 1, -1))


def _canonical(latex: str) -> Node | None:
    """The canonical expression of a text; None if it is not an expression."""
    try:
        return canonical(parse_expression(latex))
    except UnreadableError:
        return None


@lru_cache(maxsize=4096)
def canonical(node: Node) -> Node:
    r"""Return an expression with the terms of sums and the factors of products in a fixed order.

    `\frac{a}{b}`, `a/b` and `a b^{-1}` have one form, as have `\sqrt{x}` and `x^{1/2}`; `+ 0`, `\cdot 1` and double
    minus signs are dropped. `2 + 3` and `5` have different forms, as have `(x+1)^2` and `x^2+2x+1`.
    """
    operands = tuple(map(canonical, node.operands))
    if node.operation in _CANONICAL:
        return _CANONICAL[node.operation](*operands)
    return Node(node.operation, operands, node.value)


def _sum_or_mixed(*terms: Node) -> Node:
    """The sum, or a mixed number if the terms are an integer and a fraction."""
    is_mixed = len(terms) == 2 and terms[0].operation == "number" and terms[1].operation in {"*", "^"}
    return Node("mixed", terms) if is_mixed and _is_number(terms[1]) else _sum(terms)


def _sum(terms: tuple[Node, ...]) -> Node:
    """The sum of terms in a fixed order, without sums and zeros among them."""
    flat = [each for term in terms for each in (term.operands if term.operation == "+" else (term,)) if each != _ZERO]
    if len(flat) < 2:
        return flat[0] if flat else _ZERO
    return Node("+", tuple(sorted(flat, key=repr)))


def _product(factors: tuple[Node, ...]) -> Node:
    """The product, with one sign for all factors, and a power for equal factors."""
    flat = [each for factor in factors for each in (factor.operands if factor.operation == "*" else (factor,))]
    num_negative = sum(map(_is_negative, flat))
    counts = Counter(_negative(each) if _is_negative(each) else each for each in flat)
    del counts[_ONE]
    powers = sorted((_repeated(each, count) for each, count in counts.items()), key=repr) or [_ONE]
    product = Node("*", tuple(powers)) if len(powers) > 1 else powers[0]
    return _negative(product) if num_negative % 2 else product


def _is_negative(node: Node) -> bool:
    return node.operation == "number" and Fraction(node.value) < 0


def _negative(node: Node) -> Node:
    """The canonical form of -1 times an expression."""
    if node.operation == "number":
        return Node("number", value=-Fraction(node.value))
    if node.operation == "+":
        return _sum(tuple(map(_negative, node.operands)))
    factors = node.operands if node.operation == "*" else (node,)
    if _MINUS_ONE in factors:
        return _product(tuple(each for each in factors if each != _MINUS_ONE))
    return Node("*", tuple(sorted([_MINUS_ONE, *factors], key=repr)))


def _repeated(factor: Node, count: int) -> Node:
    """The product of `count` equal factors."""
    if factor.operation == "^" and factor.operands[1] == _MINUS_ONE:
        return _power(factor.operands[0], _number(-count))
    return _power(factor, _number(count))


def _power(base: Node, exponent: Node) -> Node:
    if exponent == _ONE:
        return base
    if exponent == _ZERO or base == _ONE:
        return _ONE
    return _reciprocal(base) if exponent == _MINUS_ONE else Node("^", (base, exponent))


def _reciprocal(base: Node) -> Node:
    """The canonical form of an expression to the power of -1."""
    if base.operation == "*":
        return _product(tuple(_power(part, _MINUS_ONE) for part in base.operands))
    if _is_negative(base):
        return base if base == _MINUS_ONE else _negative(_reciprocal(_negative(base)))
    if base.operation == "^":
        return _power(base.operands[0], _negative(base.operands[1]))
    return Node("^", (base, _MINUS_ONE))


_CANONICAL: dict[str, Callable[..., Node]] = {
    "group": lambda content: content,
    "degree": lambda content: content,
    "-": _negative,
    "+": _sum_or_mixed,
    "*": lambda *factors: _product(factors),
    "/": lambda over, under: _product((over, _power(under, _MINUS_ONE))),
    "^": _power,
    "root": lambda base, index: _power(base, _power(index, _MINUS_ONE)),
    "lg": lambda value: Node("log", (value,)),
}


def _without_cancelling(node: Node) -> Node:
    """A sum or product without the terms or factors that cancel."""
    if node.operation not in {"+", "*"}:
        return node
    combine, invert = (_sum, _negative) if node.operation == "+" else (_product, _reciprocal)
    counts = Counter(node.operands)
    remaining = Counter({each: count - counts[invert(each)] for each, count in counts.items()})
    return combine(tuple(remaining.elements()))  # which leave out counts below 1
