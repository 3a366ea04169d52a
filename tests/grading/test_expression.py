r"""How expressions are read: what an argument ends at, what is a product, and what is no expression."""

from fractions import Fraction

import pytest

from components.grading.expression import (
    Node,
    UnreadableError,
    exact_value,
    parse_expression,
    same_rational_function,
    variables,
)

READINGS = [
    # Arguments of functions.
    (r"\sin 2x\cos x", "*(sin(*(2, x)), cos(x))"),
    (r"\ln 2\cdot\ln 3", "*(ln(2), ln(3))"),
    (r"\sin x(1+x)", "*(sin(x), +(1, x))"),
    (r"\sin 2(x+1)", "sin(*(2, +(x, 1)))"),
    (r"\sin(x)^2", "^(sin(x), 2)"),
    (r"\sin^2 x", "^(sin(x), 2)"),
    (r"\sin^{-1} x", "arcsin(x)"),
    (r"\operatorname{arctan}(x)", "arctan(x)"),
    ("sin(x)", "sin(x)"),
    (r"\log_10 2", "log(2, 10)"),
    (r"\log_28", "log(8, 2)"),
    # Products and quotients.
    ("1/2x", "/(1, *(2, x))"),
    (r"2\frac{1}{2}x", "*(+(2, /(1, 2)), x)"),
    (r"\frac12", "/(1, 2)"),
    ("n(n+1)", "*(n, +(n, 1))"),
    (r"\left( 2 \right)\left( x+1 \right)", "*(2, +(x, 1))"),
    # Powers and roots.
    ("x^23", "^(x, 23)"),
    (r"\sqrt3", "root(3, 2)"),
    (r"\sqrt[3]{x}", "root(x, 3)"),
    # Names, and values of unknown functions.
    ("x_{12}", "x_12"),
    (r"\mathrm{x}", "x"),
    ("f(x+1)", "apply f(+(x, 1))"),
    ("P(2)", "apply P(2)"),
    ("C(5,2)", "apply C(5, 2)"),
    # Others.
    (r"\lvert x\rvert", "abs(x)"),
    (r"n \choose k", "binomial(n, k)"),
]
UNREADABLE = ["", "2 3", "x2", "x +", "(x", "x)", "2^2^2", "x = 1", "1,000"]
UNREADABLE += [r"\frac{1}", r"\sqrt10", r"\unknown x", r"\text{about} 5", r"\infty + 1"]
VALUES = [
    (r"2\frac{1}{2}", Fraction(5, 2)),
    ("6/2(1+2)", Fraction(1)),
    ("-2^2", Fraction(-4)),
    ("(-2)^2", Fraction(4)),
    ("2^{-1}", Fraction(1, 2)),
    ("--3", Fraction(3)),
    (r"0.1\overline{6}", Fraction(1, 6)),
    ("1/0", None),
    ("0^0", None),
    (r"\sqrt{4}", Fraction(2)),
    (r"\sqrt{5}", None),
    ("5!", Fraction(120)),
    ("2^{2^{100}}", None),
]
FUNCTIONS = [
    ("(x+1)^2", "x^2+2x+1", True),
    (r"\frac{x^2-1}{x-1}", "x+1", True),
    ("(x+1)^2", "x^2+1", False),
    ("x/y", "y/x", False),
    (r"\sin x", r"\sin x", None),
    ("2^x", "2^x", None),
]


def _shown(node: Node) -> str:
    """An expression with the operation before its operands, and without brackets that change nothing."""
    if node.operation in {"number", "name", "constant"}:
        return str(node.value)
    operands = ", ".join(map(_shown, node.operands))
    if node.operation == "group":
        return operands
    return f"apply {node.value}({operands})" if node.operation == "apply" else f"{node.operation}({operands})"


@pytest.mark.parametrize(("latex", "expected"), READINGS)
def test_an_expression_has_one_reading(latex: str, expected: str) -> None:
    """That of the module's rules, where TeX leaves a choice."""
    assert _shown(parse_expression(latex)) == expected


@pytest.mark.parametrize("latex", UNREADABLE)
def test_a_text_with_anything_else_in_it_is_not_read(latex: str) -> None:
    """Nothing is skipped."""
    with pytest.raises(UnreadableError):
        parse_expression(latex)


@pytest.mark.parametrize(("latex", "value"), VALUES)
def test_values_of_numbers_are_exact(latex: str, value: Fraction | None) -> None:
    """None for what is undefined, may be irrational, or is too large."""
    assert exact_value(parse_expression(latex)) == value


@pytest.mark.parametrize(("one", "other", "same"), FUNCTIONS)
def test_rational_functions_are_compared_for_all_values_of_their_variables(
    one: str, other: str, same: bool | None
) -> None:
    """None where either is another kind of function."""
    assert same_rational_function(parse_expression(one), parse_expression(other)) is same


def test_variables_are_names_and_values_of_unknown_functions() -> None:
    """But no constants, and not the function itself."""
    assert variables(parse_expression(r"2x + \pi y_1 + e")) == {"x", "y_1"}
    assert len(variables(parse_expression("f(2) + f(3) + f(2)"))) == 2
