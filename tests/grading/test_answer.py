"""Where a response has its final answer, and whether anything is written before it."""

import pytest
from hypothesis import given, strategies

from components.grading.answer import final_answer, has_reasoning
from components.shared.answer_policy import AnswerPolicy
from tests.processor_time import processor_time

BOXED, MARKED, DECLARED, STATED = AnswerPolicy


@pytest.mark.parametrize(
    ("text", "boxed", "marked", "declared", "stated"),
    [
        ("48/2 = 24\n#### 72", None, "72", "72", "72"),
        ("#### 5\nso #### 6 \n", None, "6", "6", "6"),
        ("#### 1,234 apples\nand more", None, "1,234 apples", "1,234 apples", "1,234 apples"),
        (r"hence $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", None, r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{1}. Wait, \boxed{2}", "2", None, "2", "2"),
        (r"\boxed{7} then" + "\n#### 8", "7", "8", "8", "8"),
        ("#### Step 1\n" + r"so \boxed{7}", "7", "Step 1", "7", "7"),
        (r"#### \boxed{7}", "7", r"\boxed{7}", r"\boxed{7}", r"\boxed{7}"),
        ("the answer is 42", None, None, None, "42"),
        (r"the answer is 42, see the box", None, None, None, "42, see the box"),
        (r"The answer is 42. \boxed{7}", "7", None, "7", "7"),
        ("The answer is 42.\n#### 7", None, "7", "7", "7"),
        ("The answer is 42.\n####", None, None, None, "42"),
        (r"The answer is 42. \boxed{}", None, None, None, "42"),
        ("so 42 and on", None, None, None, None),
        ("####", None, None, None, "####"),
        ("", None, None, None, None),
    ],
)
def test_each_policy_reads_its_own_place(
    text: str, boxed: str | None, marked: str | None, declared: str | None, stated: str | None
) -> None:
    """The later marker counts; what a policy does not name, however many numbers it holds, is no answer."""
    assert [final_answer(text, policy) for policy in AnswerPolicy] == [boxed, marked, declared, stated]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>maybe \boxed{3}</think> it is \boxed{4}", "4"),
        (r"<think>it is \boxed{3}</think> I do not know", None),
        (r"<think>it is \boxed{3}", None),
        ("maybe\n#### 3\n</think>\n#### 4", "4"),
        ("maybe\n#### 3\n</think>\nI do not know", None),
        ("<think>a</think><think>#### 3</think>", None),
        ("<think>The answer is 3.</think> The answer is 4.", "4"),
        ("<think>The answer is 3.</think>", None),
    ],
)
def test_thoughts_declare_nothing(text: str, answer: str | None) -> None:
    """What stands between think tags, closed or not, opened in the prompt or not, is no answer."""
    assert final_answer(text, STATED) == answer


@pytest.mark.parametrize(
    ("text", "policy", "reasoned"),
    [
        ("3+5=8\n#### 8", MARKED, True),
        ("#### 8", MARKED, False),
        ("  \n#### 8", DECLARED, False),
        (r"\(\boxed{8}\)", BOXED, False),
        (r"so \boxed{8}", BOXED, True),
        (r"#### \boxed{8}", DECLARED, False),
        ("<think>\n\n</think>\n#### 8", MARKED, False),
        ("<think>3+5</think>\n#### 8", MARKED, True),
        ("3+5=8", DECLARED, False),
        ("3+5\n#### 8", BOXED, False),
        (r"3+5, so \boxed{8}", MARKED, False),
        ("8", STATED, False),
        ("$8$", STATED, False),
        ("3+5 is eight. The answer is 8.", STATED, True),
        ("I do not know.", STATED, False),
    ],
)
def test_reasoning_is_what_stands_before_the_answer(text: str, policy: AnswerPolicy, reasoned: bool) -> None:
    """A bare answer has no reasoning, and neither has a text without an answer."""
    assert has_reasoning(text, policy) is reasoned


PIECES = ["#", "####", "\n", " ", r"\boxed", "{", "}", "<think>", "</think>", "7", "The answer is ", "."]


@given(strategies.lists(strategies.sampled_from(PIECES)).map("".join), strategies.sampled_from(AnswerPolicy))
def test_any_text_has_an_answer_or_none(text: str, policy: AnswerPolicy) -> None:
    """Malformed markers in any order raise nothing, and an answer is never blank."""
    answer = final_answer(text, policy)
    assert answer is None or answer.strip()
    assert answer is not None or not has_reasoning(text, policy)


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed", "####", "<think>", "</think>", "{", r"\boxed{5}", "#### 5\n"])
def test_repetition_is_read_in_no_time(piece: str) -> None:
    """A completion that repeats a marker thousands of times costs milliseconds and does not overflow the stack."""
    with processor_time(2):
        for text in (piece * 5000, piece * 5000 + "}" * 5000):
            for policy in AnswerPolicy:
                final_answer(text, policy)
                has_reasoning(text, policy)
