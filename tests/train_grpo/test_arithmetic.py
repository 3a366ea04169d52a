import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.train_grpo.arithmetic import evaluate, is_arithmetic


def _tokens(text: str) -> list[str]:
    return re.findall(r"[\d.,]+|\S", text)


def _value(text: str) -> Fraction | None:
    found = evaluate(_tokens(text))
    assert found is not None
    return found.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("20-5-3", 12),  # from the left
        ("24/4/2", 3),
        ("24/4*2", 12),
        ("2^3^2", 512),  # from the right
        ("2*3^2", 18),
        ("-3^2", -9),
        ("(-3)^2", 9),
        ("2--3", 5),
        ("2*-3", -6),
        ("-2+5", 3),
        ("0^0", 1),
        ("1/3+1/6", Fraction(1, 2)),
        ("0.1+0.2", Fraction(3, 10)),
        (".25*4", 1),
        ("1,234,567+1", 1_234_568),
        ("1,000.5*2", 2001),
        ("50%*80", 40),
        ("12.5%", Fraction(1, 8)),
    ],
)
def test_value_is_exact_and_follows_precedence(text: str, value: Fraction | int) -> None:
    """Products before sums, powers before signs, equal ranks from the left; never a float."""
    assert _value(text) == value


@pytest.mark.parametrize("text", ["5/0", "5/(3-3)", "0/0", "2+3/0*4", "-(1/0)", "(1/0)^2"])
def test_a_quotient_by_zero_has_no_value(text: str) -> None:
    """It can be read, unlike what is no expression."""
    assert _value(text) is None


NO_EXPRESSIONS = "|+|5+|*5|+5|5 6|(5|5)|()|5(6)|5//6|5**6|5%%|%|x|5+x|1,00|12,34|007|1.2.3|3:4|2^0.5|2^-1|5 5%|="


@pytest.mark.parametrize("text", NO_EXPRESSIONS.split("|"))
def test_what_is_no_expression_has_no_reading(text: str) -> None:
    """Anything that is not read to its last token is refused as a whole."""
    assert evaluate(_tokens(text)) is None


@pytest.mark.parametrize("text", ["9^9^9^9", "((((9^99)^99)^99)^99)", "9^99999999", "(1/9)^99999", "(9^999*9^999)^2"])
def test_power_towers_are_refused(text: str) -> None:
    """A number of more bits than fit in a few lines is never made."""
    assert evaluate(_tokens(text)) is None


def test_long_expressions_are_refused() -> None:
    """Of tokens up to a hundred, side by side or inside one another; of digits up to twenty."""
    assert evaluate(["1" * 20]) is not None
    assert evaluate(["1" * 21]) is None
    assert evaluate(["0." + "3" * 21]) is None
    assert evaluate(_tokens("1+" * 49 + "11")) is not None
    assert evaluate(_tokens("1+" * 50 + "1")) is None
    assert evaluate(_tokens("(" * 49 + "1" + ")" * 49)) is not None
    assert evaluate(_tokens("(" * 50 + "1" + ")" * 50)) is None
    assert evaluate(["-"] * 99 + ["1"]) is not None


def test_operands_are_the_numbers_that_matter() -> None:
    """Sorted, without their signs, and without zeros and ones."""
    found = evaluate(_tokens("1*5+0-2/-3+5*50%"))
    assert found is not None
    assert found.operands == tuple(map(Fraction, (2, 3, 5, 5, 50)))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("3", 1),
        ("-3", 1),
        ("3.5", "0.1"),
        ("(3.50)", "0.01"),
        ("7%", "0.01"),
        ("7.5%", "0.001"),
        ("1,000.25", "0.01"),
        ("0.09999999999999998", "0.0000000001"),
        ("3.5+1", 0),
        ("1/2", 0),
        ("2^2", 0),
    ],
)
def test_the_last_place_of_a_lone_number(text: str, place: str | int) -> None:
    """At most ten decimals, beyond which a calculator's own errors begin; none for a calculation."""
    found = evaluate(_tokens(text))
    assert found is not None
    assert found.place == Fraction(place)
    assert found.calculates is (Fraction(place) == 0)


def test_tokens_of_expressions() -> None:
    """Numbers as people write them, operators, brackets and percent."""
    assert all(
        is_arithmetic(token) for token in ["5", "1,000", "0.5", ".5", "0", "+", "-", "*", "/", "^", "(", ")", "%"]
    )
    assert not any(is_arithmetic(token) for token in ["", "x", "5x", "05", "3:4", "1,2", "=", "{", "**", "<<"])


def _joined(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left, a), operator, (right, b) = parts
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else Fraction(0)}[operator]
    return f"({left}{operator}{right})", value


_numbers = st.integers(1, 999).map(lambda n: (str(n), Fraction(n)))
_trees = st.recursive(
    _numbers, lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(_joined), max_leaves=8
)


@given(_trees.filter(lambda tree: "/" not in tree[0]))
def test_any_bracketed_expression_has_the_value_of_its_tree(tree: tuple[str, Fraction]) -> None:
    """Whatever is nested in whatever."""
    text, value = tree
    assert _value(text) == value


@given(st.lists(st.integers(1, 99), min_size=2, max_size=6), st.data())
def test_unbracketed_expressions_have_the_value_that_python_gives_them(numbers: list[int], data: st.DataObject) -> None:
    """The precedence of + - * / is the usual one; fractions keep it exact."""
    operators = data.draw(st.lists(st.sampled_from("+-*/"), min_size=len(numbers) - 1, max_size=len(numbers) - 1))
    text = "".join(f"{number}{operator}" for number, operator in zip(numbers, [*operators, ""], strict=True))
    assert _value(text) == eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})
