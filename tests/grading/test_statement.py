"""Answers that a text states in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.answer import stated_answer
from tests.processor_time import processor_time


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # a sentence that says so
        ("The answer is 42.", "42"),
        ("the answer is 42", "42"),
        ("We add. The answer is 42. Then we check it.", "42"),
        ("The answer is 42.\n\nThe answer is 43.", "43"),
        ("The answer would be 5", "5"),
        ("The answer must be 5.", "5"),
        ("The answer = 5", "5"),
        ("The answer is therefore 5.", "5"),
        ("The answer to the question is 5.", "5"),
        ("Answer: 7", "7"),
        ("**Answer:** 7", "7"),
        ("so it is\nA: 7", "7"),
        ("**Final Answer**\n5", "5"),
        ("### Answer\n\n$5$", "5"),
        ('The answer is "5".', "5"),
        ("The answer is 1,234.5.", "1,234.5"),
        ("The answer is $18 per day.", "$18 per day"),
        ("The answer is 3.5 hours.", "3.5 hours"),
        ("The answer is Evelyn.", "Evelyn"),
        ("The answer is (B).", "(B)"),
        (r"The answer is $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"The answer is \(5\).", "5"),
        (r"The answer is \[x. 5\]", "x. 5"),
        ("The answer is: $$5$$", "5"),
        ("The answer is [ 5 ].", "5"),
        ("The answer is $x=5$ or $x=6$.", "$x=5$ or $x=6$"),
        ("Final answer: The area is 12", "12"),
        ("Answer: total cost 12", "12"),
        ("The answer is the area, that is 12.", "12"),
        ("The answer is 12, which is even.", "12"),
        ("The answer is indeed 12, so we stop here.", "12"),
        ("The final answer is $5$. I hope it is correct.", "5"),
        ("Final Answer: The final answer is $18$. I hope this is correct.", "18"),
        ("The answer is 5<|im_end|>The answer is 6", "5"),
        ("The answer is <<2+3=5>>5", "5"),
        ("答案是5。", "5"),
        # a text that is nothing else
        ("42", "42"),
        (" $x=5$ ", "$x=5$"),
        ("5 apples", "5 apples"),
        ("5 and 6", "5 and 6"),
        ("Evelyn", "Evelyn"),
        (r"(3, \frac{1}{2})", r"(3, \frac{1}{2})"),
        # a conclusion at the end
        ("We add. Thus $x = 5$.", "x = 5"),
        ("We add. Thus she has 5 apples.", "5"),
        ("We add. We get 5.", "5"),
        ("We add. Therefore the roots are 2 and 3.", "2 and 3"),
        ("We add. So the total is $18$ dollars.", "18"),
        ("We add. In total 3 + 4 = 7.", "7"),
        ("We add. So the first is 7 of the 12.", "7"),
        ("We add. Hence the sum of 3 and 4 is 7.", "7"),
        ("It is $12$ dollars.", "12"),
        ("Answer $12$", "12"),
        ("So x is 5", "5"),
        ("所以是 5。", "5"),
        ("We add. Therefore the sum is\n$$12$$", "12"),
    ],
)
def test_what_is_stated_is_the_answer(text: str, answer: str) -> None:
    """The last sentence that states an answer counts, and of it the value alone."""
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "I like Evelyn",
        "I don't know.",
        "She has 3 apples. She has 5 apples.",
        "We add.\nIt is $12$ dollars.",
        "We add 2 and 3.",
        # denied, asked, conditional, taken back
        "The answer is not 5.",
        "The answer is never 5.",
        "The answer is unknown, for 5 is a guess.",
        "The answer is either 5 or 6.",
        "The wrong answer is 5.",
        "It is not the case that the answer is 5.",
        "I don't think the answer is 5.",
        "I doubt that the answer is 5.",
        "If the answer is 5, then stop.",
        "Suppose the answer is 5.",
        "Is the answer 5?",
        "The answer is Evelyn?",
        "What if the answer is 5? Then stop.",
        "The answer is 5? I cannot say.",
        "No answer is 5.",
        "The answer is 5. Actually, it is 6.",
        "The answer is 5. No, that is wrong.",
        "The answer is 5. Hmm, let me see.",
        "Thus we see that 5 is not the answer.",
        "Therefore it is different from 5.",
        "The answer is in chapter 12.",
        "The answer is given in step 5.",
        # no conclusion, or of something else
        "We add. Therefore it is more than 5.",
        "We add. Therefore it is twice 5.",
        "We add. Hence it is not 5.",
        "We add. Hence, is it 5?",
        "We have $x=5$. Hence the answer follows.",
        "We add. Thus we have 5 of them, and now",
        "Thus $x=5$.\n\nLet us check.",
    ],
)
def test_what_is_not_stated_is_no_answer(text: str) -> None:
    """A number in a text is not its answer, and what is denied, doubted, asked or taken back states nothing."""
    assert stated_answer(text) is None


def test_only_the_end_of_a_long_text_is_read() -> None:
    """An answer stands at the end; what is stated thousands of characters before it is not searched for."""
    assert stated_answer("The answer is 5. " + "We check it. " * 10) == "5"
    assert stated_answer("The answer is 5. " + "We check it. " * 1000) is None


def test_a_long_text_is_no_bare_answer() -> None:
    """A list of hundreds of numbers is not the answer, though it has no words; nor are several paragraphs."""
    assert stated_answer("1, 2, 3, " * 20) is not None
    assert stated_answer("1, 2, 3, " * 100) is None
    assert stated_answer("1\n\n2\n\n3") is None


@pytest.mark.parametrize(
    "unit", [r"\(", "$", "$$", r"\[", "[ ", "answer ", "the answer is ", "a' ", "1,", "5 or ", "<<"]
)
def test_repetition_is_read_in_no_time(unit: str) -> None:
    """What a model repeats until its limit costs milliseconds."""
    with processor_time(1):
        stated_answer(unit * (20_000 // len(unit)) + " so x")


_WORDS = r"The answer is not 5 . ? ! $ \( \) so thus = 7, A: [ ] If"


@given(st.lists(st.sampled_from([*_WORDS.split(), "\n"])).map(" ".join))
def test_any_text_states_a_part_of_it_or_nothing(text: str) -> None:
    """No text raises, and an answer is something that stands in it."""
    answer = stated_answer(text)
    assert answer is None or (answer and answer in text)
