r"""Comparison of two answers: part by part if they have parts, exactly if they are numbers, otherwise by algebra.

The rules are symmetric in the two answers, except that only the answer to be graded can be rejected:

- Values of a list or set may come in any order, those of a tuple, an interval or a matrix may not; brackets count.
- A unit may be missing; two units are converted, and must be of the same kind. `25\%` is 25 and 0.25.
- A decimal with at least three significant digits equals a fraction that it rounds, if the fraction has no finite
  decimal form; for an irrational value it needs five digits. Two decimals are equal only if they are the same number.
- `x = 5` is 5, and a chain such as `x = 2 + 3 = 5` counts as its last side.
- Words are compared as words, never as products of letters.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from components.grading.expression import UnreadableError, exact_value, parse_expression, variables
from components.grading.parsing import Answer, Kind, Structure, exact_parts, in_latex, is_name, parse, parse_structure
from components.grading.quantities import Number
from components.grading.regions import ascending, parse_region
from components.grading.text_rules import Decision, RejectedError, decide_by_text, is_text, reject_evasions
from components.grading.units import DEGREE, PERCENT
from components.grading.verdicts import Reason

_SETS = {r"\emptyset", *(rf"\mathbb{{{letter}}}" for letter in "NZQRC")}


def compare(expected: Answer, actual: Answer) -> Decision:
    """Return whether an answer equals the expected one.

    Raises RejectedError for an answer that cannot be right, and for an expected answer that is empty or unreadable.
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
    """Whether the grader can compare an answer, or each of its parts; entries of a matrix are not looked at."""
    if answer.number or is_text(answer) or _REMAINDER.fullmatch(answer.latex) or answer.latex in _SETS:
        return True
    structure = parse_structure(answer.latex)
    if structure.kind is Kind.EXPRESSION:
        from components.grading.algebra import is_readable

        return parse_region(answer.latex) is not None or is_readable(answer.latex)
    return structure.kind is Kind.MATRIX or all(_is_readable(parse(part)) for part in structure.parts)


def _compare(expected: Answer, actual: Answer) -> Decision:
    """Compare two answers or parts of answers, with their units."""
    if expected.unit and actual.unit and expected.unit != actual.unit:
        return _compare_in_other_units(expected, actual)
    # One is in degrees; a pi says that the other is in radians, so equal texts would be different angles.
    if (expected.unit == DEGREE) != (actual.unit == DEGREE) and r"\pi" in expected.latex + actual.latex:
        return Decision.on("value", _are_equal_converted(expected, actual))
    if expected.text == actual.text:
        return Decision(True, Reason.SAME_NOTATION)
    if _are_equal_converted(expected, actual):
        return Decision(True, Reason.SAME_VALUE)
    return _compare_values(expected, actual)


def _compare_values(expected: Answer, actual: Answer) -> Decision:
    """Compare two answers without regard to their units."""
    if expected.number and actual.number:
        return Decision.on("number", expected.number.equals(actual.number))
    if decision := decide_by_text(expected, actual):
        return decision
    expected, actual = _without_name(expected, actual), _without_name(actual, expected)
    first, second = parse_structure(expected.latex), parse_structure(actual.latex)
    if first.kind is Kind.EXPRESSION and second.kind is Kind.EXPRESSION and r"\setminus" not in expected.latex:
        return _compare_expressions(expected, actual)
    if Kind.EQUATION in (first.kind, second.kind):
        return _compare_equations(expected, actual)
    return _compare_parts(expected, actual, first, second)


_REMAINDER = re.compile(r"[^=<>]+\\pmod\s*\{[^{}]+\}")
_POINT = re.compile(r"(?:[A-Z]|\\(?:text|mathrm)\s*\{[A-Z]\})(?:_(?:\{\w+\}|\w)|')?\s*(?=\()")


def _without_name(answer: Answer, other: Answer) -> Answer:
    """The coordinates of a named point such as `P(3,4)`, unless the other answer is a named point too."""
    match = _POINT.match(answer.latex)
    if not match or _POINT.match(other.latex):
        return answer
    coordinates = answer.latex[match.end() :]
    return parse(coordinates) if parse_structure(coordinates).kind is Kind.TUPLE else answer


