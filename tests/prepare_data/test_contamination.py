import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.prepare_data.config import ContaminationConfig
from components.prepare_data.contamination import Contamination, find_contamination
from components.shared.problem import Problem, Split

_LONG = " ".join(f"word{number}" for number in range(40))


def _problem(question: str, split: Split, index: int = 0) -> Problem:
    values = {"source": "x", "question": question, "solution": "1", "answer": "1", "subject": "", "level": None}
    return Problem.model_validate({"id": f"x/{split}/{index}", "split": split, **values})


def _compare(train: str, *test: str, max_overlap: float = 0.5) -> Contamination | None:
    config = ContaminationConfig(ngram_words=13, max_overlap=max_overlap)
    tests = [_problem(question, Split.TEST, index) for index, question in enumerate(test)]
    return next(iter(find_contamination([_problem(train, Split.TRAIN)], tests, config)), None)


@pytest.mark.parametrize(
    ("train", "test", "match"),
    [
        ("Tom has 3 apples. How many?", "Tom has 3 apples. How many?", "exact"),
        ("A well-known two-digit number?", "a well known two  digit number.", "normalised"),
        ("Evaluate $\\lfloor 3.2 \\rfloor$.", "Evaluate $ \\lfloor 3.2 \\rfloor $", "normalised"),
        ("What is $x\N{MINUS SIGN}3$?", "What is $x - 3$?", "normalised"),
        (f"{_LONG} and then it ends so", f"{_LONG} but now it ends differently", "ngrams"),
        # Other numbers, other operators, the same words in another order, and a shared beginning are different.
        ("Tom has 3 apples. How many?", "Tom has 4 apples. How many?", None),
        ("Evaluate $x + 3$ at $x = 2$.", "Evaluate $x - 3$ at $x = 2$.", None),
        ("Find $2^3$.", "Find $2/3$.", None),
        ("???", "!!!", None),
        (_LONG, " ".join(reversed(_LONG.split())), None),
    ],
)
def test_problem_that_gives_a_test_problem_away_is_detected(train: str, test: str, match: str | None) -> None:
    """Equal texts, equal words, and questions that share most of their n-grams."""
    entry = _compare(train, test)
    assert (entry and entry.match) == match


def test_overlap_is_a_share_of_the_closest_test_question() -> None:
    """A test question of 40 words has 28 n-grams; a train question with its first 26 words shares half of them."""
    train = " ".join([*_LONG.split()[:26], "else"])
    assert _compare(train, _LONG, max_overlap=0.49) == Contamination("x/train/0", "x/test/0", "ngrams", 0.5)
    assert _compare(train, _LONG, max_overlap=0.5) is None, "at the threshold, not above it"
    closest = _compare(f"{_LONG} y", " ".join(_LONG.split()[:30]) + " x" * 8, f"{_LONG} x")
    assert closest is not None
    assert closest.test == "x/test/1"


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=9), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=9), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_index_detects_what_brute_force_does(train: list[list[str]], test: list[list[str]], max_overlap: float) -> None:
    """Looking up rare n-grams alone misses no pair above the limit and adds none."""

    def ngrams(question: list[str]) -> set[tuple[str, ...]]:
        return {tuple(question[start : start + 3]) for start in range(len(question) - 2)}

    expected = {
        f"x/train/{index}"
        for index, question in enumerate(train)
        if any(
            question == other or len(ngrams(question) & ngrams(other)) / len(ngrams(other)) > max_overlap
            for other in test
        )
    }
    entries = find_contamination(
        [_problem(" ".join(question), Split.TRAIN, index) for index, question in enumerate(train)],
        [_problem(" ".join(question), Split.TEST, index) for index, question in enumerate(test)],
        ContaminationConfig(ngram_words=3, max_overlap=max_overlap),
    )
    assert {entry.train for entry in entries} == expected
