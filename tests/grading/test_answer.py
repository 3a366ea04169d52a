"""Where the final answer of a text is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.extract import final_answer, has_reasoning, outside_thoughts
from components.grading.flexible import flexible_answer
from components.shared.answer_policy import AnswerPolicy
from tests.grading.processes import processor_time
from tests.grading.tables import table

BOXED, MARKED, DECLARED, STATED, LAST_SENTENCE = AnswerPolicy

SYMBOLS = r"""
48611 2 - + / = < , . : ! ? % ^ _ ' & # | $ $$ ( ) [ ] { } \{ \} \\ \( \) \[ \] x ```  e9 0x None so thus not if or is
\boxed{ \boxed \fbox{ #### <think> </think> A: Answer: ** \frac{ \sqrt \text{ \left( \pi \pm \le \infty \begin{pmatrix}
\end{pmatrix} \overline{ \cup \cdot \binom answer
"""
PIECES = [
    *SYMBOLS.split(),
    *("The answer is ", "the answer is 5. ", "#### 5\n", "Answer: 5\n", "5 or ", "= 5 ", "$5$ ", "1 1/2 ", "| 5 "),
    *(" ", ", ", ". ", "\n", "\n\n", "\t", "\0"),
    *("\u200b", "\u202e", "\u0665", "\u00bd", "\u20ac", "\ud800", "\U0001d7d3"),
]
"""What a response may repeat or mix, to have a regular expression backtrack or a parser descend."""


@pytest.mark.parametrize(("policy", "text", "answer", "why"), table("extraction.tsv"))
def test_the_final_answer_of_a_text(policy: str, text: str, answer: str, why: str) -> None:
    """The cases of extraction.tsv."""
    assert final_answer(text, AnswerPolicy(policy)) == (None if answer == "(none)" else answer), why


def test_a_statement_far_from_the_end_and_a_long_bare_text_are_no_answers() -> None:
    """A list of hundreds of numbers is not the answer, though it has no words; nor are several paragraphs."""
    assert final_answer("The answer is 5. " + "We check it. " * 10, STATED) == "5"
    assert final_answer("The answer is 5. " + "We check it. " * 1000, STATED) is None
    assert final_answer("1, 2, 3, " * 20, STATED) is not None
    assert final_answer("1, 2, 3, " * 100, STATED) is None
    assert final_answer("1\n\n2\n\n3", STATED) is None


@pytest.mark.parametrize(
    ("text", "policy", "has_some"),
    [
        ("3+5=8\n#### 8", MARKED, True),
        ("#### 8", MARKED, False),
        (r"\(\boxed{8}\)", BOXED, False),
        (r"so \boxed{8}", BOXED, True),
        ("<think>\n\n</think>\n#### 8", MARKED, False),
        ("<think>3+5</think>\n#### 8", MARKED, True),
        ("3+5\n#### 8", BOXED, False),
        ("8", STATED, False),
        ("3+5 is eight. The answer is 8.", STATED, True),
        ("I do not know.", STATED, False),
        ("She had 3 and buys 5. She owns 8 books now.", LAST_SENTENCE, True),
        ("#### 8\n#### Verification", MARKED, False),
    ],
)
def test_reasoning_is_what_stands_before_the_answer(text: str, policy: AnswerPolicy, has_some: bool) -> None:
    """A bare answer has no reasoning, and neither has a text without an answer."""
    assert has_reasoning(text, policy) is has_some


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text(st.characters(exclude_categories=())))
def test_the_answer_of_any_text_is_a_part_of_it(text: str) -> None:
    """No text raises; an answer is not blank and, but for a list of boxes, stands in the text."""
    for policy in AnswerPolicy:
        answer = final_answer(text, policy)
        assert answer is None or answer.strip()
        assert answer is None or answer in outside_thoughts(text) or text.count("box") > 1
        assert answer is not None or not has_reasoning(text, policy)
        assert flexible_answer(text, policy) != ""
        assert flexible_answer(text, policy) == answer or answer is None


def test_the_time_to_find_an_answer_grows_with_the_length_alone() -> None:
    """Any piece repeated to 10,000 characters takes a fraction of a second; quadratic time would take minutes."""
    for piece in PIECES:
        for opening in ("", r"\boxed{5} ", r"\boxed{", "#### ", "The answer is ", "<think>"):
            text = opening + piece * (10_000 // len(piece))
            with processor_time(1):
                for policy in (DECLARED, LAST_SENTENCE):  # which look everywhere
                    has_reasoning(text, policy)
