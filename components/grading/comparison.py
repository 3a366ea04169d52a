r"""Comparison of two answers: part by part where they have parts, exactly where they are numbers, else by algebra.

The rules are the same whichever answer comes first, except that only the answer to be graded can be rejected:

- Values of a list or set may come in any order, those of a tuple, an interval or a matrix may not; brackets count.
- A unit may be missing; two units are converted, and must be of the same kind. `25\%` is 25 and 0.25.
- A decimal equals a fraction that no finite decimal equals if it rounds it, with three significant digits or more;
  five for an irrational value. Two decimals are equal if they are the same number.
- `x = 5` is 5, and a chain `x = 2 + 3 = 5` is worth its last side; a chain of different numbers is rejected.
- Words are compared as words, never as products of letters.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from components.grading.expression import UnreadableError, exact_value, parse_expression, variables
from components.grading.parsing import Answer, Kind, Structure, exact_parts, is_name, parse, parse_structure
from components.grading.quantities import Number
from components.grading.regions import ascending, parse_region
from components.grading.text_rules import (
    Decision,
    RejectedError,
    decide_by_wording,
    is_wording,
    reject_evasions,
)
from components.grading.units import DEGREE, PERCENT
from components.grading.verdicts import Reason

_SETS = {r"\emptyset", *(rf"\mathbb{{{letter}}}" for letter in "NZQRC")}
_ORDERED = {Kind.TUPLE, Kind.MATRIX}
_UNORDERED = {Kind.LIST, Kind.SET, Kind.UNION}


def compare(expected: Answer, actual: Answer) -> Decision:
    """Return whether an answer is the expected one.

    Raises RejectedError for an answer that cannot be right, and for a gold that says nothing.
    """
    if not expected.text:
        raise RejectedError(Reason.NO_GOLD)
    if expected == actual:
        return Decision(True, Reason.SAME_NOTATION)
    reject_evasions(expected, actual)
    decision = _compare(expected, actual)
    if not decision.equal and not _is_readable(expected):
        raise RejectedError(Reason.UNREADABLE_GOLD)
    return decision


def _is_readable(answer: Answer) -> bool:
    if answer.number or is_wording(answer):
        return True
    if _REMAINDER.fullmatch(answer.latex) or answer.latex in _SETS:
        return True
    structure = parse_structure(answer.latex)
    if structure.kind is Kind.EXPRESSION:
        if parse_region(structure, answer.latex):
            return True
        from components.grading.algebra import is_readable

        return is_readable(answer.latex)
    return structure.kind is Kind.MATRIX or all(_is_readable(parse(part)) for part in structure.parts)


def _equal(one: str, other: str) -> bool:
    return _compare(parse(one), parse(other)).equal


def _compare(expected: Answer, actual: Answer) -> Decision:
    if expected.unit and actual.unit and expected.unit != actual.unit:
        return _compare_in_other_units(expected, actual)
    # One in degrees, the other without a unit but with a pi in it: radians.
    if (expected.unit == DEGREE) != (actual.unit == DEGREE) and r"\pi" in expected.latex + actual.latex:
        return Decision.on("value", any(_compare_values(*pair).equal for pair in _conversions(expected, actual)))
    if expected.text == actual.text:
        return Decision(True, Reason.SAME_NOTATION)
    if expected.number and actual.number and expected.number.equals(actual.number):
        return Decision(True, Reason.SAME_NUMBER)
    if any(_compare_values(*pair).equal for pair in _conversions(expected, actual)):
        return Decision(True, Reason.SAME_VALUE)
    return _compare_values(expected, actual)


def _compare_values(expected: Answer, actual: Answer) -> Decision:
    if expected.number and actual.number:
        return Decision.on("number", expected.number.equals(actual.number))
    if decision := decide_by_wording(expected, actual):
        return decision
    expected, actual = _without_name(expected, actual), _without_name(actual, expected)
    first, second = parse_structure(expected.latex), parse_structure(actual.latex)
    if first.kind is Kind.EXPRESSION and second.kind is Kind.EXPRESSION and r"\setminus" not in expected.latex:
        return _compare_expressions(expected, actual)
    if Kind.EQUATION in (first.kind, second.kind):
        return _compare_equations(expected, actual)
    if Kind.INEQUALITY in (first.kind, second.kind):
        return _compare_regions(expected, actual)
    return _compare_parts(expected, actual, first, second)


_REMAINDER = re.compile(r"[^=<>]+\\pmod\s*\{[^{}]+\}")
_POINT = re.compile(r"(?:[A-Z]|\\(?:text|mathrm)\s*\{[A-Z]\})(?:_(?:\{\w+\}|\w)|')?\s*(?=\()")


def _without_name(answer: Answer, other: Answer) -> Answer:
    """The coordinates of a point with a name, as in `P(3,4)`, where the other answer has none."""
    match = _POINT.match(answer.latex)
    if not match or _POINT.match(other.latex) or parse_structure(answer.latex[match.end() :]).kind is not Kind.TUPLE:
        return answer
    return parse(answer.latex[match.end() :])


def _compare_expressions(expected: Answer, actual: Answer) -> Decision:
    decimal, latex = (actual.number, expected.latex) if actual.number else (expected.number, actual.latex)
    if decimal and decimal.places:
        return _by_algebra("value", lambda: _equals_decimal(latex, decimal))
    return _by_algebra("value", lambda: _same_value(actual.latex, expected.latex))


def _equals_decimal(latex: str, decimal: Number) -> bool:
    if number := _exact_number(latex):
        return number.equals(decimal)
    from components.grading.algebra import equals_decimal

    return equals_decimal(latex, decimal)


def _same_value(latex: str, other: str) -> bool:
    numbers = [_exact_number(each) for each in (latex, other)]
    if numbers[0] and numbers[1]:
        return numbers[0].value == numbers[1].value
    from components.grading.algebra import same_value

    return same_value(latex, other)


def _by_algebra(what: str, decide: Callable[[], bool]) -> Decision:
    """Return what algebra decides; an answer on which it fails in any way is not right."""
    try:
        return Decision.on(what, decide())
    except MemoryError:
        raise
    except Exception:  # the parser and the simplifier may fail in any way on what a model wrote
        return Decision(False, Reason.NOT_UNDERSTOOD)


# Units.


def _conversions(expected: Answer, actual: Answer) -> list[tuple[Answer, Answer]]:
    """The two answers as plain numbers, where one is in percent or degrees and the other has no unit."""
    if not expected.unit and not actual.unit:
        return []
    return [
        (_converted(one), other)
        for one, other in ((expected, actual), (actual, expected))
        if one.unit in {PERCENT, DEGREE} and not other.unit
    ]


def _converted(answer: Answer) -> Answer:
    if answer.unit == PERCENT:
        return _times(answer, Fraction(1, 100), places=2)
    return parse(rf"({answer.latex})\cdot\frac{{\pi}}{{180}}")


def _compare_in_other_units(expected: Answer, actual: Answer) -> Decision:
    if Kind.EQUATION in {parse_structure(each.latex).kind for each in (expected, actual)}:
        return _compare_equations(expected, actual)
    units = [unit for unit in (expected.unit, actual.unit) if unit]
    if {unit.kind for unit in units} == {"degree", "radian"}:
        return _compare_values(*(_converted(each) if each.unit == DEGREE else each for each in (expected, actual)))
    if units[0].kind != units[1].kind:
        return Decision(False, Reason.UNIT, f"{units[1].kind} where {units[0].kind} is expected")
    return _compare_values(*(_times(each, unit.factor) for each, unit in zip((expected, actual), units, strict=True)))


def _times(answer: Answer, factor: Fraction, *, places: int = 0) -> Answer:
    """A value in another unit, where a decimal then has `places` more digits behind its point."""
    number = answer.number
    if not number:
        return parse(rf"({answer.latex})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}")
    value = number.value * factor
    sign = "-" if value < 0 else ""
    exact = parse(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}")
    return replace(exact, number=Number(value, number.places + places if number.places and places else None))


# Lists, sets, tuples and matrices.

_TWO_SIGNS = re.compile(r"^\s*\\(?:pm|mp)(?![a-z])")
_ANY_OF = re.compile(r"(?<![a-zA-Z])or(?![a-z])|\\lor|\\vee")
_RELATED = re.compile(r"[<>]|\\[gl]e(?![a-zA-Z])")
_ROOT = re.compile(r"\b([xyz])_(?:\{[^{}]*\}|.)")
_COMMAND = re.compile(r"\\[a-z]+\s*\{([^{}]*)\}")


def _compare_parts(expected: Answer, actual: Answer, first: Structure, second: Structure) -> Decision:
    kinds = {first.kind, second.kind}
    sides = ((first, expected.latex), (second, actual.latex))
    # "and" or "or" between values makes no difference, but between inequalities it does.
    any_of = {each.kind is Kind.UNION or bool(_ANY_OF.search(latex)) for each, latex in sides}
    if kinds <= {Kind.LIST, Kind.UNION} and len(any_of) == 2 and any(_RELATED.search(latex) for _, latex in sides):
        return Decision(False, Reason.OTHER_RELATION)
    if kinds <= _UNORDERED:
        return _compare_members(first.parts, second.parts)
    if kinds <= _ORDERED or kinds == {Kind.LIST, Kind.TUPLE}:
        return _compare_elements(first, second)
    is_part_of_line = r"\emptyset" in (expected.text, actual.text) or r"\setminus" in expected.text + actual.text
    if Kind.EXPRESSION in kinds and kinds & {Kind.LIST, Kind.SET} and not is_part_of_line:
        return _compare_members(first.parts, second.parts)
    if kinds == {Kind.MATRIX, Kind.EXPRESSION}:
        return _compare_expressions(expected, actual)
    is_mixed = kinds == {Kind.SET, Kind.TUPLE}
    return Decision(False, Reason.OTHER_KIND) if is_mixed else _compare_regions(expected, actual)


def _compare_members(first: Sequence[str], second: Sequence[str]) -> Decision:
    """Compare values in any order; where only one side names several, in the order of the names."""
    sides = [_members(first), _members(second)]
    assignments = [[_assignment(part) for part in side] for side in sides]
    num_names = [len({name for name, _ in side if name}) for side in assignments]
    values = [_by_name(side) if max(num_names) > 1 else [value for _, value in side] for side in assignments]
    if max(num_names) <= 1:
        return Decision.on("parts", _same_members(*values))
    if min(num_names) == 0:
        return Decision.on("parts", _same_in_order(*values))
    return Decision.on("parts", _same_members(*sides))


def _compare_elements(first: Structure, second: Structure) -> Decision:
    """Compare tuples, intervals, vectors and matrices: element by element, within the same brackets."""
    ours, theirs = _rows(first), _rows(second)
    if first.kind is second.kind and (first.signs != second.signs or [*map(len, ours)] != [*map(len, theirs)]):
        return Decision(False, Reason.OTHER_PARTS)
    if first.kind is not second.kind and not (_is_vector(first) and _is_vector(second)):
        return Decision(False, Reason.OTHER_KIND, f"{second.kind} where {first.kind} is expected")
    elements = [[_assignment(element) for row in rows for element in row] for rows in (ours, theirs)]
    are_named = all(name for side in elements for name, _ in side)
    return Decision.on("parts", _same_in_order(*(_by_name(side, are_named=are_named) for side in elements)))


def _by_name(assignments: Sequence[tuple[str, str]], *, are_named: bool = False) -> list[str]:
    """The values, in the order of their names if all sides name them, or if x, y and z are the names."""
    names = [name for name, _ in assignments]
    is_distinct = len(set(names)) == len(names) and "" not in names
    if is_distinct and (are_named or any(set(names) <= set(usual) for usual in ("xyz", "abcd"))):
        assignments = sorted(assignments)
    return [value for _, value in assignments]


def _same_in_order(first: Sequence[str], second: Sequence[str]) -> bool:
    return len(first) == len(second) and all(map(_same_part, first, second))


def _same_part(one: str, other: str) -> bool:
    """Whether two members are equal; a set of one value is not that value here."""
    kinds = [parse_structure(each).kind for each in (one, other)]
    return kinds.count(Kind.SET) != 1 and _equal(one, other)


def _same_members(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether each value of either side is among those of the other; a repeated value adds nothing."""
    ours, left = _distinct(first), _distinct(second)
    if len(ours) != len(left):
        return False
    for value in ours:
        # The same text first: algebra is a thousand times slower.
        match = value if value in left else next((other for other in left if _same_part(value, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _distinct(values: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for value in dict.fromkeys(values):
        if not any(_same_part(value, other) for other in distinct):
            distinct.append(value)
    return distinct


def _members(parts: Sequence[str]) -> list[str]:
    return [value for part in parts for value in (parse_structure(part).parts if _TWO_SIGNS.search(part) else [part])]


def _assignment(part: str) -> tuple[str, str]:
    """The letter that a part gives a value to, empty if none, and the value."""
    structure = parse_structure(part)
    if structure.kind is not Kind.EQUATION or not is_name(structure.parts[0]):
        return "", part
    return _letter(structure.parts[0]), structure.parts[-1]


def _letter(name: str) -> str:
    """A name without its argument, f for f(x), and without the index of a root: x_1 and x_2 are both x."""
    plain = _COMMAND.sub(r"\1", name)
    bare = "".join((plain if plain.startswith("(") else plain.partition("(")[0]).split())
    return _ROOT.sub(r"\1", bare)


def _is_vector(structure: Structure) -> bool:
    """Whether elements stand in one row or column, in round brackets if in any."""
    if structure.kind is Kind.MATRIX:
        return len(structure.parts) == 1 or all("&" not in row for row in structure.parts)
    return structure.signs in {(), ("(", ")")}


def _rows(structure: Structure) -> list[list[str]]:
    if structure.kind is not Kind.MATRIX:
        return [list(structure.parts)]
    return [[element.strip() for element in row.split("&")] for row in structure.parts]


# Equations and inequalities, with one another, and with the values and intervals they describe.


def _compare_equations(expected: Answer, actual: Answer) -> Decision:
    """Compare two answers of which one or both are equations."""
    first, second = parse_structure(expected.latex), parse_structure(actual.latex)
    is_value = first.kind is not Kind.EQUATION
    ours = None if is_value else _value(first)
    theirs = _value(second, asked=is_value) if second.kind is Kind.EQUATION else None
    if first.kind is second.kind:
        if ours is not None and theirs is not None and _same_name(first.parts[0], second.parts[0]):
            return _compare(parse(_in_order(first, ours)), parse(_in_order(second, theirs)))
        return _compare_relations(first, second)
    if ours is None and theirs is None:
        return Decision(False, Reason.OTHER_KIND)
    # The value of an equation is in the unit that stands behind the whole of it.
    sides = ((expected, first, ours), (actual, second, theirs))
    values = (
        (each, each if value is None else parse(_in_order(structure, value, only="xyz")))
        for each, structure, value in sides
    )
    return _compare(*(replace(value, unit=value.unit or each.unit) for each, value in values))


def _same_name(name: str, other: str) -> bool:
    """Whether two names mean the same: `f(x)` is also called `f`, and `y`; `(y,x)` names what `(x,y)` does."""
    names, others = parse_structure(name), parse_structure(other)
    if Kind.TUPLE in (names.kind, others.kind):
        return sorted(map(_letter, names.parts)) == sorted(map(_letter, others.parts))
    letters = {_letter(name), _letter(other)}
    arguments = {each.partition("(")[2].replace(" ", "") for each in (name, other)} - {""}
    if len(letters) == 1:
        return len(arguments) <= 1
    return "y" in letters and arguments == {"x)"}


def _in_order(equation: Structure, value: str, only: str = "") -> str:
    """The value of `(y,x) = (2,1)`, in the alphabetical order of the names; with `only`, if they are among these."""
    names, values = parse_structure(equation.parts[0]), parse_structure(value)
    if names.kind is not Kind.TUPLE or values.kind is not Kind.TUPLE or len(names.parts) != len(values.parts):
        return value
    if only and not set(names.parts) <= set(only):
        return value
    opening, closing = values.signs
    return opening + ",".join(part for _, part in sorted(zip(names.parts, values.parts, strict=True))) + closing


def _compare_relations(first: Structure, second: Structure) -> Decision:
    if len(first.parts) != 2 or len(second.parts) != 2:
        return Decision(False, Reason.OTHER_RELATION)
    if any(_UNKNOWN.fullmatch(each.parts[0]) and _names(each.parts[1]) == set() for each in (first, second)):
        return Decision(False, Reason.NOT_SOLVED)
    from components.grading.algebra import same_relation

    sides, others = ((each.parts[0], each.parts[1]) for each in (first, second))
    return _by_algebra("relation", lambda: same_relation(sides, others))


_UNKNOWN = re.compile(r"(?:[a-zA-Z]|\\[a-z]+)(?:_(?:\{[^{}]*\}|.))?")
_QUESTION = re.compile(r"\\(?:sum|prod|int|lim|det|max|min)(?![a-zA-Z])")


def _value(equation: Structure, *, asked: bool = False) -> str | None:
    r"""The value that an equation gives a name, or that of one between constants: its last side; None for any other.

    Only that side counts, whether or not the others are equal to it. With `asked`, an equation may also give a value to
    an expression of several variables, which is no equation for one of them: `a+b=3`, but not `x+1=3`.
    """
    parts = exact_parts(equation)
    if is_name(parts[0]) or len(parts) == 1:
        return parts[-1]
    if any(map(is_name, parts)):  # in `1 = z = x = 0` the name may stand anywhere
        return parts[-1] if len(parts) > 2 else None
    names = [_names(part) for part in parts]
    if _is_quantity(names, asked=asked):
        return parts[-1]
    is_constant = not any(names) and (None not in names or _QUESTION.search(parts[0]))
    return parts[-1] if is_constant else None


def _is_quantity(names: list[set[str] | None], *, asked: bool) -> bool:
    """Whether the first side is an expression of several variables, or lengths, that no other side names."""
    first = names[0]
    if not first or len(first) < 2 or any(each is None or each & first for each in names[1:]):
        return False
    return asked or all(re.fullmatch("[A-Z]", name) for name in first)


def _exact_number(latex: str) -> Number | None:
    with suppress(UnreadableError):
        if (value := exact_value(parse_expression(latex))) is not None:
            return Number(value, None)
    return None


def _names(latex: str) -> set[str] | None:
    """The variables of an expression, and its values of unknown functions; None for anything else."""
    try:
        return variables(parse_expression(parse(latex).latex))
    except UnreadableError:
        return None


def _compare_regions(expected: Answer, actual: Answer) -> Decision:
    structures = [parse_structure(each.latex) for each in (expected, actual)]
    regions = [parse_region(each, answer.latex) for each, answer in zip(structures, (expected, actual), strict=True)]
    if not any(regions) and all(each.kind is Kind.INEQUALITY and len(each.parts) == 2 for each in structures):
        (ours, signs), (theirs, others) = map(ascending, structures)
        if signs == others:
            return Decision.on("relation", all(_same_part(*pair) for pair in zip(ours, theirs, strict=True)))
    if any(not region and each.kind is Kind.INEQUALITY for region, each in zip(regions, structures, strict=True)):
        return Decision(False, Reason.NOT_SOLVED)
    if not regions[0] or not regions[1]:
        return Decision(False, Reason.OTHER_KIND)
    if len({_letter(region.name) for region in regions if region and region.name}) > 1:
        return Decision(False, Reason.OTHER_RELATION)
    first, second = (region.intervals for region in regions if region)
    if len(first) == len(second) == 1:
        (one,), (other,) = first, second
        ends = zip((one.low, one.high), (other.low, other.high), strict=True)
        has_same_ends = (one.has_low, one.has_high) == (other.has_low, other.has_high)
        return Decision.on("relation", has_same_ends and all(_same_part(*pair) for pair in ends))
    from components.grading.algebra import same_region

    return _by_algebra("relation", lambda: same_region(first, second))