def _compare_expressions(expected: Answer, actual: Answer) -> Decision:
    """Compare two expressions; a decimal may round the other one."""
    number, latex = (actual.number, expected.latex) if actual.number else (expected.number, actual.latex)
    if number and number.places:  # a decimal
        from components.grading.algebra import equals_decimal

        return _by_algebra("value", lambda: equals_decimal(latex, number))
    return _by_algebra("value", lambda: _same_value(actual.latex, expected.latex))


def _same_value(latex: str, other: str) -> bool:
    """Whether two expressions are equal; fractions need no sympy."""
    value, other_value = (exact_value(parse_expression(each)) for each in (latex, other))
    if value is not None and other_value is not None:
        return value == other_value
    from components.grading.algebra import same_value

    return same_value(latex, other)


def _by_algebra(what: str, decide: Callable[[], bool]) -> Decision:
    """Return the decision of an algebraic comparison; if it fails in any way, the answers are not equal."""
    try:
        return Decision.on(what, decide())
    except MemoryError:
        raise
    except Exception:  # the parser and the simplifier may fail in any way on what a model wrote
        return Decision(False, Reason.NOT_UNDERSTOOD)


# Units.


def _are_equal_converted(expected: Answer, actual: Answer) -> bool:
    """Whether one answer is in percent or degrees, the other has no unit, and the converted values are equal."""
    return any(
        one.unit in {PERCENT, DEGREE} and not other.unit and _compare_values(_converted(one), other).equal
        for one, other in ((expected, actual), (actual, expected))
    )


def _converted(answer: Answer) -> Answer:
    """A percentage as a fraction of 1, or an angle in radians."""
    if answer.unit == PERCENT:
        return _times(answer, Fraction(1, 100), places=2)
    return parse(rf"({answer.latex})\cdot\frac{{\pi}}{{180}}")


def _compare_in_other_units(expected: Answer, actual: Answer) -> Decision:
    """Compare two answers with different units."""
    if Kind.EQUATION in {parse_structure(each.latex).kind for each in (expected, actual)}:
        return _compare_equations(expected, actual)
    assert expected.unit
    assert actual.unit
    kind, other_kind = expected.unit.kind, actual.unit.kind
    if {kind, other_kind} == {"degree", "radian"}:
        return _compare_values(*(_converted(each) if each.unit == DEGREE else each for each in (expected, actual)))
    if kind != other_kind:
        return Decision(False, Reason.UNIT, f"{other_kind} where {kind} is expected")
    return _compare_values(_times(expected, expected.unit.factor), _times(actual, actual.unit.factor))


def _times(answer: Answer, factor: Fraction, *, places: int = 0) -> Answer:
    """An answer times a factor. A decimal gets `places` more decimal places; with 0 it no longer counts as rounded."""
    number = answer.number
    if not number:
        return parse(rf"({answer.latex})\cdot {in_latex(factor)}")
    value = number.value * factor
    new_places = number.places + places if number.places and places else None
    return replace(parse(in_latex(value)), number=Number(value, new_places))


# Lists, sets, tuples and matrices.

_TWO_SIGNS = re.compile(r"^\s*\\(?:pm|mp)(?![a-z])")
_ANY_OF = re.compile(r"(?<![a-zA-Z])or(?![a-z])|\\lor|\\vee")
_RELATED = re.compile(r"[<>]|\\[gl]e(?![a-zA-Z])")
_ROOT = re.compile(r"\b([xyz])_(?:\{[^{}]*\}|.)")
_COMMAND = re.compile(r"\\[a-z]+\s*\{([^{}]*)\}")


