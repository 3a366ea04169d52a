"""The built-in word problems: correct arithmetic, splits that share nothing, reproducible from a seed."""

import re
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.prepare_data.word_problems import Family, WordProblems, split_of
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

_FAMILIES: list[Family] = list(get_args(Family))
_SMALL: dict[str, Any] = {
    "kind": "word_problems",
    "num_train": 600,
    "num_test": 150,
    "worked_fraction": 0.3,
    "families": _FAMILIES,
    "min_operands": 4,
    "max_operands": 6,
}


def _make(seed: int = 1, **changes: Any) -> list[Problem]:
    return list(WordProblems.model_validate(_SMALL | changes).problems(seed))


def _chain(problem: Problem) -> tuple[int, ...]:
    """Return the calculation that a question asks for, from its words alone."""
    signed = re.sub(
        r"(?:loses|gives away) (\d(?:, \d)*)", lambda lost: re.sub(r"(\d)", r"-\1", lost[1]), problem.question
    )
    return tuple(int(number) for number in re.findall(r"-?\d+", signed))


def test_question_asks_for_the_answer() -> None:
    """Adding up what the story says gives the answer, which is also what the solution ends in."""
    for problem in _make():
        assert sum(_chain(problem)) == int(problem.answer)
        assert problem.solution.splitlines()[-1] == f"#### {problem.answer}"


def test_worked_solutions_go_one_right_step_at_a_time() -> None:
    """Each line takes the last result, adds or takes away one digit of the story, and stays within 0 to 60."""
    for problem in _make(worked_fraction=1.0):
        total, *rest = _chain(problem)
        lines = problem.solution.splitlines()[:-1]
        assert len(lines) == len(rest)
        for line, step in zip(lines, rest, strict=True):
            assert line == f"{total}{step:+d}={total + step}"
            total += step
            assert 0 <= total <= 60
            assert 1 <= abs(step) <= 9


def test_questions_are_short_and_plain() -> None:
    """A small character-level model with few positions can read every question."""
    for problem in _make(num_train=3000):
        assert len(problem.question) <= 75
        assert re.fullmatch(r"[A-Za-z0-9 ,.?]+", problem.question)


@settings(max_examples=25, deadline=None)
@given(st.integers(), st.integers(), st.integers(2, 6), st.integers(2, 6))
def test_train_and_test_share_no_calculation_under_any_seeds(
    train_seed: int, test_seed: int, min_operands: int, max_operands: int
) -> None:
    """Even the train split of one seed and the test split of another have no calculation in common."""
    sizes = {
        "num_train": 60,
        "num_test": 12,
        "min_operands": min(min_operands, max_operands),
        "max_operands": max(min_operands, max_operands),
    }
    train = {_chain(problem) for problem in _make(train_seed, **sizes) if problem.split == Split.TRAIN}
    test = {_chain(problem) for problem in _make(test_seed, **sizes) if problem.split == Split.TEST}
    assert not train & test
    assert {split_of(chain) for chain in train} == {Split.TRAIN}
    assert {split_of(chain) for chain in test} == {Split.TEST}


def test_no_problem_occurs_twice_in_a_split() -> None:
    """Neither an id nor a family with its calculation is repeated."""
    problems = _make(num_train=3000, num_test=600)
    assert len({problem.id for problem in problems}) == len(problems)
    assert len({(problem.split, problem.subject, _chain(problem)) for problem in problems}) == len(problems)


def test_equal_seeds_give_equal_problems_and_others_do_not() -> None:
    """A run can be repeated, and another seed is another dataset."""
    assert _make(seed=5) == _make(seed=5)
    questions = {problem.question for problem in _make(seed=5)}
    assert len(questions & {problem.question for problem in _make(seed=6)}) < len(questions) / 10


def test_families_and_levels_come_in_equal_shares() -> None:
    """Every subject and level has the same number of problems, and a level is a number more."""
    train = [problem for problem in _make() if problem.split == Split.TRAIN]
    assert set(Counter((problem.subject, problem.level) for problem in train).values()) == {600 // 12}
    assert all(len(_chain(problem)) == 3 + (problem.level or 0) for problem in train)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_worked_fraction_is_met(fraction: float) -> None:
    """About that share of the solutions show their steps."""
    train = [problem for problem in _make(num_train=3000, worked_fraction=fraction) if problem.split == Split.TRAIN]
    assert sum("=" in problem.solution for problem in train) / len(train) == pytest.approx(fraction, abs=0.03)


def test_worked_fraction_changes_no_question() -> None:
    """Two runs that differ in how solutions are written are about the same problems."""
    bare, worked = _make(worked_fraction=0.0), _make(worked_fraction=1.0)
    assert [problem.question for problem in bare] == [problem.question for problem in worked]


def test_more_problems_than_exist_are_an_error() -> None:
    """The message names the key and how many there are, and no problem is repeated."""
    with pytest.raises(PipelineError, match=r"word_problems: num_train is 500, but only \d\d distinct problems exist"):
        _make(num_train=500, families=["total"], min_operands=2, max_operands=2)
