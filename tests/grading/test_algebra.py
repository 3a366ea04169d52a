"""Equality of expressions, equations and other objects of mathematics."""

from fractions import Fraction

import pytest

from components.grading.algebra import is_readable, rounds_to, same_relation, same_value, value_of, verified
from components.grading.decision import UnreadableError
from components.grading.number import read_number


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2(x+1)", "2x+2"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"\sqrt{x^2}", "|x|"),
        ("x^{a+b}", "x^a x^b"),
        (r"2^{n+1}", r"2\cdot 2^n"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        (r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{\sqrt5-2}", r"\sqrt{5}"),
        (r"\sin^2 x+\cos^2 x", "1"),
        (r"\sin 30\degree", r"\frac{1}{2}"),
        (r"\ln(xy)", r"\ln x+\ln y"),
        (r"\ln(x^2)", r"2\ln|x|"),
        (r"\log_2 8", "3"),
        ("i^2", "-1"),
        (r"e^{i\pi}", "-1"),
        (r"\cos x", r"\frac{e^{ix}+e^{-ix}}{2}"),
        ("0.1+0.2", "0.3"),
        ("1.5x", r"\frac{3x}{2}"),
        ("(-1)^n", "(-1)^{n+2}"),
        (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
        ("f(x)+f(x)", "2f(x)"),
        ("x-x", "0"),
        (r"\frac15\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1/5\\2/5\end{pmatrix}"),
    ],
)
def test_equal_expressions(one: str, other: str) -> None:
    """However they are written, and whichever comes first."""
    assert same_value(one, other)
    assert same_value(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("10^{100}", r"\sqrt{10^{200}+1}"),
        (r"\pi", r"\pi+10^{-300}"),
        (r"\pi", r"\frac{\ln(640320^3+744)}{\sqrt{163}}"),
        (r"\sin(10^{-30})", "10^{-30}"),
        (r"\sqrt{2}", "1.4142135623730950488"),
        ("10^{-40}", "0"),
        ("x", "x+10^{-40}"),
        ("x", r"x(1+10^{-40})"),
        ("x", "|x|"),
        ("x", r"\sqrt{x^2}"),
        (r"\lfloor x\rfloor", "x"),
        (r"\arcsin(\sin x)", "x"),
        (r"\frac{x}{|x|}", "1"),
        ("x^2", "2x"),
        ("2^x", "x^2"),
        ("xy", "x+y"),
        ("a-b", "b-a"),
        ("x", "X"),
        ("x_1", "x_2"),
        (r"\alpha", "a"),
        ("x", "1.33"),
        ("i", "-i"),
        ("e", "i"),
        ("e", "x"),
        ("f(x)", "g(x)"),
        ("f(x)", "f(2)"),
        (r"\sin 30", r"\frac{1}{2}"),
        ("1", r"\begin{pmatrix}1\\1\end{pmatrix}"),
    ],
)
def test_different_expressions(one: str, other: str) -> None:
    """What agrees at some points, or to hundreds of digits but not all, is not equal."""
    assert not same_value(one, other)
    assert not same_value(other, one)


@pytest.mark.parametrize("undefined", [r"\frac{0}{0}", r"\frac{1}{0}", r"\infty-\infty", r"0\cdot\infty", r"\log 0"])
@pytest.mark.parametrize("value", ["0", "1", "x", r"\pi", r"\infty"])
def test_what_is_undefined_equals_nothing(undefined: str, value: str) -> None:
    """Neither a number nor infinity."""
    assert not same_value(undefined, value)
    assert not same_value(value, undefined)


@pytest.mark.parametrize("undefined", [r"\frac{0}{0}", r"\frac{1}{0}", r"(\frac{0}{0},1)"])
def test_what_is_undefined_does_not_equal_itself(undefined: str) -> None:
    """Two answers that make no sense do not agree."""
    assert not same_value(undefined, undefined)
    assert not verified(undefined, undefined)


