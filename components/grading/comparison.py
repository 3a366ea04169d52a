r"""Comparison of two answers: part by part where they have parts, exactly where they are numbers, else by algebra.

The rules are the same whichever answer comes first, but that only the given one is refused:

- Values of a list or set may come in any order, those of a tuple, an interval or a matrix may not; brackets count.
- A unit may be missing; two units are converted, and must be of the same kind. `25\%` is 25 and 0.25.
- A decimal equals a fraction that no decimal can write out if it rounds it, with three significant digits or more;
  five for what is not rational. Two decimals are equal if they are the same number.
- `x = 5` is 5, and a chain `x = 2 + 3 = 5` is worth its last side; different numbers in one chain are no answer.
- Words are compared as words, never as products of letters.
"""

import re
from dataclasses import replace
from fractions import Fraction

from components.grading.decision import Decision, UnreadableGoldError, decided_by_algebra
from components.grading.number import Number
from components.grading.parts import same_elements, same_values
from components.grading.refusal import refuse
from components.grading.relations import same_equations, same_inequalities
from components.grading.spelling import Spelling, read
from components.grading.structure import Kind, Structure, structure
from components.grading.units import DEGREE, PERCENT
from components.grading.wording import decide_by_wording, is_wording

_ORDERED = {Kind.TUPLE, Kind.MATRIX}
_UNORDERED = {Kind.LIST, Kind.SET, Kind.UNION}
_IRRATIONAL_DIGITS = 5


def compare(gold: str, answer: str) -> Decision:
    """Return whether an answer is the expected one.

    Raises RefusedError, and UnreadableGoldError where the expected answer says nothing.
    """
    expected, given = read(gold), read(answer)
    if not expected.text:
        raise UnreadableGoldError("the expected answer is empty")
    if expected == given:
        return Decision(True, "same text but for its spelling")
    refuse(expected, given)
    decision = _same(expected, given)
    if not decision.equal and not _is_readable(expected):
        raise UnreadableGoldError("the expected answer cannot be read")
    return decision


def _is_readable(expected: Spelling) -> bool:
    """Whether an answer says something in all of its parts."""
    if expected.number or is_wording(expected):
        return True
    found = structure(expected.latex)
    if found.kind is Kind.EXPRESSION:
        from components.grading.algebra import is_readable

        return is_readable(expected.latex)
    return found.kind is Kind.MATRIX or all(_is_readable(read(part)) for part in found.parts)


def _equal(one: str, other: str) -> bool:
    return _same(read(one), read(other)).equal


def _same(expected: Spelling, given: Spelling) -> Decision:
    if expected.unit and given.unit and expected.unit != given.unit:
        return _same_in_other_units(expected, given)
    if _is_radian_to_degree(expected, given):
        equal = any(_same_plain(*pair).equal for pair in _conversions(expected, given))
        return Decision.between(equal, "angle")
    if expected.text == given.text:
        return Decision(True, "same text but for its spelling")
    if expected.number and given.number and expected.number.equals(given.number):
        return Decision(True, "same number")
    if any(_same_plain(*pair).equal for pair in _conversions(expected, given)):
        return Decision(True, "same value without its unit")
    return _same_plain(expected, given)


def _is_radian_to_degree(expected: Spelling, given: Spelling) -> bool:
    """Whether one is an angle in degrees, and the other has no unit but a pi in it."""
    return (expected.unit == DEGREE) != (given.unit == DEGREE) and r"\pi" in expected.latex + given.latex


def _conversions(expected: Spelling, given: Spelling) -> list[tuple[Spelling, Spelling]]:
    """The two answers as plain numbers, where one is in percent or degrees and the other has no unit."""
    return [
        (_converted(one), other)
        for one, other in ((expected, given), (given, expected))
        if one.unit in {PERCENT, DEGREE} and not other.unit
    ]


def _converted(measured: Spelling) -> Spelling:
    """The plain number that a percentage or an angle in degrees is."""
    if measured.unit == PERCENT:
        return _times(measured, Fraction(1, 100), places=2)
    return read(rf"({measured.latex})\cdot\frac{{\pi}}{{180}}")


