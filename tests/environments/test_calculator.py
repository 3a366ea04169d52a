from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.environments.calculator import Calculator, format_number, value_of
from components.environments.environment import Observation
from components.shared.tools import NEXT_ANSWER, ToolsConfig
from tests import tiny


def _calculator(call_format: str | None = "fenced", **arguments: object) -> Calculator:
    values = {"environment": "calculator", "call_format": call_format, "arguments": arguments}
    calculator = Calculator(ToolsConfig.model_validate(values))
    calculator.reset(tiny.PROBLEMS[0])
    return calculator


def _computed(expression: str) -> str:
    return _calculator().step(f"```calculator\n{expression}\n```\n").text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*48", "1776"),
        (" ( 1 + 2 ) * 3 - -4 ", "13"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("2**-1", "0.5"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("1/10**20", "1e-20"),
        ("(-1)**1000000001", "-1"),
        ("1+1\n\n2*3", "2\n6"),
        ("007 + 1.", "8"),
        ("(" * 40 + "1" + ")" * 40, "1"),
        ("-" * 400 + "1", "1"),
    ],
)
def test_an_expression_has_its_exact_value(expression: str, value: str) -> None:
    """As text; a long fraction is rounded to its last decimal."""
    assert _computed(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1/0", "division by zero"),
        ("2**0.5", "an exponent has to be a whole number"),
        ("9**9**9", "the number is too large"),
        ("*".join(["9999999999"] * 45), ""),
        ("(10**1000)*(10**1000)*(10**1000)*(10**1000)", "the number is too large"),
        ("1+", '"1+" cannot be read; accepted: numbers, + - * / // % ** and parentheses'),
        ("1e9", '"1e9" cannot be read'),
        ("__import__('os')", "\"__import__('os')\" cannot be read"),
        ("", "there are 0 lines; accepted: 1 to 20"),
        ("1\n" * 21, "there are 21 lines"),
        ("1+" * 300 + "1", "the expression is longer than 500 characters"),
        ("(" * 200 + "1", '"((((((((((((((((((((" cannot be read'),
    ],
)
def test_what_has_no_value_says_why(expression: str, error: str) -> None:
    """In words for the model."""
    text = _computed(expression)
    assert text.startswith(f"Error: {error}") == bool(error)


_SUMS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map("(%s%s%s)".__mod__),
    max_leaves=8,
)


@given(_SUMS)
def test_whole_numbers_have_the_value_that_python_gives_them(expression: str) -> None:
    """But for division by zero, which has none."""
    with suppress(ZeroDivisionError):
        assert Fraction(eval(expression)) == value_of(expression)


@given(st.fractions(max_denominator=10**6), st.integers(0, 12))
def test_a_number_is_written_to_its_last_decimal(value: Fraction, decimals: int) -> None:
    """No further from it than half of that."""
    assert abs(Fraction(format_number(value, decimals)) - value) <= Fraction(1, 2 * 10**decimals)


def test_calls_are_counted() -> None:
    """A new trajectory has all of them again. A call of another tool, or none at all, is not one."""
    calculator = _calculator(max_calls=1, decimals=2)
    for _ in range(2):
        calculator.reset(tiny.PROBLEMS[0])
        assert calculator.step("```python\n1\n```\n").text == 'There is no tool "python"; the tool is "calculator".'
        assert calculator.step("```\n1\n```\n").text.startswith("A block that calls a tool begins with")
        assert calculator.step("```calculator\n2/3\n```\n").text == "0.67"
        assert calculator.step("```calculator\n2/3\n```\n").text == "No calls are left; give the answer."
        assert calculator.step("#### 1776") == Observation(done=True)


def test_several_calls_are_answered_in_their_order() -> None:
    """Those that cannot be read or are too many as well, each with its reason; a turn with them is not the last."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
    nameless = call.replace("expression", "x") % "1"
    assert _calculator("tool_call").step(nameless).text.endswith('takes one argument, the text "expression".')
    turn = "\n".join(call % expression for expression in ("1+1", "1/0", '"', "6*7", "2+2"))
    first, second, third, *others = _calculator("tool_call", max_calls=3).step(turn).text.split(NEXT_ANSWER)
    assert (first, second) == ("2", "Error: division by zero")
    assert third.startswith("The call is not valid JSON")
    assert others == ["42", "No calls are left; give the answer."]
