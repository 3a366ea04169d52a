"""Values that are computed without algebra: they are those that algebra finds, and take next to no time."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.grading import algebra
from components.grading.arithmetic import differ, exact_value, is_understood, value_at
from components.grading.parsing import parse
from components.grading.quantities import Number

LEAVES = ["1", "2", "7", "12", "0.25", "x", "y", "A", r"\pi", "e", r"\sqrt{3}", r"\frac12", r"\frac{3}{4}", "3!"]
PIECES = ["+", "-", "-", "/", "^", "(", ")", "{", "}", "!", "^2", "^{-1}", r"\cdot ", r"\sqrt", r"\frac", " "]
SHAPES = ["{}+{}", "{}-{}", "{}{}", r"{}\cdot {}", "-{}+{}", r"\frac{{{}}}{{{}}}", r"\sqrt{{{}}}\cdot{}", "{}/{}"]
SHAPES += ["({}){}", "({})^2+{}", "(({}))^{{-1}}{}", "({})({})", "{}^3-{}"]

expressions = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.builds(str.format, st.sampled_from(SHAPES), inner, inner),
    max_leaves=6,
)
mixtures = st.lists(st.sampled_from(LEAVES + PIECES), max_size=7).map("".join)


@pytest.mark.parametrize(
    ("latex", "value"),
    [
        ("2+3", "5"),
        (r"3\cdot 2^5", "96"),
        ("-2^2", "-4"),
        ("(-2)^{-2}", "1/4"),
        (r"\frac12+\frac{1}{3}", "5/6"),
        ("(2+1)(2+1)", "9"),
        ("(12)(5)", "60"),
        (r"\sqrt{\frac{4}{9}}", "2/3"),
        ("1/2/2", "1/4"),
        ("1/2(3)", "1/6"),
        (r"2\frac13", "7/3"),
        ("2^-1", "1/2"),
        ("5!", "120"),
        ("(" * 8 + "7" + ")" * 8, "7"),
    ],
)
def test_a_constant_has_its_exact_value(latex: str, value: str) -> None:
    """Signs, powers, roots, factorials, and brackets in brackets."""
    assert exact_value(latex) == Fraction(value)


@pytest.mark.parametrize(
    "latex",
    [
        *(
            "",
            "f(x)",
            "2^3^4",
            "2 3",
            "x2",
            "2!!",
            "1/0",
            "0^0",
            "|2|",
            "3i",
            "+",
        ),
        *(r"\sin 2", "(2", "2)", r"\frac{1}", "2^{10^9}", "9^{9999}", "999999!", r"\sqrt{-1}", "(-8)^{1/3}", "5,6"),
    ],
)
def test_what_has_no_value_here_is_left_to_algebra(latex: str) -> None:
    """Nor is anything computed that is too large."""
    assert not is_understood(latex)
    assert not differ(latex, "12345")


@pytest.mark.parametrize(
    ("latex", "other"),
    [("14", "-2u+10"), ("A", "C"), ("x^2", "x^3"), (r"\sqrt3/2", r"\frac{3\sqrt3}{4}"), (r"\pi", "3.141592653589")],
)
def test_different_values_are_told_apart(latex: str, other: str) -> None:
    """Whichever stands first; neither differs from itself."""
    assert differ(latex, other)
    assert differ(other, latex)
    assert not differ(latex, latex)


@pytest.mark.parametrize(
    ("latex", "other"),
    [("(x+1)^2", "x^2+2x+1"), (r"\sqrt8", r"2\sqrt2"), (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"), ("x/y", "xy^{-1}")],
)
def test_rounding_makes_no_difference(latex: str, other: str) -> None:
    """Equal values are not told apart."""
    assert not differ(latex, other)


@settings(deadline=None)
@given(expressions | mixtures)
def test_values_are_those_of_algebra(written: str) -> None:
    """Every expression that has a value here has the same value there."""
    latex = parse(written).latex
    value = value_at(latex, {})
    if isinstance(value, Fraction):
        assert algebra.same_value(latex, rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    elif value and 1e-3 < abs(value.value) < 1e4:
        decimal = f"{value.value:.9f}"
        assert algebra.equals_decimal(latex, Number(Fraction(decimal), 9))


@given(expressions, expressions)
def test_expressions_that_differ_are_not_equal_by_algebra(one: str, other: str) -> None:
    """What is told apart here is not the same there."""
    pair = parse(one).latex, parse(other).latex
    if differ(*pair):
        assert not algebra.same_value(*pair)


@pytest.mark.parametrize("piece", ["(", "{", "1+", "2^", r"\frac", r"\frac{1}{", "(1)", "9", "1/", "x^{9}", "-", " "])
def test_long_expressions_take_milliseconds(piece: str) -> None:
    """However often anything is repeated."""
    started = time.process_time()
    is_understood(piece * (600 // len(piece)))
    is_understood(piece * 100_000)
    assert time.process_time() - started < 0.1
