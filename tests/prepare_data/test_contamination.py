"""Contamination: what is detected, what is not, and that a large dataset takes seconds."""

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.prepare_data.config import ContaminationConfig
from components.prepare_data.contamination import Contamination, Match, find_contamination, words
from components.prepare_data.word_problems import Family, WordProblems
from components.shared.problem import Problem, Split
from tests.processor_time import processor_time

_CONFIG = ContaminationConfig(ngram_words=13, max_overlap=0.5)
_LONG = " ".join(f"word{number}" for number in range(40))


def _problem(question: str, split: Split, index: int = 0) -> Problem:
    return Problem(
        id=f"x/{split}/{index}",
        source="x",
        split=split,
        question=question,
        solution="1",
        answer="1",
        subject="",
        level=None,
    )


def _compare(train: str, test: str, config: ContaminationConfig = _CONFIG) -> Contamination | None:
    return next(iter(find_contamination([_problem(train, Split.TRAIN)], [_problem(test, Split.TEST)], config)), None)


@pytest.mark.parametrize(
    ("train", "test", "match"),
    [
        ("Tom has 3 apples. How many?", "Tom has 3 apples. How many?", Match.EXACT),
        ("Tom has 3 apples. How many?", "tom  has 3 apples,\nhow many", Match.NORMALISED),
        ("A well-known two-digit number?", "A well known two digit number.", Match.NORMALISED),
        ("Evaluate $\\lfloor 3.2 \\rfloor$.", "Evaluate $ \\lfloor 3.2 \\rfloor $", Match.NORMALISED),
        ("What is $x\N{MINUS SIGN}3$?", "What is $x - 3$?", Match.NORMALISED),
        (f"{_LONG} and then it ends so", f"{_LONG} but now it ends differently", Match.NGRAMS),
        (f"Said before it: {_LONG}", _LONG, Match.NGRAMS),
    ],
)
def test_problem_that_gives_a_test_problem_away_is_detected(train: str, test: str, match: Match) -> None:
    """Equal texts, equal words, and questions that share most of their runs of words."""
    entry = _compare(train, test)
    assert entry is not None
    assert (entry.train, entry.test, entry.match) == ("x/train/0", "x/test/0", match)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Tom has 3 apples. How many?", "Tom has 4 apples. How many?"),
        ("Evaluate $x + 3$ at $x = 2$.", "Evaluate $x - 3$ at $x = 2$."),
        ("Find $2^3$.", "Find $2/3$."),
        ("???", "!!!"),
        (_LONG, " ".join(reversed(_LONG.split()))),
        (f"{' '.join(_LONG.split()[:20])} then something else", _LONG),
    ],
)
def test_different_problems_are_kept(train: str, test: str) -> None:
    """Other numbers, other operators, the same words in another order, and a shared beginning are not contamination."""
    assert _compare(train, test) is None


def test_overlap_is_a_share_of_the_test_question() -> None:
    """A test question of 40 words has 28 n-grams; a train question with its first 26 words shares half."""
    test = _LONG.split()
    config = ContaminationConfig(ngram_words=13, max_overlap=0.49)
    entry = _compare(" ".join([*test[:26], "else"]), _LONG, config)
    assert entry is not None
    assert entry.overlap == 0.5
    assert _compare(" ".join([*test[:26], "else"]), _LONG) is None, "at the threshold, not above it"


def test_closest_test_problem_is_reported() -> None:
    """Of several matches the strongest is named, once per train problem."""
    test = [_problem(" ".join(_LONG.split()[:30]) + " x" * 8, Split.TEST, 0), _problem(f"{_LONG} x", Split.TEST, 1)]
    entries = find_contamination([_problem(f"{_LONG} y", Split.TRAIN)], test, _CONFIG)
    assert [(entry.test, entry.match) for entry in entries] == [("x/test/1", Match.NGRAMS)]


def test_numbers_and_operators_are_words() -> None:
    """Case, spacing and punctuation go; what makes another problem stays."""
    assert words("If  X-3 = 1,000?") == ("if", "x", "-", "3", "=", "1", "000")


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=9), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=9), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_index_detects_the_same_pairs_as_brute_force(
    train: list[list[str]], test: list[list[str]], max_overlap: float
) -> None:
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


@pytest.mark.parametrize("max_overlap", [0.3, 0.5])
def test_word_problems_of_one_template_are_told_apart(max_overlap: float) -> None:
    """Templates share their words; their numbers tell them apart."""
    config = WordProblems(
        kind="word_problems",
        num_train=4000,
        num_test=1000,
        worked_fraction=0.5,
        families=list(get_args(Family)),
        min_operands=3,
        max_operands=6,
    )
    problems = list(config.problems(seed=3))
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    test = [problem for problem in problems if problem.split == Split.TEST]
    assert find_contamination(train, test, ContaminationConfig(ngram_words=13, max_overlap=max_overlap)) == []


@pytest.mark.slow
def test_dataset_as_large_as_math_takes_seconds() -> None:
    """7,500 train problems against 5,000 test problems of 60 words, all with a common figure in them."""
    random_ = random.Random(1)
    figure = "draw 0 0 1 0 1 1 0 1 cycle label A 0 0 SW label B 1 0 SE"

    def question() -> str:
        return figure + " " + " ".join(random_.choices(_LONG.split(), k=60))

    train = [_problem(question(), Split.TRAIN, index) for index in range(7500)]
    test = [_problem(question(), Split.TEST, index) for index in range(5000)]
    train[17] = _problem(test[42].question.upper(), Split.TRAIN, 17)
    with processor_time(20):
        entries = find_contamination(train, test, _CONFIG)
    assert [(entry.train, entry.test) for entry in entries] == [("x/train/17", "x/test/42")]
