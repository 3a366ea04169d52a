"""The parts, numbers and units that answers are made of. What they mean for verdicts is in answers.tsv."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.algebra import is_readable
from components.grading.parsing import as_interval, is_name, parse, parse_structure
from components.grading.quantities import parse_number, parse_number_in_words
from components.grading.verifier import Verdict, grade
from components.shared.answer_policy import AnswerPolicy
from tests.grading.tables import table
from tests.grading.test_answer import PIECES


@pytest.mark.parametrize(("latex", "kind", "signs", "parts"), table("structures.tsv"))
def test_an_answer_comes_apart_at_its_outermost_level(latex: str, kind: str, signs: str, parts: str) -> None:
    """The cases of structures.tsv."""
    structure = parse_structure(latex)
    assert (structure.kind, " ".join(structure.signs), " ¦ ".join(structure.parts)) == (kind, signs, parts)


@pytest.mark.parametrize(
    ("inequality", "name", "low", "high", "brackets"),
    [
        ("x>3", "x", "3", r"\infty", "()"),
        ("3<x", "x", "3", r"\infty", "()"),
        (r"x\ge3", "x", "3", r"\infty", "[)"),
        (r"3\le x", "x", "3", r"\infty", "[)"),
        ("x<3", "x", r"-\infty", "3", "()"),
        (r"x\le3", "x", r"-\infty", "3", "(]"),
        (r"3\ge x", "x", r"-\infty", "3", "(]"),
        (r"1<x\le2", "x", "1", "2", "(]"),
        (r"2>x\ge1", "x", "1", "2", "[)"),
        ("f(x)>0", "f(x)", "0", r"\infty", "()"),
    ],
)
def test_an_inequality_in_one_variable_is_an_interval(
    inequality: str, name: str, low: str, high: str, brackets: str
) -> None:
    """Whichever side the variable is on, with one end or two."""
    interval = as_interval(parse_structure(inequality))
    assert interval
    assert (interval[0], interval[1].parts, "".join(interval[1].signs)) == (name, (low, high), brackets)


@pytest.mark.parametrize("latex", ["1<x>2", "1>x<2", r"x\ne3", "|x|<1", "1<2", "1<x<y<2", "1<2x<3", "2<x=3"])
def test_other_inequalities_are_not_intervals(latex: str) -> None:
    """Opposite signs, several variables, and inequalities that are still to be solved."""
    assert as_interval(parse_structure(latex)) is None


def test_names_and_values() -> None:
    """Letters, functions, points and defined operations are names; numbers, constants and calculations are not."""
    names = [
        *[r"x", r"\alpha", r"x_1", r"f(x)", r"f'(x)", r"f^{-1}(x)", r"(x,y)", r"AB", r"\text{Area}"],
        r"\angle A",
        r"5\star 1",
    ]
    values = ["", "5", "2x", "x+1", "x^2", "e", "i", r"\pi", r"\infty", r"\sqrt{x}", "-x", "x/y"]
    assert [latex for latex in names if not is_name(latex)] == []
    assert [latex for latex in values if is_name(latex)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", ".", "1/0", "1//2", "1,23", "1,2345", ",123", "1 23", "12 34", r"\frac{1}{0}", r"1\frac{-1}{2}"),
        *("1.2.3", "1e", "e5", "1e5000", "x", "5x", "--5", "five six", "forty-two-one", "1/2/3", "0x10", "\u0665"),
    ],
)
def test_what_is_not_a_number_is_not_read_as_one(text: str) -> None:
    """Separators in the wrong places, division by zero, and digits of other scripts."""
    assert parse_number(text) is None


@given(st.integers(-10_000, 10_000), st.integers(1, 10_000))
def test_a_fraction_is_read_back(numerator: int, denominator: int) -> None:
    """In every notation, exactly."""
    value = Fraction(numerator, denominator)
    for text in (f"{numerator}/{denominator}", rf"\frac{{{numerator}}}{{{denominator}}}", str(value)):
        number = parse_number(text)
        assert number
        assert number.value == value


@pytest.mark.parametrize("latex", ["", "   ", r"\frac{", "(1,2", ")(", r"\text{", r"1\\2"])
def test_what_is_not_mathematics_cannot_be_read(latex: str) -> None:
    """Unbalanced and empty texts."""
    assert not is_readable(latex)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text("12xy(),;[]{}\\&=<>|andor ") | st.text())
def test_any_text_can_be_parsed(written: str) -> None:
    r"""Nothing raises; spaces around an answer change nothing, and (but for `\pm`) no part is longer than the whole."""
    assert parse(f" {written} ") == parse(written)
    latex = parse(written).latex
    assert latex == latex.strip()
    assert r"\pm" in latex or all(len(part) <= len(latex) for part in parse_structure(latex).parts)


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "10^{10^{10}}"])
def test_a_number_that_is_too_large_to_compute_is_refused_before_it_is_computed(answer: str) -> None:
    """In this process, where nothing would end the computation."""
    assert grade("x^2+1", rf"\boxed{{{answer}}}", AnswerPolicy.BOXED).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("words", "value"),
    [
        *(
            ("twenty-three", "23"),
            ("a hundred and one", "101"),
            ("two million five hundred thousand and six", "2500006"),
        ),
        *(
            ("thirteen hundred", "1300"),
            ("minus forty two", "-42"),
            ("zero", "0"),
            ("half a dozen", "6"),
            ("2 dozen", "24"),
        ),
        *(
            ("three-fourths", "3/4"),
            ("two and a half million", "2500000"),
            ("point two five", "1/4"),
            ("3 tenths", "3/10"),
        ),
        *(
            ("5 hundred thousand", "500000"),
            ("minus 5", "-5"),
            ("a", ""),
            ("two-three", ""),
            ("twenty-ten", ""),
            ("-five", ""),
        ),
        *(
            ("one hundred hundred", ""),
            ("two million and six thousand", ""),
            ("three hundred thousandths", ""),
            ("and", ""),
        ),
        *(
            ("five - three", ""),
            ("two and five halves", ""),
            ("minus", ""),
            ("negative negative five", ""),
            ("five half", ""),
        ),
    ],
)
def test_numbers_in_words_are_read_whole_or_not_at_all(words: str, value: str) -> None:
    """Their words stand in order; anything else is no number."""
    number = parse_number_in_words(words)
    assert (str(number.value) if number else "") == value
