"""Units behind a value, and the currency in front of it."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.units import DEGREE, PERCENT, Unit, split_unit


def unit_of(latex: str) -> Unit:
    """The unit of an answer that has one."""
    unit = split_unit(latex)[1]
    assert unit, latex
    return unit


@pytest.mark.parametrize(
    ("latex", "value", "kind"),
    [
        ("5 cm", "5", "length"),
        ("5cm", "5", "length"),
        (r"5\text{ cm}", "5", "length"),
        (r"5\mathrm{cm}", "5", "length"),
        (r"5 \mbox{ inches}^2", "5", "length^2"),
        (r"5\text{ cm}^{3}", "5", "length^3"),
        (r"5\text{ cm}^3", "5", "length^3"),
        (r"5\text{ cm^2}", "5", "length^2"),
        ("5 square feet", "5", "length^2"),
        ("5 sq ft", "5", "length^2"),
        ("5 cubic meters", "5", "length^3"),
        ("5 cu. yd.", "5", "length^3"),
        ("5 ml", "5", "volume"),
        ("5 lbs", "5", "mass"),
        ("5 hrs", "5", "time"),
        ("5 miles per hour", "5", "length per time"),
        ("5 mph", "5", "length per time"),
        ("5 ft/s", "5", "length per time"),
        ("5 dollars per apple", "5", "money per apple"),
        ("5 apples", "5", "apple"),
        ("5 slices of pizza", "5", "slice of pizza"),
        ("5 cents", "5", "money"),
        (r"\$5", "5", "money"),
        (r"-\$5", "-5", "money"),
        (r"5\$", "5", "money"),
        (r"\$5 per hour", "5", "money per time"),
        ("€5", "5", "euros"),
        ("5€", "5", "euros"),
        ("5 euros", "5", "euros"),
        ("£5", "5", "pounds sterling"),
        (r"\pounds 5", "5", "pounds sterling"),
        ("4:30 p.m.", "4:30", "clock pm"),
        ("4:30 AM", "4:30", "clock am"),
        (r"5 \text{ radians}", "5", "radian"),
        (r"5\degree C", "5", "degree C"),
        (r"5\degree\text{F}", "5", "degree F"),
        (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}", "length"),
        (r"\frac{1}{2} m", r"\frac{1}{2}", "length"),
        ("(3) cm", "(3)", "length"),
        (r"5 \%", "5", "percent"),
        ("5%", "5", "percent"),
        ("5 percent", "5", "percent"),
        (r"5\text{ percentage points}", "5", "percent"),
        (r"5\degree", "5", "degree"),
        (r"5\text{ degrees}", "5", "degree"),
        (r"\frac{\pi}{3}\degree", r"\frac{\pi}{3}", "degree"),
    ],
)
def test_a_value_comes_apart_from_its_unit(latex: str, value: str, kind: str) -> None:
    """The unit is found in words, in LaTeX, in short and in front, and what is left is the value."""
    assert split_unit(latex)[0].strip() == value
    assert unit_of(latex).kind == kind


@pytest.mark.parametrize(
    "latex",
    [
        "5",
        "x",
        "5x",
        "5 x",
        "5xy",
        "5 xy",
        "5apples",
        "2n",
        "3ab",
        "apples",
        "x cm",
        "(x) cm",
        r"x\text{ cm}",
        "5 per",
        "5 per per",
        "cm",
        r"\sin 30\degree",
        r"\tan 45\degree",
        r"3\degree 4\degree",
        "5 dozen",
        "5 million",
        "5 percent more",
        "5 half",
        "5 squared",
        "5 pi",
        "5 plus",
        "not 5",
        "5 or 6",
        "5 more",
        "5 more apples",
        "5 to",
        "3 sin",
        "5 base",
        "5 ab c",
    ],
)
def test_what_is_no_unit_stays(latex: str) -> None:
    """Letters of a product, functions and words that change a value are not cut off."""
    assert split_unit(latex) == (latex, None)


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        ("1 m", "1 cm", 100),
        ("1 km", "1 meter", 1000),
        ("1 cm", "1 mm", 10),
        ("1 inch", "1 cm", Fraction("2.54")),
        ("1 foot", "1 inch", 12),
        ("1 yard", "1 foot", 3),
        ("1 mile", "1 foot", 5280),
        ("1 square yard", "1 square foot", 9),
        ("1 cubic foot", "1 cubic inch", 1728),
        ("1 kg", "1 gram", 1000),
        ("1 g", "1 mg", 1000),
        ("1 pound", "1 ounce", 16),
        ("1 liter", "1 ml", 1000),
        ("1 hour", "1 minute", 60),
        ("1 minute", "1 second", 60),
        ("1 day", "1 hour", 24),
        ("1 week", "1 day", 7),
        ("1 dollar", "1 cent", 100),
        ("1 mile per minute", "1 mph", 60),
        ("1 m/s", "1 kph", Fraction("3.6")),
        ("1 dollar per hour", "1 cent per hour", 100),
        ("1 apple", "1 apples", 1),
    ],
)
def test_units_of_a_kind_convert(one: str, other: str, ratio: Fraction) -> None:
    """How many of one unit make another is exact."""
    first, second = unit_of(one), unit_of(other)
    assert first.kind == second.kind
    assert first.factor / second.factor == ratio


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 m", "1 s"),
        ("1 m", "1 m^2"),
        ("1 m", "1 m/s"),
        ("1 apple", "1 pear"),
        ("1 dollar", "1 euro"),
        ("1 am", "1 pm"),
        ("1%", r"1\degree"),
        (r"1\degree", "1 rad"),
        (r"1\degree C", r"1\degree F"),
        ("€1", "£1"),
    ],
)
def test_other_kinds_do_not_convert(one: str, other: str) -> None:
    """A length is no time, an apple no pear."""
    assert unit_of(one).kind != unit_of(other).kind


def test_percent_and_degrees_are_known_by_name() -> None:
    """The comparison converts these two to plain numbers."""
    assert unit_of("5 percent") == PERCENT
    assert unit_of("5 degrees") == DEGREE
    assert PERCENT.factor == Fraction(1, 100)


WORDS = "5 x cm per / square sq cubic cents apples of to mph . ^2 \\% \\$ € \\degree degrees radians \\text{ cm}"


@given(st.lists(st.sampled_from(WORDS.split(" "))).map(" ".join))
def test_any_words_are_a_unit_or_none(latex: str) -> None:
    """No mixture of units raises, and what is left is a part of what was there."""
    value, _ = split_unit(latex)
    assert value.strip(" -") in latex
