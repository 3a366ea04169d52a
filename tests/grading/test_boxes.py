"""Reading boxed answers, with the ways in which MATH and models write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.answer import find_boxes, last_boxed
from tests.processor_time import processor_time


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so $x = \boxed{2}$.", "2"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed{\left\{1, 2\right.}$", r"\left\{1, 2\right."),
        (r"our answer is $\boxed 2$.", "2"),
        (r"our answer is \boxed 25, then", "25"),
        (r"$\boxed\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        ("\\boxed\n{4}", "4"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{\boxed{\fbox{6}}}", "6"),
        (r"\boxed{\fbox{A} and \fbox{B}}", r"\fbox{A} and \fbox{B}"),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_is_read_whole(text: str, boxed: str) -> None:
    """Braces are balanced, escaped braces are text, and a box that only wraps another one is transparent."""
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, 3"),
        (r"\(\boxed{1}\) \(\boxed{2}\)", "1, 2"),
        (r"\boxed{x = 1}, and with it \boxed{y = 2}", "x = 1, y = 2"),
        (r"\boxed{1},\! \boxed{2}", "1, 2"),
        (r"\boxed 1, \boxed 2", "1, 2"),
        (r"\boxed{1} and \boxed{1}", "1"),
        (r"\boxed{0}. So \boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{1}. Wait, \boxed{2}", "2"),
        (r"\boxed{1}? No, \boxed{2}", "2"),
        (r"\boxed{1} so \boxed{2}", "2"),
        (r"\boxed{1} sand \boxed{2}", "2"),
        (r"\boxed{1} = \boxed{2}", "2"),
        (rf"\boxed{{1}}, and {'then ' * 12}\boxed{{2}}", "2"),
    ],
)
def test_boxes_of_one_sentence_are_one_answer(text: str, boxed: str) -> None:
    """Boxes that "and", "or" or a comma joins are a list; a new sentence or a long way begins a new answer."""
    assert last_boxed(text) == boxed


@pytest.mark.parametrize("text", ["", "no box", r"\boxedtext{3}", r"\boxed{1", r"\boxed{1} or \boxed{2", r"\boxed{\}"])
def test_without_a_finished_last_box_there_is_no_answer(text: str) -> None:
    """A text that was cut off inside its last box does not fall back on an earlier one."""
    assert last_boxed(text) is None


def test_all_boxes_come_in_order_with_their_places() -> None:
    """Each closed box is listed once, and its place covers the command and its braces."""
    text = r"$\boxed{1}$, $\boxed 2$ and $\fbox{3}$, not \boxed{4"
    assert [box.content for box in find_boxes(text)] == ["1", "2", "3"]
    assert [text[box.start : box.end] for box in find_boxes(text)] == [r"\boxed{1}", r"\boxed 2", r"\fbox{3}"]


@given(st.text(alphabet="\\{}$ 1x", max_size=40))
def test_balanced_content_comes_back_unchanged(noise: str) -> None:
    """Whatever balanced text is boxed is what is read, even between unbalanced texts."""
    assert last_boxed(rf"{noise.replace('{', '')} \boxed{{\frac{{1}}{{x}}}}") == r"\frac{1}{x}"


def test_hostile_nesting_ends_quickly() -> None:
    """Thousands of boxes inside one another neither recurse nor take long."""
    with processor_time(2):
        last_boxed(r"\boxed{" * 20_000 + "}" * 20_000)
        last_boxed(r"\boxed{" * 20_000)
        last_boxed(r"\boxed{1}, " * 20_000)
