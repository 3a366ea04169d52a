import time

import pytest
from hypothesis import given, strategies

from components.shared.grading.answer import final_answer, has_reasoning


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 5\nso #### 6 \n", "6"),
        ("#### 1,234 apples\nand more", "1,234 apples"),
        (r"hence $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1}. Wait, \boxed{2}", "2"),
        (r"\boxed{7} then" + "\n#### 8", "8"),
        ("#### Step 1\n" + r"so \boxed{7}", "7"),
        ("the answer is 42", None),
        ("####", None),
        (r"\boxed{}", None),
        (r"\boxed{5", None),
        ("", None),
    ],
)
def test_the_declared_answer_is_found_and_nothing_else(text: str, answer: str | None) -> None:
    """The later marker counts; a text that declares nothing has no answer, however many numbers it holds."""
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>maybe \boxed{3}</think> it is \boxed{4}", "4"),
        (r"<think>it is \boxed{3}</think> I do not know", None),
        (r"<think>it is \boxed{3}", None),
        ("maybe\n#### 3\n</think>\n#### 4", "4"),
        ("<think>a</think><think>#### 3</think>", None),
    ],
)
def test_thoughts_declare_nothing(text: str, answer: str | None) -> None:
    """What stands between think tags, closed or not, opened in the prompt or not, is no answer."""
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "reasoned"),
    [
        ("3+5=8\n#### 8", True),
        ("#### 8", False),
        ("  \n#### 8", False),
        (r"\(\boxed{8}\)", False),
        (r"so \boxed{8}", True),
        (r"#### \boxed{8}", False),
        ("<think>\n\n</think>\n#### 8", False),
        ("<think>3+5</think>\n#### 8", True),
        ("3+5=8", False),
    ],
)
def test_reasoning_is_what_stands_before_the_answer(text: str, reasoned: bool) -> None:
    """A bare answer has no reasoning, and neither has a text without an answer."""
    assert has_reasoning(text) is reasoned


PIECES = ["#", "####", "\n", " ", r"\boxed", "{", "}", "<think>", "</think>", "7"]


@given(strategies.lists(strategies.sampled_from(PIECES)).map("".join))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    """Malformed markers in any order raise nothing, and an answer is never blank."""
    answer = final_answer(text)
    assert answer is None or answer.strip()
    assert answer is not None or not has_reasoning(text)


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed", "####", "<think>", "</think>", "{", r"\boxed{5}", "#### 5\n"])
def test_repetition_is_read_in_no_time(piece: str) -> None:
    """A completion that repeats a marker thousands of times costs milliseconds and does not overflow the stack."""
    started = time.perf_counter()
    for text in (piece * 5000, piece * 5000 + "}" * 5000):
        final_answer(text)
        has_reasoning(text)
    assert time.perf_counter() - started < 2
