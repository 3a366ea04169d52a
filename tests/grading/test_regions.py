r"""Parts of the real line, as intervals, sets and inequalities describe them."""

import pytest

from components.grading.parsing import parse, parse_structure
from components.grading.regions import parse_region

REGIONS = [
    ("(1,2]", "(1, 2]", ""),
    (r"\{1,3\}", "[1, 1] [3, 3]", ""),
    (r"(-\infty,1)\cup[2,3]", r"(-\infty, 1) [2, 3]", ""),
    ("x < 1", r"(-\infty, 1)", "x"),
    (r"1 \ge x", r"(-\infty, 1]", "x"),
    ("-x < 1", r"(-(1), \infty)", "x"),
    (r"x \ne 3", r"(-\infty, 3) (3, \infty)", "x"),
    (r"1 < x \le 2", "(1, 2]", "x"),
    ("2 > x > 1", "(1, 2)", "x"),
    ("|x| < 2", "(-(2), 2)", "x"),
    (r"|x| \ge 2", r"(-\infty, -(2)] [2, \infty)", "x"),
    ("1 < |x| < 2", "(-(2), -(1)) (1, 2)", "x"),
    (r"x < 1 \text{ or } x > 2", r"(-\infty, 1) (2, \infty)", "x"),
    (r"x \in [0,1)", "[0, 1)", "x"),
    (r"\mathbb{R}\setminus\{2,1\}", r"(-\infty, 1) (1, 2) (2, \infty)", ""),
    (r"\emptyset", "", ""),
]
NONE = ["5", "(1,2,3)", "x + 1 < 2", "x^2 < 4", "x < y", "x < 1, y > 2", "x < 1, 5", r"|x| \ne 1", "x = 1"]


@pytest.mark.parametrize(("written", "intervals", "name"), REGIONS)
def test_a_region_is_a_union_of_intervals(written: str, intervals: str, name: str) -> None:
    """With the ends as they are written, and the variable that lies in it."""
    latex = parse(written).latex
    region = parse_region(parse_structure(latex), latex)
    assert region is not None
    shown = [
        f"{'[' if each.has_low else '('}{each.low}, {each.high}{']' if each.has_high else ')'}"
        for each in region.intervals
    ]
    assert (" ".join(shown), region.name) == (intervals, name)


@pytest.mark.parametrize("written", NONE)
def test_what_is_not_solved_for_one_variable_is_no_region(written: str) -> None:
    """Nor is any other answer."""
    latex = parse(written).latex
    assert parse_region(parse_structure(latex), latex) is None
