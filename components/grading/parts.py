"""Comparison of answers that have parts: lists and sets in any order, tuples and matrices in theirs."""

import re
from collections.abc import Callable, Sequence

from components.grading.decision import Decision
from components.grading.structure import Kind, Structure, is_name, structure

Equal = Callable[[str, str], bool]
"""Whether two parts, as they are written, are equal."""

_TWO_SIGNS = re.compile(r"^\s*\\(?:pm|mp)(?![a-z])")
_ROOT = re.compile(r"\b([xyz])_(?:\{[^{}]*\}|.)")
_COMMAND = re.compile(r"\\[a-z]+\s*\{([^{}]*)\}")


def same_values(first: Sequence[str], second: Sequence[str], equal: Equal) -> Decision:
    """Compare values in any order; where only one side names several, in the order of the names."""
    first, second = _members(first), _members(second)
    ours, theirs = ([assignment(part) for part in parts] for parts in (first, second))
    num_names = [len({name for name, _ in side if name}) for side in (ours, theirs)]
    values, other_values = ([value for _, value in side] for side in (ours, theirs))
    if max(num_names) <= 1:
        same = _same_members(values, other_values, equal)
    elif min(num_names) == 0:
        same = _same_in_order(values, other_values, equal)
    else:
        same = _same_members(first, second, equal)
    return Decision(same, "same values" if same else "other values")


def same_elements(first: Structure, second: Structure, equal: Equal) -> Decision:
    """Compare tuples, intervals, vectors and matrices: element by element, within the same brackets."""
    if first.kind is second.kind and (first.signs != second.signs or _shape(first) != _shape(second)):
        return Decision(False, "other brackets or another size")
    if first.kind is not second.kind and not (_is_vector(first) and _is_vector(second)):
        return Decision(False, f"{second.kind} where {first.kind} is expected")
    ours, theirs = ([assignment(element)[1] for element in _elements(each)] for each in (first, second))
    same = _same_in_order(ours, theirs, equal)
    return Decision(same, "same elements" if same else "other elements")


def assignment(part: str) -> tuple[str, str]:
    """Return the letter that a part gives a value to, empty if none, and the value."""
    found = structure(part)
    if found.kind is not Kind.EQUATION or not is_name(found.parts[0]):
        return "", part
    return letter_of(found.parts[0]), found.parts[-1]


def letter_of(name: str) -> str:
    """Return a name without its argument, f for f(x), and without the index of a root: x_1 and x_2 are both x."""
    named = _COMMAND.sub(r"\1", name)
    bare = "".join((named if named.startswith("(") else named.partition("(")[0]).split())
    return _ROOT.sub(r"\1", bare)


def _same_in_order(first: Sequence[str], second: Sequence[str], equal: Equal) -> bool:
    return len(first) == len(second) and all(equal(*pair) for pair in zip(first, second, strict=True))


def _same_members(first: Sequence[str], second: Sequence[str], equal: Equal) -> bool:
    """Whether each value of either side is among those of the other; saying one twice adds nothing."""
    ours, left = _distinct(first, equal), _distinct(second, equal)
    if len(ours) != len(left):
        return False
    for value in ours:
        # The same text first: algebra is a thousand times slower.
        found = next((other for other in left if value == other), None) or _first_equal(value, left, equal)
        if found is None:
            return False
        left.remove(found)
    return True


def _distinct(values: Sequence[str], equal: Equal) -> list[str]:
    kept: list[str] = []
    for value in dict.fromkeys(values):
        if _first_equal(value, kept, equal) is None:
            kept.append(value)
    return kept


def _first_equal(value: str, others: Sequence[str], equal: Equal) -> str | None:
    return next((other for other in others if equal(value, other)), None)


def _members(parts: Sequence[str]) -> list[str]:
    r"""The values of a list, of which `\pm 2` is two."""
    return [value for part in parts for value in (structure(part).parts if _TWO_SIGNS.search(part) else [part])]


def _is_vector(given: Structure) -> bool:
    """Whether elements stand in one row or column, in round brackets if in any."""
    if given.kind is Kind.MATRIX:
        return len(given.parts) == 1 or all("&" not in row for row in given.parts)
    return given.signs in {(), ("(", ")")}


def _shape(given: Structure) -> int:
    """The rows of a matrix."""
    return len(given.parts) if given.kind is Kind.MATRIX else 1


def _elements(given: Structure) -> list[str]:
    """The elements of a tuple, or those of a matrix row by row."""
    if given.kind is not Kind.MATRIX:
        return list(given.parts)
    return [element.strip() for row in given.parts for element in row.split("&")]
