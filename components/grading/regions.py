r"""Parts of the real line: intervals, unions, single points, and inequalities that are solved for one variable.

An inequality is solved if a variable, or its absolute value, is alone on one side or in the middle: `x < 1`,
`1 < x \le 2`, `x \ne 3`, `|x| \ge 2`. Any other still has to be solved, and is no region.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

from components.grading.parsing import Kind, Structure, is_name, parse, parse_structure

_REALS = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])|\(-\\infty\s*,\s*\\infty\s*\))"
_WITHOUT = re.compile(
    rf"({_REALS}|.*?)\s*(?:\\setminus|\\backslash|\\smallsetminus)(?![a-zA-Z])\s*(\\\{{.*\\\}})", re.DOTALL
)
_BARS = re.compile(r"\|([^|]*)\|")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval, or a single point where both ends are the same text."""

    low: str
    high: str
    has_low: bool
    has_high: bool


@dataclass(frozen=True, slots=True)
class Region:
    """The union of some intervals, and the variable that lies in it where one is named."""

    intervals: tuple[Interval, ...]
    name: str = ""


def parse_region(structure: Structure, latex: str) -> Region | None:
    """Return the region that an answer describes; None for any other answer, and for an unsolved inequality."""
    match structure.kind:
        case Kind.TUPLE:
            return _interval(structure)
        case Kind.SET:
            return Region(tuple(Interval(part, part, True, True) for part in structure.parts))
        case Kind.UNION | Kind.LIST:
            return _union(structure)
        case Kind.INEQUALITY:
            return _one_sided(structure) or _between(structure)
    return Region(()) if latex == r"\emptyset" else _complement(latex)


def _interval(structure: Structure) -> Region | None:
    if len(structure.parts) != 2:
        return None
    low, high = structure.parts
    return Region((Interval(low, high, structure.signs[0] == "[", structure.signs[1] == "]"),))


def _union(structure: Structure) -> Region | None:
    """The intervals of all parts; those of a list are inequalities, joined by "or" or a comma."""
    parts = [parse_structure(part) for part in structure.parts]
    if structure.kind is Kind.LIST and {part.kind for part in parts} != {Kind.INEQUALITY}:
        return None
    regions = [parse_region(part, text) for part, text in zip(parts, structure.parts, strict=True)]
    known = [region for region in regions if region]
    names = {region.name for region in known if region.name}
    if len(known) < len(regions) or len(names) > 1:
        return None
    return Region(tuple(each for region in known for each in region.intervals), "".join(names))


_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_VARIABLE = re.compile(r"[a-zA-Z]|\\[a-z]+")


def ascending(inequality: Structure) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parts and signs, turned around where the first sign is `>`."""
    parts, signs = inequality.parts, inequality.signs
    if not signs[0].startswith(">"):
        return parts, signs
    return parts[::-1], tuple(_FLIPPED.get(sign, sign) for sign in signs[::-1])


def _one_sided(inequality: Structure) -> Region | None:
    r"""The region of an inequality between a variable, with a minus or within bars, and another expression."""
    (left, *others), (sign, *_) = ascending(inequality)
    if len(others) != 1 or sign not in {"<", "<=", "!="}:
        return None
    is_below = bool(_bare(left))
    part, bound = (left, others[0]) if is_below else (others[0], left)
    if not (name := _bare(part)):
        return None
    if part.startswith("-"):
        bound, is_below = f"-({bound})", not is_below
    if sign == "!=":
        return None if "|" in part else Region(_without([bound]), name)
    has_end = "=" in sign
    if "|" in part and is_below:
        return Region((Interval(f"-({bound})", bound, has_end, has_end),), name)
    low = Interval(r"-\infty", f"-({bound})" if "|" in part else bound, False, has_end)
    high = Interval(bound, r"\infty", has_end, False)
    return Region((low, high) if "|" in part else (low if is_below else high,), name)


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
    """The variable that a text is, or its absolute value or negative; empty where it is anything else."""
    bars = _BARS.fullmatch(latex)
    name = bars[1].strip() if bars else latex.removeprefix("-").strip()
    simple = _VARIABLE.fullmatch(name) if bars or latex.startswith("-") else name
    return name if simple and is_name(name) else ""


def _complement(latex: str) -> Region | None:
    r"""Read `\mathbb{R}\setminus\{1,2\}`."""
    match = _WITHOUT.fullmatch(latex)
    if not match:
        return Region(_without([])) if re.fullmatch(_REALS, latex) else None
    points = parse_structure(match[2])
    if points.kind is not Kind.SET or not re.fullmatch(_REALS, match[1].strip()):
        return None
    return Region(_without(list(points.parts)))


def _without(points: list[str]) -> tuple[Interval, ...]:
    r"""The real numbers without some points, which are in order: `\infty` closes no interval."""
    numbers = [parse(point).number for point in points]
    if all(numbers):
        points = [
            point for _, point in sorted(zip((number.value for number in numbers if number), points, strict=True))
        ]
    ends = [r"-\infty", *points, r"\infty"]
    return tuple(Interval(low, high, False, False) for low, high in pairwise(ends))
