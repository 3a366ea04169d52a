"""The rules of the comparison, each with what it allows and what it does not."""

from contextlib import suppress

import pytest

from components.grading.comparison import compare
from components.grading.decision import RefusedError, UnreadableGoldError


def same(one: str, other: str) -> bool:
    """Whether two answers are equal, whichever is expected."""
    there, back = compare(one, other), compare(other, one)
    assert there.equal is back.equal
    assert there.reason
    return there.equal


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        # order and brackets
        ("1, 2", "2, 1", True),
        (r"\{1,2\}", "2, 1", True),
        (r"\{1,1,2\}", r"\{1,2\}", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "1,2", True),
        ("(1,2)", "2,1", False),
        ("(1,2)", "[1,2]", False),
        ("(1,2)", r"\{1,2\}", False),
        (r"\{5\}", "5", True),
        (r"\{\emptyset\}", r"\emptyset", False),
        ("1, 2", "1", False),
        ("1, 234", "1234", False),
        ("1, 234", "234, 1", True),
        ("12 cm and 5 cm", "5, 12", True),
        ("(1,2), (3,4)", "(3,4), (1,2)", True),
        ("(1,2), (3,4)", "(2,1), (4,3)", False),
        (r"[0,1]\cup[2,3]", r"[2,3]\cup[0,1]", True),
        (r"[0,1]\cup[2,3]", r"[0,1)\cup[2,3]", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1.0\\2\end{bmatrix}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
        (r"1\pm\sqrt2", r"1-\sqrt2, 1+\sqrt2", True),
        (r"1\pm\sqrt2", r"1+\sqrt2", False),
        # units
        ("5 m", "5", True),
        ("5 m", "500 cm", True),
        ("5 m", "5 cm", False),
        ("5 m", "5 s", False),
        ("5 m^2", "5 m", False),
        (r"\frac{1}{2}\text{ hour}", "30 minutes", True),
        (r"\sqrt{2}\text{ m}", r"100\sqrt{2}\text{ cm}", True),
        (r"10\text{ cm}", r"\sqrt{100}\text{ m}", False),
        (r"x=10\text{ cm}", r"100\text{ mm}", True),
        (r"x=10\text{ cm}", r"10\text{ m}", False),
        (r"\$1.50", "150 cents", True),
        (r"\$5", "€5", False),
        ("5 apples", "5 pears", False),
        ("4:30 p.m.", "4:30", True),
        ("4:30 p.m.", "4:30 a.m.", False),
        # percent and angles
        (r"25\%", "25", True),
        (r"25\%", "0.25", True),
        (r"25\%", r"\frac{1}{4}", True),
        (r"25\%", r"\sqrt{\frac{1}{16}}", True),
        (r"33.3\%", r"\frac{1}{3}", True),
        (r"25\%", "2500", False),
        (r"25\%", "0.0025", False),
        (r"25\%", r"0.25\%", False),
        (r"35.0\%", "35", True),
        (r"x\%", r"\frac{x}{100}", True),
        (r"60^\circ", "60", True),
        (r"60^\circ", r"\frac{\pi}{3}", True),
        (r"60^\circ", r"\frac{\pi}{6}", False),
        (r"60^\circ", r"\frac{\pi}{3}\text{ radians}", True),
        (r"60^\circ", r"60\text{ radians}", False),
        (r"\frac{\pi}{3}^\circ", r"\frac{\pi}{3}", False),
        (r"25\%", r"25^\circ", False),
        # decimals
        (r"\frac{1}{3}", "0.333", True),
        (r"\frac{1}{3}", "0.33", False),
        (r"\frac{1}{8}", "0.125", True),
        (r"\frac{1}{8}", "0.13", False),
        ("0.333", "0.3333", False),
        ("0.333, 0.3333", r"\frac{1}{3}, \frac{1}{2}", False),
        (r"\sqrt{2}", "1.4142", True),
        (r"\sqrt{2}", "1.414", False),
        (r"\sqrt{2}", "1.4143", False),
        (r"\pi", "3.1416", True),
        (r"\pi", "3.14", False),
        (r"\frac{22}{7}", "3.143", True),
        (r"\frac{22}{7}", r"\pi", False),
        (r"\sqrt{\frac{1}{64}}", "0.125", True),
        (r"\sqrt{\frac{1}{64}}", "0.13", False),
        ("3", "3.0", True),
        # words
        ("no", "on", False),
        ("red, blue", "blue, red", True),
        (r"\text{Monday}", "Monday.", True),
        ("12", "twelve", True),
        ("5", "five million", False),
        # algebra
        ("2x+2", "2(x+1)", True),
        ("2x+2", "2x", False),
        ("5", "x", False),
        (r"\emptyset", "0", False),
        (r"\mathbb{R}", r"(-\infty,\infty)", True),
        ("5", "(5,6)", False),
        (r"\sqrt{2}", r"(\sqrt{2},1)", False),
        (r"(0,1)\cup(1,2)", "5", False),
        ("1", r"\infty", False),
    ],
)
def test_two_answers(one: str, other: str, equal: bool) -> None:
    """Each rule holds whichever of the two answers is expected."""
    assert same(one, other) is equal


@pytest.mark.parametrize("gold", ["", "  ", "$", r"\frac{", r"1,\frac{", r"\{1, \frac{\}", r"x=\frac{", ")("])
def test_an_expected_answer_that_says_nothing_is_told_apart(gold: str) -> None:
    """No given answer is blamed for it, also where only a part of it cannot be read."""
    for answer in ("5", ""):
        with pytest.raises(UnreadableGoldError):
            compare(gold, answer)


@pytest.mark.parametrize(
    "gold", ["5", "(1,2)", r"\{1,2\}", r"\text{Evelyn}", "52_8", "3:4", "x=5", "x^2+y^2=1", "x>3", r"(1,2)\cup(3,4)"]
)
@pytest.mark.parametrize(
    "answer",
    ["", r"\frac{", ")(", r"\frac{0}{0}", r"1,\ldots,5", r"(1,\frac{", "=", "x<i", "(1,i)", "(y,x)=(2,1)", ","],
)
def test_a_given_answer_that_says_nothing_is_wrong(gold: str, answer: str) -> None:
    """It cannot make the expected answer look unreadable."""
    with suppress(RefusedError):
        assert not compare(gold, answer).equal


@pytest.mark.parametrize("answer", [r"\boxed{5}", "{5}", "5.", "**5**", r"\text{five}"])
def test_an_answer_equals_its_other_spellings(answer: str) -> None:
    """Wrapped or spelt out."""
    assert same("5", answer)


def test_what_is_refused_may_still_be_expected() -> None:
    """Only a given answer is refused, and never one that is written as expected."""
    assert compare(r"\sum_{k=1}^n k", r"\sum_{k=1}^{n}k").equal
    assert compare(r"\sum_{k=1}^3 k", "6").equal
    with pytest.raises(RefusedError):
        compare("6", r"\sum_{k=1}^3 k")
