r"""Whether an answer that has the right value leaves something to do that the expected answer has done.

"Compute 513^2 - 487^2" has the answer 26000; `513^2 - 487^2` has the same value, and is the question. The rules do not
ask how an answer was found. Those about parts of the question need the question; that about sums and products does not.
"""

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from components.grading.expression import Node, UnreadableError, parse_expression, rational_value
from components.grading.parsing import Answer, Kind, is_name, parse, parse_structure
from components.grading.quantities import parse_number
from components.grading.reasons import Reason
from components.grading.trees import (
    Tree,
    all_within,
    contains,
    is_quotient,
    leaves,
    make_product,
    number,
    subtrees,
    whole,
    without_detour,
)
from components.grading.units import DEGREE, PERCENT

_FREE = frozenset(map(number, (1, 2, 100)))
"""Numbers that stand in formulas rather than in questions: a half, a square, a percentage."""
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)?")
_CONVERTS = re.compile(
    r"\b(?:fraction|decimal|percent(?:age)?|mixed number|lowest terms|simplest form|scientific notation)", re.IGNORECASE
)
_CONVERTS_UNITS = re.compile(
    r"\b(?:convert|express|write|change)(?:ed|ing)?\b|\bhow many\b|\b(?:as an?|in) (?:decimal|fraction|radian)",
    re.IGNORECASE,
)
_SPACING = re.compile(r"\s+|\\(?:left|right|[,;:! ])|\$")
_LETTER = re.compile("[A-H]")
_MIN_CHARACTERS = 3
_MAX_PRIME = 10**6


def unfinished(question: str, gold: Answer, answer: Answer) -> Reason | None:
    """Return why an answer with the right value is none: it repeats the question, or leaves its evaluation to others.

    None for an honest answer, such as one that is written as the expected answer is.
    """
    if _LETTER.fullmatch(gold.text):  # the question has the text of each choice
        return None
    if _is_in_old_unit(question, gold, answer):
        return Reason.ECHO
    expected = {each.tree for each in _values(gold.latex)}
    for value in _values(answer.latex):
        if value.tree in expected and value.tree is not None:
            continue
        if reason := _unfinished_value(question, expected, value):
            return reason
    return None


def is_unevaluated(gold: Answer, answer: Answer) -> bool:
    """Tell whether an answer is a sum or a product of numbers where a number is expected: `48+24` for 72."""
    if answer.number:
        return False
    structure = parse_structure(answer.latex)
    if structure.kind is Kind.EQUATION and any(parse(part).number for part in structure.parts):
        return False  # `48+24 = 72`
    if not any(_is_open(each.latex) for each in _values(answer.latex)):
        return False
    return all(r"\infty" in each.latex or parse(each.latex).number for each in _values(gold.latex))


def _is_open(latex: str) -> bool:
    if parse(latex).number:  # a mixed number is a sum, and scientific notation is a product
        return False
    try:
        return _has_open_part(parse_expression(latex))
    except UnreadableError:
        return False


def _has_open_part(node: Node) -> bool:
    """Whether two numbers that are added or multiplied in an expression could be one number."""
    if node.operation in {"+", "*"} and sum(map(_is_known, node.operands)) > 1:
        return not _is_closed_form(node)
    return any(map(_has_open_part, node.operands))


def _is_known(node: Node) -> bool:
    """Whether an expression has an exact rational value, or an angle has in degrees."""
    node = node.operands[0] if node.operation == "degree" else node
    return rational_value(node) is not None


def _is_closed_form(node: Node) -> bool:
    r"""Whether numbers are left as powers: `2^{10}-1`, `1-(\frac56)^2`, and the prime factorization `2^4\cdot 3`."""
    if node.operation == "*":
        factors = list(_factors(node))
        bases = [rational_value(each.operands[0] if _is_power(each) else each) for each in factors]
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
    base, exponent = map(rational_value, node.operands)
    return base not in {None, 0, 1, -1} and exponent not in {None, 0, 1}


def _is_prime(value: Fraction | None) -> bool:
    if value is None or value.denominator > 1 or not 2 <= value < _MAX_PRIME:
        return False
    return all(value.numerator % divisor for divisor in range(2, isqrt(value.numerator) + 1))


def _is_in_old_unit(question: str, gold: Answer, answer: Answer) -> bool:
    """Whether an answer is a measurement of the question that was to be converted."""
    if not answer.unit or answer.unit == gold.unit or not answer.number or not _CONVERTS_UNITS.search(question):
        return False
    return (gold.unit is not None or answer.unit in {DEGREE, PERCENT}) and number(answer.number.value) in _numbers(
        question
    )


class _Value:
    """A value in an answer."""

    def __init__(self, latex: str, tree: Tree | None) -> None:
        self.latex, self.tree = latex, tree


def _values(latex: str) -> list[_Value]:
    """The values of an answer: its parts, and of an equation its last side, or all where it is one in unknowns."""
    structure = parse_structure(latex)
    if structure.kind is Kind.EXPRESSION:
        return [_Value(latex, whole(latex))]
    if structure.kind in {Kind.EQUATION, Kind.INEQUALITY}:
        sides = [whole(part) for part in structure.parts]
        if is_name(structure.parts[0]) or not any(_has_names(side) for side in sides):
            return _values(structure.parts[-1])
        if None in sides:
            return [_Value(latex, None)]
        relation = Tree("=", parts=tuple(sorted((side for side in sides if side), key=repr)))
        return [_Value(latex, relation)]
    rows = structure.parts
    parts = [part for row in rows for part in row.split("&")] if structure.kind is Kind.MATRIX else rows
    return [value for part in parts if part.strip() for value in _values(part)]


