"""Lists, sets, tuples and matrices, part by part."""

import pytest

from components.grading.parts import assignment, letter_of, same_elements, same_values
from components.grading.structure import structure


def equal(one: str, other: str) -> bool:
    """Equality of parts that is enough here: of what is left without spaces and a sign."""
    return one.replace(" ", "").lstrip("+") == other.replace(" ", "").lstrip("+")


def values(one: str, other: str) -> bool:
    """Whether two lists are equal, whichever comes first."""
    first, second = structure(one).parts, structure(other).parts
    there = same_values(first, second, equal).equal
    assert there is same_values(second, first, equal).equal
    return there


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,2,3", "3,1,2", True),
        ("1,2,3", "1,2", False),
        ("1,2", "1,3", False),
        ("1,1,2", "1,2", True),
        ("1,1,2", "1,2,2", True),
        ("1,+1", "1,1", True),
        ("1,+1,2", "1,2,3", False),
        ("x=1,x=2", "2,1", True),
        ("x=1,x=2", "x=2,x=1", True),
        ("x_1=1,x_2=2", "2,1", True),
        ("x=1,2", "2,1", True),
        ("x=1,y=2", "y=2,x=1", True),
        ("x=1,y=2", "x=2,y=1", False),
        ("x=1,y=2", "1,2", True),
        ("x=1,y=2", "2,1", False),
        ("x=1,y=2", "1,2,3", False),
        ("x=1,y=2", "a=1,b=2", False),
        (r"\pm2, 3", "2, -2, 3", True),
        (r"\pm2, 3", "2, 3", False),
    ],
)
def test_values_come_in_any_order_unless_they_are_named(one: str, other: str, same: bool) -> None:
    """Saying a value twice adds nothing; a value belongs to its name, and without names to its place."""
    assert values(one, other) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("(1,2)", "(1,2)", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "(1,2,3)", False),
        ("(1,2)", "(1,2]", False),
        ("[1,2]", "[1, +2]", True),
        ("(1,2)", "1,2", True),
        ("(1,2)", "2,1", False),
        ("(x=1,y=2)", "(1,2)", True),
        (r"\langle 1,2\rangle", "(1,2)", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "[1,2)", False),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2,3,4)", False),
        ("(1,2]", "1,2", False),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", False),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
        (r"\begin{pmatrix}1&2&3&4\\5&6&7&8\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\\5&6\\7&8\end{pmatrix}", False),
    ],
)
def test_elements_come_in_their_order_within_their_brackets(one: str, other: str, same: bool) -> None:
    """Place, number, brackets and rows count; whether a vector is written as a column or a tuple does not."""
    first, second = structure(one), structure(other)
    assert same_elements(first, second, equal).equal is same_elements(second, first, equal).equal is same


def test_a_list_of_many_values_needs_few_comparisons() -> None:
    """What is written in the same way is found without asking, as asking may mean algebra."""
    asked = []

    def ask(one: str, other: str) -> bool:
        asked.append((one, other))
        return False

    names = [f"a^{number}" for number in range(10)]
    assert same_values(names, names[::-1], ask).equal
    assert len(asked) <= 10 * 9  # each side once, for values that are there twice


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("x=5", ("x", "5")),
        ("x_1=5", ("x", "5")),
        ("f(x)=2x", ("f", "2x")),
        ("x=2+3=5", ("x", "5")),
        ("5", ("", "5")),
        ("2x=6", ("", "2x=6")),
        (r"x\in A", ("x", "A")),
        ("x<5", ("", "x<5")),
        ("3=x", ("", "3=x")),
    ],
)
def test_a_part_may_give_a_name_its_value(part: str, found: tuple[str, str]) -> None:
    """Only an equation that begins with a name assigns a value."""
    assert assignment(part) == found


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        ("x", "x"),
        ("x_1", "x"),
        ("x_{12}", "x"),
        ("a_1", "a_1"),
        ("f(x)", "f"),
        ("P (A)", "P"),
        ("(x, y)", "(x,y)"),
        (r"\text{Area}", "Area"),
        (r"\angle A", r"\angleA"),
    ],
)
def test_a_name_without_index_and_argument(name: str, letter: str) -> None:
    """Roots of one equation share their letter, and a function is called by its own."""
    assert letter_of(name) == letter
