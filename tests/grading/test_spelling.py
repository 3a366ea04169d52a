"""One spelling for an answer that is written in many ways."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.spelling import read

_SYMBOLS = r"""
5 12 , . : ; $ $$ \$ \% % x y i e ( ) [ ] { } \{ \} \\ \( \) \[ \] \text{ \frac \frac{1}{2} \sqrt ^ _ base
\left( \right) \boxed{ ** * \! \, ~ pi oo sqrt( \circ ^\circ cm and or = < <= \degree \color{red} ≤ π ½ ²
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # wrappings and ends
        ("$5$", "5"),
        (r"\(5\)", "5"),
        (r"\[ 5 \]", "5"),
        ("**5**", "5"),
        ("5.", "5"),
        ("5,", "5"),
        (r"5\\", "5"),
        (r"\boxed{5}", "5"),
        (r"\fbox{x}", "x"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\mathrm{even}", "even"),
        (r"\textbf{\text{B}}", "B"),
        ("US$5", r"\$5"),
        (r"\color{red}{x}", "{x}"),
        (r"\displaystyle x", "x"),
        ("(B)", "B"),
        # spaces
        (r"\,x\,+\;y\ ", "x+y"),
        (r"x\quad y\qquad z", "x y z"),
        ("x~y", "xy"),
        ("( 1 , 2 )", "(1,2)"),
        ("x\u00a0+ 1", "x+1"),
        # commands and signs that mean the same
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tfrac12", r"\frac{1}{2}"),
        (r"\cfrac{1}2", r"\frac{1}{2}"),
        (r"\frac 1 2", r"\frac12"),
        (r"\frac1{2x}", r"\frac{1}{2x}"),
        (r"\frac{2x}3", r"\frac{2x}{3}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("√2", r"\sqrt{2}"),
        (r"\left(\frac12, 4\right)", r"(\frac{1}{2},4)"),
        (r"\bigl[1,2\Bigr]", "[1,2]"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        ("x_1", "x_{1}"),
        ("x^2", "x^{2}"),
        ("x^10", "x^{10}"),
        ("x²y³", "x^2y^3"),
        ("\u2212x", "-x"),
        ("2\u00d73", r"2\times 3"),
        ("2·3", r"2\cdot 3"),
        ("6÷2", "6/2"),
        (r"x\leq 2", r"x\le 2"),
        (r"x\geqslant 2", r"x\ge2"),
        ("x<=2", r"x \le 2"),
        ("x>=2", "x≥2"),
        ("x!=2", r"x\neq 2"),
        (r"x\lt 2", "x<2"),
        (r"x\gt 2", "x>2"),
        (r"\lbrace 1\rbrace", r"\{1\}"),
        (r"\varnothing", r"\{ \}"),
        (r"\emptyset", r"\{\}"),
        (r"\text{No real solutions}", r"\emptyset"),
        (r"\mathbb{R}", r"(-\infty,\infty)"),
        (r"\text{all real numbers}", r"\mathbb R"),
        (r"+\infty", r"\infty"),
        ("oo", "∞"),
        ("infinity", "inf"),
        (r"\approx 5", "5"),
        ("about 5", "approximately 5"),
        # mathematics typed without LaTeX
        ("x**2", "x^2"),
        ("2*x", r"2\cdot x"),
        ("2 pi", r"2\pi"),
        ("sqrt(x)", r"\sqrt{x}"),
        ("x^(n+1)", "x^{n+1}"),
        (r"\sin^2x", r"\sin^{2} x"),
        ("3(4)", r"3\cdot(4)"),
        ("i(2-i)", r"i\cdot(2-i)"),
        # bases and ratios
        ("1010_{two}", "1010_2"),
        (r"1010_{\text{two}}", "1010_2"),
        ("1010 base 2", "1010_2"),
        (r"1010\text{ base 2}", "1010_2"),
        (r"1010\text{ base }2", "1010_2"),
        ("(BEEF)_{16}", "BEEF_{16}"),
        (r"2\text{ to }3", "2:3"),
    ],
)
def test_what_only_looks_different_has_one_spelling(one: str, other: str) -> None:
    """Wrappings, spaces, signs and commands make no difference."""
    assert (read(one).text, read(one).unit) == (read(other).text, read(other).unit)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 1/2", "11/2"),
        ("1 2", "12"),
        ("x^{1}0", "x^{10}"),
        ("1,2", "12"),
        ("(1,234)", "1234"),
        ("1,23", "123"),
        ("1{,}2", "12"),
        ("[1,2]", "(1,2)"),
        (r"\{1\}", "1"),
        (r"\lfloor x\rfloor", "x"),
        ("|x|", "x"),
        ("-5", "5"),
        ("52_8", "52"),
        ("x_1", "x_2"),
        ("X", "x"),
        (r"\le 5", "<5"),
        ("f(2)", r"f\cdot 2"),
        (r"\phi(2)", r"\phi\cdot(2)"),
        ("x_i(2)", r"x_i\cdot(2)"),
        ("1,23,456", "1,23456"),
        (r"\sin^2x", r"\sin^{2x}"),
        ("pirate", r"\pi rate"),
        ("oops", r"\infty ps"),
        (r"\text{no}", "on"),
        (r"-\infty", r"\infty"),
        ("solution", r"\emptyset"),
    ],
)
def test_what_is_different_stays_different(one: str, other: str) -> None:
    """No rule joins, splits or drops what carries meaning."""
    assert read(one).text != read(other).text


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("72", "72"),
        ("1,234", "1234"),
        (r"10,\!080", "10080"),
        ("10{,}000", "10000"),
        (r"1\,000\,000", "1000000"),
        ("10 000", "10000"),
        (r"\$1,250.50", "1250.5"),
        ("3½", "7/2"),
        (r"1\dfrac{4}{5}", "9/5"),
        (r"\text{eleven}", "11"),
        (r"\textbf{12} apples", "12"),
        (r"4.5 \times 10^4", "45000"),
        (r"0.\overline{27}", "3/11"),
        ("-0.5", "-1/2"),
    ],
)
def test_numbers_are_read_whatever_surrounds_them(written: str, value: str) -> None:
    """A number has its value with separators, units, currency and style."""
    number = read(written).number
    assert number
    assert number.value == Fraction(value)


@pytest.mark.parametrize("written", ["(1,234)", r"\{100,200\}", "1,23", "3(4)", "52_8", "1:20", "5 million", "5 or 6"])
def test_what_is_no_number_has_no_value(written: str) -> None:
    """Tuples, sets, products, bases and times are no numbers."""
    assert read(written).number is None


def test_a_tuple_keeps_its_commas_and_a_number_drops_them() -> None:
    """`(1,234)` is a point, `1,234` a number."""
    assert read("(1,234)").latex == "(1,234)"
    assert read("1,234").latex == "1234"
    assert read("1,23,456").latex == "1,23,456"


@given(st.lists(st.sampled_from(_SYMBOLS.split()), max_size=12).map("".join) | st.text())
def test_any_text_is_read_and_twice_the_same(written: str) -> None:
    """Nothing raises, and blanks around an answer change nothing."""
    assert read(f" {written} ") == read(written)
    assert read(written).latex == read(written).latex.strip()
