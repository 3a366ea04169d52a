r"""Sets of real numbers: intervals, unions, single points, and inequalities that are solved for one variable.

An inequality counts as solved if a variable, or its absolute value, is alone on one side or in the middle: `x < 1`,
`1 < x \le 2`, `x \ne 3`, `|x| \ge 2`.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

from components.grading.parsing import Kind, Structure, is_name, parse, parse_structure

_REALS = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])|\(-\\infty\s*,\s*\\infty\s*\))"
_REALS_WITHOUT = re.compile(
    _REALS + r"(?:\s*\\(?:setminus|backslash|smallsetminus)(?![a-zA-Z])\s*(\\\{.*\\\}))?", re.DOTALL
)
_BARS = re.compile(r"\|([^|]*)\|")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval with its ends in LaTeX; a single point if both ends are the same text."""

    low: str
    high: str
    has_low: bool
    has_high: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals, and the name of the variable in it, if the answer has one."""

    intervals: tuple[Interval, ...]
    name: str = ""


def parse_region(latex: str) -> Region | None:
    """Return the region that an answer describes; None for any other answer and for an unsolved inequality."""
    structure = parse_structure(latex)
    match structure.kind:
        case Kind.TUPLE if len(structure.parts) == 2:
            low, high = structure.parts
            opening, closing = structure.signs
            return Region((Interval(low, high, opening == "[", closing == "]"),))
        case Kind.SET:
            return Region(tuple(Interval(part, part, True, True) for part in structure.parts))
        case Kind.UNION | Kind.LIST:
            return _union(structure)
        case Kind.INEQUALITY:
            return _one_sided(structure) or _between(structure)
    return Region(()) if latex == r"\emptyset" else _complement(latex)


def _union(structure: Structure) -> Region | None:
    """The intervals of all parts; the parts of a list must be inequalities, joined by "or" or a comma."""
    kinds = {parse_structure(part).kind for part in structure.parts}
    if structure.kind is Kind.LIST and kinds != {Kind.INEQUALITY}:
        return None
    regions = [region for part in structure.parts if (region := parse_region(part))]
    names = {region.name for region in regions if region.name}
    if len(regions) < len(structure.parts) or len(names) > 1:
        return None
    return Region(tuple(interval for region in regions for interval in region.intervals), "".join(names))


_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_VARIABLE = re.compile(r"[a-zA-Z]|\\[a-z]+")


def ascending(inequality: Structure) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parts and signs of an inequality, in reverse order if its first sign is `>` or `>=`."""
    parts, signs = inequality.parts, inequality.signs
    if not signs[0].startswith(">"):
        return parts, signs
    return parts[::-1], tuple(_FLIPPED.get(sign, sign) for sign in signs[::-1])


def _one_sided(inequality: Structure) -> Region | None:
    """The region of an inequality with a variable, its negative or its absolute value alone on one side."""
    parts, signs = ascending(inequality)
    if len(parts) != 2 or signs[0] not in {"<", "<=", "!="}:
        return None
    is_below = _bare(parts[0]) != ""
    side, bound = parts if is_below else parts[::-1]
    name, has_bars = _bare(side), "|" in side
    if not name:
        return None
    if side.startswith("-"):  # `-x < 1` is `x > -1`
        bound, is_below = f"-({bound})", not is_below
    if signs[0] == "!=":
        return None if has_bars else Region(_without([bound]), name)
    has_end = signs[0] == "<="
    if has_bars and is_below:
        return Region((Interval(f"-({bound})", bound, has_end, has_end),), name)
    below = Interval(r"-\infty", f"-({bound})" if has_bars else bound, False, has_end)
    above = Interval(bound, r"\infty", has_end, False)
    if has_bars:
        return Region((below, above), name)
    return Region((below if is_below else above,), name)


def _between(inequality: Structure) -> Region | None:
    """The region of an inequality such as `1 < x < 2` or `1 < |x| < 2`."""
    parts, signs = ascending(inequality)
    if len(parts) != 3 or not {*signs} <= {"<", "<="}:
        return None
    low, middle, high = parts
    bars = _BARS.fullmatch(middle)
    name = bars[1].strip() if bars else middle
    if "|" in name or not is_name(name):
        return None
    has_low, has_high = (sign == "<=" for sign in signs)
    interval = Interval(low, high, has_low, has_high)
    mirrored = Interval(f"-({high})", f"-({low})", has_high, has_low)
    return Region((mirrored, interval) if bars else (interval,), name)


def _bare(latex: str) -> str:
    """The name in `x`, `-x`, `|x|` or `f(x)`; empty for any other text, also for `-f(x)` and `|f(x)|`."""
    bars = _BARS.fullmatch(latex)
    name = bars[1].strip() if bars else latex.removeprefix("-").strip()
    must_be_variable = bars or latex.startswith("-")
    return name if is_name(name) and (not must_be_variable or _VARIABLE.fullmatch(name)) else ""


def _complement(latex: str) -> Region | None:
    r"""The region of `\mathbb{R}` or `\mathbb{R}\setminus\{1,2\}`."""
    match = _REALS_WITHOUT.fullmatch(latex)
    if not match:
        return None
    if not match[1]:  # nothing is excluded
        return Region(_without([]))
    points = parse_structure(match[1])
    return Region(_without(list(points.parts))) if points.kind is Kind.SET else None


def _without(points: list[str]) -> tuple[Interval, ...]:
    """The real line without `points` (sorted if all are numbers), as open intervals."""
    values = {point: number.value for point in points if (number := parse(point).number)}
    if len(values) == len(points):
        points = sorted(points, key=values.__getitem__)
    ends = [r"-\infty", *points, r"\infty"]
    return tuple(Interval(low, high, False, False) for low, high in pairwise(ends))