def test_infinity_is_only_itself() -> None:
    """Its sign counts, and calculating with it gives no answer."""
    assert same_value(r"\infty", r"\infty")
    assert same_value(r"-\infty", r"-\infty")
    assert not same_value(r"\infty", r"-\infty")
    assert not same_value("x", r"\infty")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("y", "2x+1"), ("2x-y+1", "0")),
        (("y", "2x+1"), ("2y", "4x+2")),
        (("0", "y-2x-1"), ("y", "2x+1")),
        (("x^2+y^2", "25"), (r"\frac{x^2}{25}+\frac{y^2}{25}", "1")),
        (("f(x)", "x+1"), ("1+x", "f(x)")),
    ],
)
def test_the_same_equation(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Sides may change places and be multiplied."""
    assert same_relation(one, other)
    assert same_relation(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("y", "2x+1"), ("x", "2y+1")),
        (("y", "2x+1"), ("y", "2x")),
        (("y", "2x+1"), ("z", "2x+1")),
        (("y", "2x+1"), ("y^2", "(2x+1)^2")),
        (("y", "x"), ("y", "x+10^{-40}")),
        (("x-x", "0"), ("x", "1")),
        (("0", "0"), ("x", "1")),
        (("x", "x"), ("y", "y")),
        (("x", "1"), ("x-x", "0")),
        (("f(x)", "x+1"), ("2f(x)", "x+1")),
        (("1", "1"), ("2", "2")),
        (("1", "2"), ("2", "4")),
    ],
)
def test_another_equation(one: tuple[str, str], other: tuple[str, str]) -> None:
    """What holds elsewhere, always or never is not the same equation."""
    assert not same_relation(one, other)
    assert not same_relation(other, one)


@pytest.mark.parametrize(
    ("latex", "value"),
    [
        (r"\sqrt{9}", "3"),
        ("2^{10}", "1024"),
        ("0.1+0.2", "3/10"),
        ("i^2", "-1"),
        (r"\binom{5}{2}", "10"),
        ("5!", "120"),
        (r"\lfloor 2.5\rfloor", "2"),
        (r"\frac{1}{3}+\frac{1}{6}", "1/2"),
        (r"\cos\pi", "-1"),
    ],
)
def test_the_value_of_a_rational_expression_is_exact(latex: str, value: str) -> None:
    """Calculations with integers, fractions and decimals are worked out."""
    assert value_of(latex) == Fraction(value)


@pytest.mark.parametrize("latex", ["x", "x-x", r"\sqrt{2}", r"\pi", r"\frac{1}{0}", r"\infty", "i", "(1,2)", "x=1"])
def test_other_expressions_have_no_rational_value(latex: str) -> None:
    """Neither variables nor irrational, complex or infinite values."""
    assert value_of(latex) is None


@pytest.mark.parametrize(
    ("latex", "decimal", "rounds"),
    [
        (r"\pi", "3.1416", True),
        (r"\pi", "3.14159", True),
        (r"\pi", "3.1415", False),
        ("e", "2.7183", True),
        (r"-\sqrt{2}", "-1.4142", True),
        (r"\sqrt{2}", "-1.4142", False),
        (r"\sqrt{2}", "1.4143", False),
        ("x", "1.4142", False),
        ("i", "1.0000", False),
        ("1+10^{-9}i", "1.0000", False),
        ("(1,2)", "1.4142", False),
    ],
)
def test_a_decimal_rounds_a_constant(latex: str, decimal: str, rounds: bool) -> None:
    """The last digit has to be the rounded one; what has variables or no real value is not rounded."""
    number = read_number(decimal)
    assert number
    assert rounds_to(latex, number) is rounds


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (r"|x|<1", "(-1,1)", True),
        (r"|x|<1", "(-1,2)", False),
        (r"\mathbb{R}\setminus\{3\}", r"(-\infty,3)\cup(3,\infty)", True),
        (r"(0,1)", "(0,2)", False),
    ],
)
def test_sets_and_relations(one: str, other: str, equal: bool) -> None:
    """Sets, intervals and inequalities are compared by math-verify, in both directions."""
    assert verified(one, other) is verified(other, one) is equal


@pytest.mark.parametrize("latex", ["", r"\frac{", "1 +", ")(", r"\begin{pmatrix}", "?", r"1\\2"])
def test_what_is_no_mathematics_cannot_be_read(latex: str) -> None:
    """It is told apart from what is merely different."""
    assert not is_readable(latex)
    for one, other in ((latex, "1"), ("1", latex)):
        with pytest.raises(UnreadableError):
            same_value(one, other)


@pytest.mark.parametrize("latex", ["x", "1+1", r"\frac{1}{0}", "(1,2)", "x=1", r"\pi r^2", r"30\degree"])
def test_mathematics_can_be_read(latex: str) -> None:
    """Also what has no value."""
    assert is_readable(latex)