def _unfinished_value(question: str, expected: set[Tree | None], value: _Value) -> Reason | None:
    tree, asked = value.tree, all_within(question)
    if tree is None:
        squeezed = _SPACING.sub("", value.latex)
        is_echo = len(squeezed) >= _MIN_CHARACTERS and squeezed in _SPACING.sub("", question)
    elif tree.head == "=":
        is_echo = any(side.parts for side in tree.parts) and all(
            not side.parts or _is_asked(side, asked) for side in tree.parts
        )
    elif _is_number(tree):
        if all(each and _form(each) == "integer" for each in expected) and _form(tree) == "fraction":
            return Reason.SETUP if _is_setup(question, tree) else None  # a division
        is_echo = _is_unconverted(question, asked, expected, tree)
    else:
        return _unevaluated(question, {each for each in expected if each}, tree)
    return Reason.ECHO if is_echo else None


def _unevaluated(question: str, expected: set[Tree], tree: Tree) -> Reason | None:
    """Why an expression, which is more than a number, is no answer."""
    asked = all_within(question)
    wants_numbers = bool(expected) and all(map(_is_number, expected))
    parts = [each for each in subtrees(tree) if each.parts and not _is_number(each) and not _has_names(each)]
    if _is_asked(tree, asked) or (wants_numbers and any(_is_asked(part, asked) for part in parts)):
        return Reason.ECHO
    to_do = wants_numbers or (_folds(tree) and not any(map(_folds, expected)))
    return Reason.SETUP if to_do and _is_setup(question, tree) else None


def _is_asked(tree: Tree, asked: Iterable[Tree]) -> bool:
    return any(contains(each, part) for each in asked for part in {tree, without_detour(tree)})


def _is_unconverted(question: str, asked: tuple[Tree, ...], expected: set[Tree | None], tree: Tree) -> bool:
    """Whether a number is one of the question in another notation than the one expected."""
    forms = {_form(each) for each in expected if each}
    if _form(tree) == "integer":  # where its powers or factors are expected
        return forms == {"expression"} and tree in _numbers(question)
    if _form(tree) in forms and _form(tree) != "fraction":
        return False
    if _form(tree) == "decimal" and not _CONVERTS.search(question):
        return False
    return any(tree in _standing(each) or _unsigned(tree) in _standing(each) for each in asked)


def _form(tree: Tree) -> str:
    """How a number is written."""
    tree = _unsigned(tree)
    if tree.head == "number":
        return "integer" if getattr(tree.value, "denominator", 1) == 1 else "decimal"
    return {"%": "percent", "mixed": "mixed"}.get(tree.head, "fraction" if _is_number(tree) else "expression")


def _standing(tree: Tree) -> Iterator[Tree]:
    """A tree and all in it, but no single factors: a half does not stand in `x/2`."""
    yield tree
    for part in tree.parts:
        yield from _standing(part) if tree.head != "*" else (each for sub in part.parts for each in _standing(sub))


def _is_number(tree: Tree) -> bool:
    """Whether this is a number as one writes it: an integer, decimal, fraction, mixed number or percentage."""
    if tree.head == "number":
        return True
    tree = _unsigned(tree)
    if tree.head in {"mixed", "%"}:
        return all(map(_is_number, tree.parts))
    return is_quotient(tree)


def _unsigned(tree: Tree) -> Tree:
    return make_product([number(-1), tree]) if number(-1) in tree.parts and tree.head == "*" else tree


def _is_setup(question: str, tree: Tree) -> bool:
    """Whether an expression does nothing but put numbers of the question together."""
    numbers = [each for each in leaves(tree) if each.head == "number"]
    asked = _numbers(question)
    if any(each.head == "!" for each in subtrees(tree)):  # `n` over `k` has the factorial of n - k
        asked |= {number(one - other) for one in map(_value_of, asked) for other in map(_value_of, numbers)}
    strange = set(numbers) - asked
    copied = [each for each in numbers if each in asked]
    return bool(copied) and strange <= _FREE and (not strange or sum(each not in _FREE for each in copied) > 1)


def _value_of(tree: Tree) -> Fraction:
    assert isinstance(tree.value, Fraction)
    return tree.value


@lru_cache(maxsize=512)
def _numbers(question: str) -> frozenset[Tree]:
    """The numbers of a question, in digits and in words."""
    written = {leaf for tree in all_within(question) for leaf in leaves(tree) if leaf.head == "number"}
    words = (parse_number(match.group().casefold()) for match in _WORD.finditer(question))
    return frozenset(written | {number(each.value) for each in words if each})


def _folds(tree: Tree) -> bool:
    """Whether numbers in an expression could be added or multiplied, and have not been."""
    return any(
        each.head in {"+", "*"}
        and sum(_is_number(part) and part != number(-1) for part in each.parts) > 1
        and not _is_number(each)
        for each in subtrees(tree)
    )


def _has_names(tree: Tree | None) -> bool:
    return tree is None or any(each.head in {"name", "_"} and each.value != r"\pi" for each in subtrees(tree))
