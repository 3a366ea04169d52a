"""The built-in word problems: correct arithmetic, splits that share nothing, reproducible from a seed."""

import hashlib
import itertools
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.prepare_data.word_problems import WordProblems
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split


def _make(seed: int = 1, **changes: Any) -> list[Problem]:
    sizes = {"num_train": 600, "num_test": 150, "worked_fraction": 0.3}
    return list(WordProblems.model_validate({"kind": "word_problems", **sizes, **changes}).problems(seed))


def _chain(problem: Problem) -> tuple[int, ...]:
    """Return the calculation that a question asks for, from its words alone."""
    signed = re.sub(
        r"(?:loses|gives away) (\d(?:, \d)*)", lambda lost: re.sub(r"(\d)", r"-\1", lost[1]), problem.question
    )
    return tuple(int(number) for number in re.findall(r"-?\d+", signed))


def test_worked_solution_goes_step_by_step_to_the_answer() -> None:
    """Each line adds or takes away one digit of the story, stays within 0 to 60, and the last one is the answer."""
    for problem in _make(worked_fraction=1.0):
        total, *rest = _chain(problem)
        *lines, last = problem.solution.splitlines()
        for line, step in zip(lines, rest, strict=True):
            assert line == f"{total}{step:+d}={total + step}"
            total += step
            assert 0 <= total <= 60
            assert 1 <= abs(step) <= 9
        assert (last, problem.answer) == (f"#### {total}", str(total))


@settings(max_examples=25)
@given(st.integers(), st.integers(), st.tuples(st.integers(2, 6), st.integers(2, 6)))
def test_splits_share_no_calculation_under_any_seeds(seed: int, other_seed: int, operands: tuple[int, int]) -> None:
    """Nothing of a test split is in another split of any seed, and dev and train of one seed differ."""
    sizes = {"num_train": 60, "num_test": 12, "num_dev": 9}
    sizes |= {"min_operands": min(operands), "max_operands": max(operands)}
    chains = [
        {split: {_chain(each) for each in _make(made_of, **sizes) if each.split == split} for split in Split}
        for made_of in (seed, other_seed)
    ]
    for one, other in itertools.product(chains, repeat=2):
        assert one[Split.TRAIN]
        assert not one[Split.TEST] & (other[Split.TRAIN] | other[Split.DEV])
        assert not one[Split.DEV] & one[Split.TRAIN]


def test_problems_are_short_distinct_and_balanced() -> None:
    """A character-level model with few positions can read every question; each family and level has its share."""
    problems = _make(num_train=3000, num_test=600)
    assert len({problem.id for problem in problems}) == len(problems)
    assert len({(problem.split, problem.subject, _chain(problem)) for problem in problems}) == len(problems)
    for problem in problems:
        assert len(problem.question) <= 75
        assert re.fullmatch(r"[A-Za-z0-9 ,.?]+", problem.question)
        assert len(_chain(problem)) == 3 + (problem.level or 0)
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    assert set(Counter((problem.subject, problem.level) for problem in train).values()) == {3000 // 12}
    assert sum("=" in problem.solution for problem in train) / len(train) == pytest.approx(0.3, abs=0.03)


def test_seed_alone_decides_the_problems() -> None:
    """The problems of a seed stay byte-identical, also in later versions; a dev split changes no other."""
    problems = _make(num_dev=60)
    rest = [problem for problem in problems if problem.split != Split.DEV]
    assert len(problems) - len(rest) == 60
    text = "".join(problem.model_dump_json(exclude_defaults=True) for problem in rest)
    assert hashlib.sha256(text.encode()).hexdigest().startswith("da87782daae3")
    questions = {problem.question for problem in _make(seed=5)}
    assert len(questions & {problem.question for problem in _make(seed=6)}) < len(questions) / 10


def test_more_problems_than_exist_are_an_error() -> None:
    """The message names the key and how many there are, and no problem is repeated."""
    with pytest.raises(PipelineError, match=r"word_problems: num_train is 500, but only \d\d distinct problems exist"):
        _make(num_train=500, families=["total"], min_operands=2, max_operands=2)