def _compare_parts(expected: Answer, actual: Answer, first: Structure, second: Structure) -> Decision:
    """Compare two answers of which at least one has parts or is an inequality."""
    kinds = {first.kind, second.kind}
    if kinds <= {Kind.LIST, Kind.UNION} and (_RELATED.search(expected.latex) or _RELATED.search(actual.latex)):
        # "and" or "or" between values makes no difference, but between inequalities it does.
        is_first_union = first.kind is Kind.UNION or bool(_ANY_OF.search(expected.latex))
        is_second_union = second.kind is Kind.UNION or bool(_ANY_OF.search(actual.latex))
        if is_first_union != is_second_union:
            return Decision(False, Reason.OTHER_RELATION)
    is_region = r"\emptyset" in (expected.text, actual.text) or r"\setminus" in expected.text + actual.text
    # A region such as the empty set, or the reals without 1, is an expression, but no member of a list.
    is_value_and_list = Kind.EXPRESSION in kinds and kinds & {Kind.LIST, Kind.SET} and not is_region
    if kinds <= {Kind.LIST, Kind.SET, Kind.UNION} or is_value_and_list:
        return _compare_members(first.parts, second.parts)
    if kinds <= {Kind.TUPLE, Kind.MATRIX} or kinds == {Kind.LIST, Kind.TUPLE}:
        return _compare_elements(first, second)
    if kinds == {Kind.MATRIX, Kind.EXPRESSION}:
        return _compare_expressions(expected, actual)
    if kinds == {Kind.SET, Kind.TUPLE}:
        return Decision(False, Reason.OTHER_KIND)
    return _compare_regions(expected, actual)


def _compare_members(first: Sequence[str], second: Sequence[str]) -> Decision:
    """Compare values in any order; if only one side gives several names, in the order of the names."""
    sides = _members(first), _members(second)
    assignments = [[_assignment(part) for part in side] for side in sides]
    num_names = [len({name for name, _ in side if name}) for side in assignments]
    if max(num_names) <= 1:  # `x = 1, x = 2` and `1, 2`
        is_equal = _same_members(*([value for _, value in side] for side in assignments))
    elif min(num_names) == 0:  # `x = 1, y = 2` and `1, 2`
        is_equal = _same_in_order(*map(_by_name, assignments))
    else:
        is_equal = _same_members(*sides)
    return Decision.on("parts", is_equal)


def _compare_elements(first: Structure, second: Structure) -> Decision:
    """Compare tuples, intervals, vectors and matrices element by element; brackets and shape must be the same."""
    sides = _rows(first), _rows(second)
    shape, other_shape = ([len(row) for row in rows] for rows in sides)
    if first.kind is second.kind and (first.signs != second.signs or shape != other_shape):
        return Decision(False, Reason.OTHER_PARTS)
    if first.kind is not second.kind and not (_is_vector(first) and _is_vector(second)):
        return Decision(False, Reason.OTHER_KIND, f"{second.kind} where {first.kind} is expected")
    elements = [[_assignment(element) for row in rows for element in row] for rows in sides]
    are_named = all(name for side in elements for name, _ in side)
    return Decision.on("parts", _same_in_order(*(_by_name(side, are_named=are_named) for side in elements)))


def _by_name(assignments: Sequence[tuple[str, str]], *, are_named: bool = False) -> list[str]:
    """The values, sorted by their names if `are_named` (both sides give names) or the names are among xyz or abcd."""
    names = {name for name, _ in assignments}
    is_sortable = are_named or names <= set("xyz") or names <= set("abcd")
    if is_sortable and len(names) == len(assignments):
        assignments = sorted(assignments)
    return [value for _, value in assignments]


def _same_in_order(first: Sequence[str], second: Sequence[str]) -> bool:
    return len(first) == len(second) and all(map(_same_part, first, second))


def _same_part(one: str, other: str) -> bool:
    """Whether two parts are equal; a set of one value within an answer does not equal that value."""
    kinds = [parse_structure(each).kind for each in (one, other)]
    return kinds.count(Kind.SET) != 1 and _compare(parse(one), parse(other)).equal


