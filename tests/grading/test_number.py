"""Numbers read from text exactly, and decimals that round others."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.number import Number, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", "72"),
        ("-5", "-5"),
        ("+5", "5"),
        ("007", "7"),
        ("1,234,567", "1234567"),
        ("1 234 567", "1234567"),
        ("3.50", "7/2"),
        (".5", "1/2"),
        ("-.5", "-1/2"),
        ("5.", "5"),
        ("1,234.5", "2469/2"),
        ("1/2", "1/2"),
        ("-1/2", "-1/2"),
        ("(1)/(2)", "1/2"),
        ("2,000/3,000", "2/3"),
        (r"\frac{1}{2}", "1/2"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"-\frac{-1}{2}", "1/2"),
        (r"1\frac{4}{5}", "9/5"),
        (r"-1\frac{4}{5}", "-9/5"),
        ("1 4/5", "9/5"),
        ("-1 4/5", "-9/5"),
        (r"4.5\times10^{4}", "45000"),
        (r"3\cdot10^{-2}", "3/100"),
        (r"-3\cdot10^2", "-300"),
        ("2.5e3", "2500"),
        ("1E-2", "1/100"),
        (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", "1/6"),
        (r"-2.\overline{27}", "-25/11"),
        (r".\overline{9}", "1"),
        (r"0.2\bar{7}", "5/18"),
        ("zero", "0"),
        ("Eleven", "11"),
        ("nineteen", "19"),
        ("twenty", "20"),
        ("ninety", "90"),
        ("forty-two", "42"),
    ],
)
def test_a_number_has_its_exact_value(text: str, value: str) -> None:
    """Every way to write a rational number is read, without rounding."""
    number = read_number(text)
    assert number
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        ".",
        "+.",
        "x",
        "5x",
        "1,23",
        "1,2345",
        "12 34",
        "1234,567",
        "1.2.3",
        "--5",
        "1/0",
        r"\frac{1}{0}",
        "1/-2",
        "1/2/3",
        "1 1 1/2",
        r"1\frac{-1}{2}",
        r"\frac{1.5}{2}",
        "1e",
        "e3",
        r"\overline{3}",
        "1e1000",
        "9^9",
        "\u0663",
        "½",
        "twoten",
        "ten-two-one",
        "five-",
        "nan",
        "inf",
        "oo",
        "1_000",
        "0x10",
        "1,000,00",
    ],
)
def test_what_is_no_number_is_not_read(text: str) -> None:
    """Lists, misplaced commas, divisions by zero, products and foreign digits have no value here."""
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("decimal", "value", "rounds"),
    [
        ("0.333", "1/3", True),
        ("0.33", "1/3", False),
        ("0.3333", "1/3", True),
        ("0.334", "1/3", False),
        ("0.666", "2/3", False),
        ("0.667", "2/3", True),
        ("-0.667", "-2/3", True),
        ("-0.667", "2/3", False),
        ("0.0333", "1/30", True),
        ("0.033", "1/30", False),
        ("33.3", "100/3", True),
        ("33", "100/3", False),
        ("333", "1000/3", False),
        ("333.", "1000/3", True),
        ("0.12", "1/8", False),
        ("0.125", "1/8", True),
        ("0.1250", "1/8", True),
        ("0.124", "1/8", False),
        ("3.14", "314159/100000", False),
        ("3.143", "22/7", True),
    ],
)
def test_a_decimal_rounds_only_what_no_decimal_writes_out(decimal: str, value: str, rounds: bool) -> None:
    """Three significant digits of a third are a third; a value with a decimal of its own has to be that decimal."""
    number, other = read_number(decimal), Number(Fraction(value), None)
    assert number
    assert number.equals(other) is other.equals(number) is rounds


def test_two_decimals_are_equal_only_as_numbers() -> None:
    """A longer decimal is not the shorter one, though it rounds to it; noughts at the end add nothing."""
    short, long, noughts = (read_number(text) for text in ("0.333", "0.3333", "0.33300"))
    assert short
    assert long
    assert noughts
    assert not short.equals(long)
    assert short.equals(noughts)


@pytest.mark.parametrize(("text", "digits"), [("0.00123", 3), ("12.30", 4), ("1.", 1), ("0.10", 2), ("-2.50", 3)])
def test_significant_digits_are_counted_from_the_first_that_is_not_nought(text: str, digits: int) -> None:
    """Noughts in front do not count, those behind do."""
    number = read_number(text)
    assert number
    assert number.shows(digits)
    assert not number.shows(digits + 1)


def test_only_a_decimal_shows_digits() -> None:
    """A fraction or an integer was not rounded."""
    assert not any(number.shows(1) for text in ("5", "1/3", "1e3") if (number := read_number(text)))


@given(st.integers(), st.integers(1, 10**12))
def test_a_fraction_is_read_back(numerator: int, denominator: int) -> None:
    """Whatever fraction is written, with a slash, as LaTeX or as a mixed number, has its value."""
    value = Fraction(numerator, denominator)
    whole, rest = divmod(abs(numerator), denominator)
    sign = "-" if numerator < 0 else ""
    for text in (
        f"{numerator}/{denominator}",
        rf"\frac{{{numerator}}}{{{denominator}}}",
        rf"{sign}{whole}\frac{{{rest}}}{{{denominator}}}",
        f"{sign}{whole} {rest}/{denominator}",
    ):
        number = read_number(text)
        assert number
        assert number.value == value


@given(st.text("0123456789.,/-+ eE\\{}()fractimes^"))
def test_any_text_is_a_number_or_none(text: str) -> None:
    """No text raises, and a number that is read has the sign that is written in front."""
    number = read_number(text)
    assert number is None or number.value <= 0 or not text.startswith("-") or r"\frac{-" in text
