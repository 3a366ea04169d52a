"""Comparison of equations and inequalities with one another, and with the values and intervals they describe."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from components.grading.decision import Decision, RefusedError, decided_by_algebra
from components.grading.parts import letter_of, same_elements
from components.grading.spelling import Spelling, read
from components.grading.structure import Kind, Structure, as_interval, is_name, structure

Same = Callable[[Spelling, Spelling], Decision]
"""The comparison of two answers, which have relations as their parts."""

_UNKNOWN = re.compile(r"(?:[a-zA-Z]|\\[a-z]+)(?:_(?:\{[^{}]*\}|.))?")
_CONSTANTS = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|div|pm|mp|infty|text|mbox|ldots|dots|left|right|degree)(?![a-zA-Z])"
)


def same_equations(expected: Spelling, given: Spelling, same: Same) -> Decision:
    """Compare two answers of which one or both are equations.

    Raises RefusedError for a chain of different constants: `0 = 1 = 2` is a list of guesses.
    """
    first, second = structure(expected.latex), structure(given.latex)
    ours = _value(first, same) if first.kind is Kind.EQUATION else None
    if second.kind is Kind.EQUATION:
        _refuse_guesses(second.parts[: _end(second)])
    theirs = _value(second, same) if second.kind is Kind.EQUATION else None
    if first.kind is second.kind:
        if ours is not None and theirs is not None and _same_name(first.parts[0], second.parts[0]):
            return same(read(ours), read(theirs))
        return _same_relation(first, second)
    if ours is None and theirs is None:
        return Decision(False, "an equation and a value")
    return same(_with_unit(ours, expected), _with_unit(theirs, given))


def _same_name(name: str, other: str) -> bool:
    """Whether two names mean the same: `f(x)` is also called `y`."""
    letters = {letter_of(name), letter_of(other)}
    return len(letters) == 1 or ("y" in letters and ("(x)" in name or "(x)" in other))


def _with_unit(value: str | None, whole: Spelling) -> Spelling:
    """The value of an equation, in the unit that stands behind the whole of it."""
    if value is None:
        return whole
    found = read(value)
    return replace(found, unit=found.unit or whole.unit)


def _same_relation(first: Structure, second: Structure) -> Decision:
    if len(first.parts) != 2 or len(second.parts) != 2:
        return Decision(False, "another equation")
    if any(_UNKNOWN.fullmatch(each.parts[0]) and _is_constant(each.parts[1]) for each in (first, second)):
        return Decision(False, "an equation that is still to be solved")
    from components.grading.algebra import same_relation

    sides, others = ((each.parts[0], each.parts[1]) for each in (first, second))
    return decided_by_algebra(lambda: same_relation(sides, others), "equation")


def _value(equation: Structure, same: Same) -> str | None:
    """What an equation gives a name, or what a true one between constants comes to; None for any other."""
    parts = equation.parts[: _end(equation)]
    if len(parts) == 1 or any(map(is_name, parts)):
        # In `1 = z = x = 0` the name may stand anywhere, but only one at the front is given the value.
        return parts[-1] if len(parts) == 1 or is_name(parts[0]) or len(parts) > 2 else None
    if not all(map(_is_constant, parts)):
        return None
    if len(set(parts)) < len(parts) or not all(same(read(one), read(other)).equal for one, other in pairwise(parts)):
        raise RefusedError("an equation between different constants")
    return parts[-1]


def _end(equation: Structure) -> int:
    r"""How many parts stand before an approximation: `x = 1/3 \approx 0.33` is 1/3, but `x \approx 11` is 11."""
    start = 1 if is_name(equation.parts[0]) else 0
    signs = equation.signs
    return signs.index("~", start) + 1 if "~" in signs[start:] else len(equation.parts)


def _refuse_guesses(parts: Sequence[str]) -> None:
    numbers = [number for part in parts if (number := read(part).number)]
    if any(not one.equals(other) for one, other in pairwise(numbers)):
        raise RefusedError("an equation between different numbers")


def _is_constant(latex: str) -> bool:
    return not re.search(r"[a-zA-Z]", _CONSTANTS.sub("", latex))


def same_inequalities(first: Structure, second: Structure, same: Same) -> Decision | None:
    """Compare two answers of which one or both are inequalities; None where only algebra can.

    An inequality in one variable is the interval that it describes.
    """

    def equal(one: str, other: str) -> bool:
        return same(read(one), read(other)).equal

    ours, theirs = (as_interval(each) if each.kind is Kind.INEQUALITY else None for each in (first, second))
    if ours and theirs:
        if letter_of(ours[0]) != letter_of(theirs[0]):
            return Decision(False, "an inequality about something else")
        return same_elements(ours[1], theirs[1], equal)
    for interval, other in ((ours, second), (theirs, first)):
        if interval and other.kind is Kind.TUPLE:
            return same_elements(interval[1], other, equal)
        if interval and other.kind is not Kind.INEQUALITY:
            return Decision(False, "an inequality and a value")
    is_open = any(each.kind is Kind.INEQUALITY and not _is_solved(each) for each in (first, second))
    if is_open and Kind.TUPLE in (first.kind, second.kind):
        return Decision(False, "an inequality that is still to be solved")
    return None


def _is_solved(inequality: Structure) -> bool:
    return any(is_name(part.strip("| ")) for part in inequality.parts)
