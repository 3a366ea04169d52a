"""Answers that are words, choices, ratios, times or digits in another base."""

import pytest

from components.grading.decision import RefusedError
from components.grading.spelling import read
from components.grading.wording import decide_by_wording, is_wording


def decided(one: str, other: str) -> bool | None:
    """What the words of two answers decide; the same both ways."""
    there, back = (decide_by_wording(read(first), read(second)) for first, second in ((one, other), (other, one)))
    assert (there and there.equal) is (back and back.equal)
    return there.equal if there else None


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        # choices
        ("D", "(D) Alina", True),
        ("D", "D. Alina", True),
        ("D", "(C) Alina", False),
        ("D", "D) 5", True),
        # words
        ("Evelyn", "evelyn", True),
        ("no", "No", True),
        ("no", "on", False),
        ("Evelyn", "Carla", False),
        (r"\text{the circle}", "Circle", True),
        (r"\text{an ellipse}", "a ellipse", True),
        ("red circle", r"\text{Red} \text{ circle}", True),
        ("circle", "semicircle", False),
        ("thecircle", "circle", False),
        ("over 9", "over 8", False),
        ("route 1.5", "Route 15", False),
        ("D", "(D) or (C)", False),
        ("Evelyn", "x^2", False),
        ("5", "five million", False),
        ("AB", "BA", False),
        ("AB", "AB", True),
        # digits in a base
        ("52_8", "52", False),
        ("52_8", "42", False),
        ("52_8", "52_9", False),
        ("BEEF_{16}", "BEEF", False),
        # ratios and times
        ("3:4", "3/4", True),
        ("3:4", "0.75", True),
        ("3:4", "4/3", False),
        ("3:4", "6:8", False),
        ("12:00", "1:00", False),
        ("1:2:3", "6", False),
        ("1:2:3", "1/2", False),
        ("1:2:3", "1:3:2", False),
    ],
)
def test_words_decide(one: str, other: str, equal: bool) -> None:
    """Words are compared letter by letter, a choice by its letter, digits and ratios as they stand."""
    assert decided(one, other) is equal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2x", "x+x"),
        (r"\sin x", r"\cos x"),
        (r"\sqrt{2}", r"\max(1,2)"),
        ("x", "y"),
        ("xy", "2y"),
        ("x", "AB"),
        ("3:0", "3"),
        ("eleven", "y"),
        ("sin x", "y"),
        (r"\begin{pmatrix}1\end{pmatrix}", "1"),
        ("red, blue", "blue, red"),
    ],
)
def test_mathematics_is_left_to_others(one: str, other: str) -> None:
    """Functions and commands are no words, and lists of words are compared part by part."""
    assert decided(one, other) is None


@pytest.mark.parametrize("answer", ["5 (or 6)", r"\frac{1 or 2}{3}", r"5 \text{(or 6)}", "5 OR"])
def test_an_alternative_is_refused(answer: str) -> None:
    """One value or another one, where it cannot be read as a list of both, is no answer."""
    with pytest.raises(RefusedError):
        decide_by_wording(read("x"), read(answer))


@pytest.mark.parametrize("answer", ["Evelyn", "52_8", "3:4", "12:30", "no", "AB", r"\text{not defined}"])
def test_wording(answer: str) -> None:
    """These say something although no reader of mathematics understands them."""
    assert is_wording(read(answer))


@pytest.mark.parametrize("answer", ["5", "x", "2x", r"\sin x", r"\frac{1}{2}", r"\arctan 2", "x_1", "(1,2)"])
def test_mathematics(answer: str) -> None:
    """Numbers, also in words, functions and commands are mathematics."""
    assert not is_wording(read(answer))