def _same_members(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two lists have the same values in any order; a repeated value counts once."""
    ours, theirs = _distinct(first), _distinct(second)
    if len(ours) != len(theirs):
        return False
    for value in ours:
        # The same text first: algebra is a thousand times slower.
        match = value if value in theirs else next((other for other in theirs if _same_part(value, other)), None)
        if match is None:
            return False
        theirs.remove(match)
    return True


def _distinct(values: Sequence[str]) -> list[str]:
    """The values without those that equal an earlier one."""
    distinct: list[str] = []
    for value in dict.fromkeys(values):
        if not any(_same_part(value, other) for other in distinct):
            distinct.append(value)
    return distinct


def _members(parts: Sequence[str]) -> list[str]:
    r"""The parts, with both values of a part such as `\pm 2`."""
    members: list[str] = []
    for part in parts:
        members += parse_structure(part).parts if _TWO_SIGNS.search(part) else [part]
    return members


def _assignment(part: str) -> tuple[str, str]:
    """The name and the value of a part such as `x = 2`; the name is empty without one."""
    structure = parse_structure(part)
    if structure.kind is not Kind.EQUATION or not is_name(structure.parts[0]):
        return "", part
    return _letter(structure.parts[0]), structure.parts[-1]


def _letter(name: str) -> str:
    """A name without its argument, f for f(x), and without the index of a root: x_1 and x_2 are both x."""
    plain = _COMMAND.sub(r"\1", name)
    if not plain.startswith("("):  # a tuple of names is all of it
        plain = plain.partition("(")[0]
    return _ROOT.sub(r"\1", "".join(plain.split()))


def _is_vector(structure: Structure) -> bool:
    """Whether this is a matrix of one row or column, or a tuple in round brackets or none."""
    if structure.kind is Kind.MATRIX:
        return len(structure.parts) == 1 or all("&" not in row for row in structure.parts)
    return structure.signs in {(), ("(", ")")}


def _rows(structure: Structure) -> list[list[str]]:
    """The rows of a matrix; the parts of a tuple or list as one row."""
    if structure.kind is not Kind.MATRIX:
        return [list(structure.parts)]
    return [[element.strip() for element in row.split("&")] for row in structure.parts]


# Equations and inequalities, compared with each other and with the values and intervals that they describe.


def _compare_equations(expected: Answer, actual: Answer) -> Decision:
    """Compare two answers of which at least one is an equation."""
    first, second = parse_structure(expected.latex), parse_structure(actual.latex)
    if first.kind is second.kind:
        ours, theirs = _value(first), _value(second)
        if ours is not None and theirs is not None and _same_name(first.parts[0], second.parts[0]):
            return _compare(parse(_in_order(first, ours)), parse(_in_order(second, theirs)))
        return _compare_relations(first, second)
    is_first = first.kind is Kind.EQUATION
    equation, answer = (first, expected) if is_first else (second, actual)
    side = _value(equation, is_asked=not is_first)
    if side is None:
        return Decision(False, Reason.OTHER_KIND)
    value = parse(_in_order(equation, side, only="xyz"))
    value = replace(value, unit=value.unit or answer.unit)  # a unit at the end belongs to the whole equation
    return _compare(value, actual) if is_first else _compare(expected, value)


def _same_name(name: str, other: str) -> bool:
    """Whether two names may mean the same: `f(x)` and `f` or `y`; `(y,x)` and `(x,y)`."""
    names, others = parse_structure(name), parse_structure(other)
    if Kind.TUPLE in (names.kind, others.kind):
        return sorted(map(_letter, names.parts)) == sorted(map(_letter, others.parts))
    letters = {_letter(name), _letter(other)}
    arguments = {each.partition("(")[2].replace(" ", "") for each in (name, other)} - {""}  # such as "x)"
    if len(letters) == 1:
        return len(arguments) <= 1
    return "y" in letters and arguments == {"x)"}


def _in_order(equation: Structure, value: str, only: str = "") -> str:
    """The value of `(y,x) = (2,1)` in the alphabetical order of the names: `(1,2)`.

    With `only`, the order changes only if all names are among these letters. Any other value is returned unchanged.
    """
    names, values = parse_structure(equation.parts[0]), parse_structure(value)
    if names.kind is not Kind.TUPLE or values.kind is not Kind.TUPLE or len(names.parts) != len(values.parts):
        return value
    if only and not set(names.parts) <= set(only):
        return value
    opening, closing = values.signs
    ordered = sorted(zip(names.parts, values.parts, strict=True))
    return opening + ",".join(part for _, part in ordered) + closing


def _compare_relations(first: Structure, second: Structure) -> Decision:
    """Compare two equations as relations between their variables."""
    if len(first.parts) != 2 or len(second.parts) != 2:
        return Decision(False, Reason.OTHER_RELATION)
    # Only one of the two is solved, such as `x = 5`.
    if any(_UNKNOWN.fullmatch(each.parts[0]) and _names(each.parts[1]) == set() for each in (first, second)):
        return Decision(False, Reason.NOT_SOLVED)
    from components.grading.algebra import same_relation

    return _by_algebra("relation", lambda: same_relation(first.parts, second.parts))


_UNKNOWN = re.compile(r"(?:[a-zA-Z]|\\[a-z]+)(?:_(?:\{[^{}]*\}|.))?")
_QUESTION = re.compile(r"\\(?:sum|prod|int|lim|det|max|min)(?![a-zA-Z])")


def _value(equation: Structure, *, is_asked: bool = False) -> str | None:
    r"""The last side of an equation that gives a value to a name, or is between constants; None for any other equation.

    Only that side counts, whether or not the others equal it. With `is_asked`, the equation may also give a value to an
    expression of several variables, such as `a+b=3`; `x+1=3` is an equation to be solved.
    """
    parts = exact_parts(equation)
    if is_name(parts[0]) or len(parts) == 1:
        return parts[-1]
    if any(map(is_name, parts)):  # in a chain such as `1 = z = x = 0` the name may be anywhere
        return parts[-1] if len(parts) > 2 else None
    names = [_names(part) for part in parts]
    if _is_quantity(names, is_asked=is_asked):
        return parts[-1]
    is_constant = not any(names) and (None not in names or _QUESTION.search(parts[0]))
    return parts[-1] if is_constant else None


def _is_quantity(names: list[set[str] | None], *, is_asked: bool) -> bool:
    """Whether the first side has several variables that no other side has; without `is_asked`, only capital letters."""
    first = names[0]
    if not first or len(first) < 2 or any(each is None or each & first for each in names[1:]):
        return False
    return is_asked or all(re.fullmatch("[A-Z]", name) for name in first)


def _names(latex: str) -> set[str] | None:
    """The variables and unknown function values of an expression; None for any other text."""
    try:
        return variables(parse_expression(parse(latex).latex))
    except UnreadableError:
        return None


def _compare_regions(expected: Answer, actual: Answer) -> Decision:
    """Compare two answers as sets of real numbers, or two unsolved inequalities side by side."""
    first, second = parse_region(expected.latex), parse_region(actual.latex)
    unread = [parse_structure(each.latex) for each, region in ((expected, first), (actual, second)) if not region]
    if len(unread) == 2 and all(each.kind is Kind.INEQUALITY and len(each.parts) == 2 for each in unread):
        (ours, signs), (theirs, others) = map(ascending, unread)
        if signs == others:
            return Decision.on("relation", _same_in_order(ours, theirs))
    if any(each.kind is Kind.INEQUALITY for each in unread):
        return Decision(False, Reason.NOT_SOLVED)
    if not first or not second:
        return Decision(False, Reason.OTHER_KIND)
    if first.name and second.name and _letter(first.name) != _letter(second.name):
        return Decision(False, Reason.OTHER_RELATION)
    if len(first.intervals) == len(second.intervals) == 1:  # the ends may have variables
        (one,), (other,) = first.intervals, second.intervals
        has_same_ends = (one.has_low, one.has_high) == (other.has_low, other.has_high)
        is_equal = has_same_ends and _same_in_order((one.low, one.high), (other.low, other.high))
        return Decision.on("relation", is_equal)
    from components.grading.algebra import same_region

    return _by_algebra("relation", lambda: same_region(first.intervals, second.intervals))
