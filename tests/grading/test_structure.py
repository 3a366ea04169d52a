"""The outermost level of an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.structure import Kind, as_interval, is_name, structure

ROUND, SQUARE = ("(", ")"), ("[", "]")


@pytest.mark.parametrize(
    ("latex", "kind", "parts"),
    [
        ("5", Kind.EXPRESSION, ("5",)),
        ("(1+2)", Kind.EXPRESSION, ("1+2",)),
        ("[5]", Kind.EXPRESSION, ("5",)),
        ("(5]", Kind.EXPRESSION, ("(5]",)),
        ("{{x}}", Kind.EXPRESSION, ("x",)),
        ("(1)+(2)", Kind.EXPRESSION, ("(1)+(2)",)),
        ("(1,2)+(3,4)", Kind.EXPRESSION, ("(1,2)+(3,4)",)),
        (r"\frac{a,b}{c}", Kind.EXPRESSION, (r"\frac{a,b}{c}",)),
        (r"\lfloor 1,2\rfloor", Kind.EXPRESSION, (r"\lfloor 1,2\rfloor",)),
        ("Orlando", Kind.EXPRESSION, ("Orlando",)),
        ("(1,2", Kind.EXPRESSION, ("(1,2",)),
        ("", Kind.EXPRESSION, ("",)),
        ("1, 2", Kind.LIST, ("1", "2")),
        ("1,2,", Kind.LIST, ("1", "2")),
        ("1; 2", Kind.LIST, ("1", "2")),
        ("1,5; 2,5", Kind.LIST, ("1,5", "2,5")),
        ("1, 2 and 3", Kind.LIST, ("1", "2", "3")),
        ("1, 2, and 3", Kind.LIST, ("1", "2", "3")),
        (r"1\text{ or }2", Kind.LIST, ("1", "2")),
        ("{1,2}", Kind.LIST, ("1", "2")),
        ("(1,2),(3,4)", Kind.LIST, ("(1,2)", "(3,4)")),
        ("f(1,2), 3", Kind.LIST, ("f(1,2)", "3")),
        ("x=1,y=2 and x=3,y=4", Kind.LIST, ("x=1,y=2", "x=3,y=4")),
        ("x=1,y=2 and z=3", Kind.LIST, ("x=1", "y=2", "z=3")),
        ("1,2 and 3,4", Kind.LIST, ("1", "2", "3", "4")),
        (r"x<2 \lor x>5", Kind.LIST, ("x<2", "x>5")),
        (r"1\pm2", Kind.LIST, ("1+2", "1-2")),
        (r"\pm2", Kind.LIST, ("2", "-2")),
        (r"a\pm b\mp c", Kind.LIST, ("a+ b- c", "a- b+ c")),
        (r"\{1,2\}", Kind.SET, ("1", "2")),
        (r"\{5\}", Kind.SET, ("5",)),
        (r"\{(1,2),(3,4)\}", Kind.SET, ("(1,2)", "(3,4)")),
        (r"\{x\mid x>2\}", Kind.INEQUALITY, ("x", "2")),
        (r"\{x\in\mathbb{R}: 1<x<2\}", Kind.INEQUALITY, ("1", "x", "2")),
        ("(1,2)", Kind.TUPLE, ("1", "2")),
        ("((1,2))", Kind.TUPLE, ("1", "2")),
        ("(1;2)", Kind.TUPLE, ("1", "2")),
        ("(1,5;2,5)", Kind.TUPLE, ("1,5", "2,5")),
        ("((1,2),3)", Kind.TUPLE, ("(1,2)", "3")),
        (r"\langle 1,2\rangle", Kind.TUPLE, ("1", "2")),
        (r"(-\infty,1)\cup[2,3]", Kind.UNION, (r"(-\infty,1)", "[2,3]")),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", Kind.MATRIX, ("1&2", "3&4")),
        (r"\begin{bmatrix}1\\2\\\end{bmatrix}", Kind.MATRIX, ("1", "2")),
        (r"[\begin{array}{c|c}1&2\end{array}]", Kind.MATRIX, ("1&2",)),
        ("[[1,2],[3,4]]", Kind.MATRIX, ("1&2", "3&4")),
        (r"3\begin{pmatrix}1\\2\end{pmatrix}", Kind.EXPRESSION, (r"3\begin{pmatrix}1\\2\end{pmatrix}",)),
        ("x=5", Kind.EQUATION, ("x", "5")),
        ("x=2+3=5", Kind.EQUATION, ("x", "2+3", "5")),
        ("(x,y)=(1,2)", Kind.EQUATION, ("(x,y)", "(1,2)")),
        (r"x\in[1,2]", Kind.EQUATION, ("x", "[1,2]")),
        (r"x\approx 5", Kind.EQUATION, ("x", "5")),
        (r"\sum_{k=1}^n k", Kind.EXPRESSION, (r"\sum_{k=1}^n k",)),
        ("x<5", Kind.INEQUALITY, ("x", "5")),
        (r"1<x\le2", Kind.INEQUALITY, ("1", "x", "2")),
        (r"x\ne5", Kind.INEQUALITY, ("x", "5")),
        ("x=y<5", Kind.INEQUALITY, ("x", "y", "5")),
    ],
)
def test_an_answer_is_taken_apart_at_its_outermost_level(latex: str, kind: Kind, parts: tuple[str, ...]) -> None:
    """Only what no bracket encloses separates the parts."""
    found = structure(latex)
    assert (found.kind, found.parts) == (kind, parts)


@pytest.mark.parametrize(
    ("latex", "signs"),
    [
        ("(1,2)", ROUND),
        ("[1,2)", ("[", ")")),
        ("(1,2]", ("(", "]")),
        (r"\langle 1,2\rangle", ROUND),
        (r"1<x\le2", ("<", "<=")),
        (r"x\ge 2", (">=",)),
        (r"x\ne2", ("!=",)),
        (r"x=1\approx2", ("=", "~")),
        (r"x\equiv1", ("==",)),
        ("1,2", ()),
    ],
)
def test_brackets_and_relations_are_kept(latex: str, signs: tuple[str, ...]) -> None:
    """What kind of bracket or relation stands where is part of the answer."""
    assert structure(latex).signs == signs


@pytest.mark.parametrize(
    ("inequality", "name", "ends", "brackets"),
    [
        ("x>3", "x", ("3", r"\infty"), ROUND),
        ("3<x", "x", ("3", r"\infty"), ROUND),
        (r"x\ge3", "x", ("3", r"\infty"), ("[", ")")),
        (r"3\le x", "x", ("3", r"\infty"), ("[", ")")),
        ("x<3", "x", (r"-\infty", "3"), ROUND),
        (r"x\le3", "x", (r"-\infty", "3"), ("(", "]")),
        (r"3\ge x", "x", (r"-\infty", "3"), ("(", "]")),
        (r"1<x\le2", "x", ("1", "2"), ("(", "]")),
        (r"2>x\ge1", "x", ("1", "2"), ("[", ")")),
        ("f(x)>0", "f(x)", ("0", r"\infty"), ROUND),
    ],
)
def test_an_inequality_in_one_variable_is_an_interval(
    inequality: str, name: str, ends: tuple[str, str], brackets: tuple[str, str]
) -> None:
    """Whichever side the variable stands on, and however many ends are given."""
    found = as_interval(structure(inequality))
    assert found
    assert (found[0], found[1].parts, found[1].signs) == (name, ends, brackets)


@pytest.mark.parametrize("latex", ["1<x>2", "1>x<2", r"x\ne3", "|x|<1", "1<2", "1<x<y<2", "1<2x<3", "2<x=3"])
def test_other_inequalities_are_no_interval(latex: str) -> None:
    """Opposite signs, several variables and what is still to be solved describe no interval."""
    assert as_interval(structure(latex)) is None


@pytest.mark.parametrize(
    "latex",
    ["x", r"\alpha", "x_1", "f(x)", "f'(x)", "f^{-1}(x)", "(x,y)", r"\angle A", "AB", r"5\star 1", r"\text{Area}"],
)
def test_names(latex: str) -> None:
    """Letters, functions, points and defined operations name something."""
    assert is_name(latex)


@pytest.mark.parametrize("latex", ["", "5", "2x", "x+1", "x^2", "e", "i", r"\pi", r"\infty", r"\sqrt{x}", "-x", "x/y"])
def test_values_are_no_names(latex: str) -> None:
    """A number, a constant or a calculation is a value."""
    assert not is_name(latex)


@given(st.text("12xy(),;[]{}\\&=<>|andor ") | st.text())
def test_any_text_has_a_structure_with_parts_of_it(latex: str) -> None:
    r"""Nothing raises, and no part is longer than the whole (but for those of `\pm`, which are not drawn here)."""
    assert all(len(part) <= len(latex) for part in structure(latex).parts)