def _same_in_other_units(expected: Spelling, given: Spelling) -> Decision:
    if Kind.EQUATION in {structure(each.latex).kind for each in (expected, given)}:
        return same_equations(expected, given, _same)
    units = [unit for unit in (expected.unit, given.unit) if unit]
    if {unit.kind for unit in units} == {"degree", "radian"}:
        return _same_plain(*(_converted(each) if each.unit == DEGREE else each for each in (expected, given)))
    if units[0].kind != units[1].kind:
        return Decision(False, f"unit is {units[1].kind}, expected {units[0].kind}")
    return _same_plain(*(_times(each, unit.factor) for each, unit in zip((expected, given), units, strict=True)))


def _times(measured: Spelling, factor: Fraction, *, places: int = 0) -> Spelling:
    """A value in another unit; `places` more digits stand behind the point of a decimal then."""
    number = measured.number
    if not number:
        return read(rf"({measured.latex})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}")
    value = number.value * factor
    sign = "-" if value < 0 else ""
    exact = read(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}")
    return replace(exact, number=Number(value, number.places + places if number.places and places else None))


def _same_plain(expected: Spelling, given: Spelling) -> Decision:
    """Compare two answers whatever their units are."""
    if expected.number and given.number:
        return Decision.between(expected.number.equals(given.number), "number")
    if decision := decide_by_wording(expected, given):
        return decision
    first, second = structure(expected.latex), structure(given.latex)
    if first.kind is Kind.EXPRESSION and second.kind is Kind.EXPRESSION:
        return _same_value(expected, given)
    if Kind.EQUATION in (first.kind, second.kind):
        return same_equations(expected, given, _same)
    if Kind.INEQUALITY in (first.kind, second.kind) and (decision := same_inequalities(first, second, _same)):
        return decision
    return _same_parts(expected, given, first, second)


def _same_parts(expected: Spelling, given: Spelling, first: Structure, second: Structure) -> Decision:
    kinds = {first.kind, second.kind}
    if kinds == {Kind.LIST} and _is_any_of(expected) != _is_any_of(given) and "<" in expected.text + given.text:
        return Decision(False, "one of several and all of them")
    if kinds <= _UNORDERED:
        return same_values(first.parts, second.parts, _equal)
    if kinds <= _ORDERED or kinds == {Kind.LIST, Kind.TUPLE}:
        return same_elements(first, second, _equal)
    if Kind.EXPRESSION in kinds and kinds & {Kind.LIST, Kind.SET} and r"\emptyset" not in (expected.text, given.text):
        return same_values(first.parts, second.parts, _equal)
    if kinds == {Kind.SET, Kind.TUPLE} or expected.number or given.number:
        return Decision(False, f"{second.kind} where {first.kind} is expected")
    return _verified(expected, given)


def _is_any_of(listed: Spelling) -> bool:
    """Whether inequalities are said to hold one "or" the other; for values it makes no difference."""
    return bool(re.search(r"(?<![a-zA-Z])or(?![a-z])|\\lor|\\vee", listed.latex))


def _same_value(expected: Spelling, given: Spelling) -> Decision:
    from components.grading import algebra

    decimal, other = (given.number, expected) if given.number else (expected.number, given)
    if decimal and decimal.places:
        return decided_by_algebra(lambda: _is_written_out(other.latex, decimal), "value")
    return decided_by_algebra(lambda: algebra.same_value(given.latex, expected.latex), "value, by algebra")


def _verified(expected: Spelling, given: Spelling) -> Decision:
    from components.grading import algebra

    return decided_by_algebra(lambda: algebra.verified(expected.latex, given.latex), "value, by algebra")


def _is_written_out(latex: str, decimal: Number) -> bool:
    """Whether a decimal is the value of an expression, or rounds it."""
    from components.grading import algebra

    value = algebra.value_of(latex)
    if value is not None:
        return Number(value, None).equals(decimal)
    return decimal.shows(_IRRATIONAL_DIGITS) and algebra.rounds_to(latex, decimal)
