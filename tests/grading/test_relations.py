"""Equations and inequalities, and the values and intervals that they describe."""

import pytest

from components.grading.comparison import compare
from components.grading.decision import RefusedError


def same(one: str, other: str) -> bool:
    """Whether two answers are equal, whichever is expected."""
    there = compare(one, other).equal
    assert there is compare(other, one).equal
    return bool(there)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        # an equation gives a name its value
        ("x=5", "5", True),
        ("x=5", "6", False),
        ("x=5", "x=5.0", True),
        ("x=5", "y=5", False),
        ("x_1=5", "x=5", True),
        ("a_1=5", "a_2=5", False),
        ("f(x)=2x", "2x", True),
        ("f(x)=2x", "y=2x", True),
        ("f(t)=2t", "y=2t", False),
        ("f(x)=2x", "g(x)=2x", False),
        (r"\angle ABC=60^\circ", "60", True),
        ("(x,y)=(1,2)", "(1,2)", True),
        (r"x\in[1,2]", "[1,2]", True),
        (r"x \in \{1,2\}", "2,1", True),
        ("e=5", "5", False),
        ("2x=6", "3", False),
        # in its unit
        (r"x=5\text{ cm}", "5", True),
        (r"x=5\text{ cm}", r"5\text{ cm}", True),
        # a chain is worth its last side
        ("x=2+3=5", "5", True),
        ("x=2+3=5", "x=5", True),
        ("2+3=5", "5", True),
        (r"\frac{10}{4}=\frac{5}{2}=2.5", "2.5", True),
        (r"x=\frac{1}{3}\approx0.3", r"\frac{1}{3}", True),
        (r"x=\frac{1}{3}\approx0.3", "0.3", False),
        (r"x\approx0.3", "0.3", True),
        # two equations
        ("y=2x+1", "2x-y+1=0", True),
        ("y=2x+1", "y-1=2x", True),
        ("y=2x+1", "x=2y+1", False),
        ("y=2x+1", "y=2x-1", False),
        ("xy=6", r"y=\frac{6}{x}", True),
        ("xy=6", r"y=\frac{x}{6}", False),
        ("x=3", "2x=6", False),
        ("x=3", "x-3=1", False),
        ("x=y=1", "y=x=2", False),
        # an inequality in one variable is an interval
        ("x>3", r"(3,\infty)", True),
        ("x>3", "3<x", True),
        ("x>3", r"x\ge 3", False),
        ("x>3", "y>3", False),
        ("x>3", "3", False),
        ("x>3", r"(-\infty,3)", False),
        ("x>3", "x<3", False),
        (r"1<x\le 2", "(1,2]", True),
        (r"1<x\le 2", "(1,2)", False),
        (r"1<x\le 2", "x>1", False),
        (r"x<1\text{ or }x>2", r"(2,\infty)\cup(-\infty,1)", True),
        (r"x<1\text{ or }x>2", r"(1,2)", False),
        (r"x<1\text{ or }x>2", r"x>2\text{ or }x<1", True),
        (r"x<1\text{ or }x>2", r"x<1\text{ and }x>2", False),
        (r"x^2+y^2=1", "x^2+y=(1,2)", False),
        ("|x|<1", "(-1,1)", True),
        (r"(3,\infty)", "2x>6", False),
        (r"x\ne 3", r"(-\infty,3)\cup(3,\infty)", True),
        (r"x\ne 3", "x=3", False),
        (r"x\ne 3", "3", False),
    ],
)
def test_relations_and_what_they_describe(one: str, other: str, equal: bool) -> None:
    """A value has to be given to its name, and what is still to be solved is no value."""
    assert same(one, other) is equal


@pytest.mark.parametrize("answer", ["3=2", "x=1=2", "0=1=2=3=4=5", "5=5", r"1+1=3", r"\frac{1}{2}=0.4", "x=5=y=6"])
def test_a_false_chain_is_refused(answer: str) -> None:
    """Different numbers in one chain are guesses, and a number that is itself says nothing."""
    for gold in ("2", "5", "x"):
        with pytest.raises(RefusedError):
            compare(gold, answer)
