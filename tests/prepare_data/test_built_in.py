"""The built-in problems: correct arithmetic, splits that share nothing, equal for equal seeds."""

import hashlib
import itertools
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from components.environments.calculator import Calculator
from components.environments.environment import Observation
from components.prepare_data.config import Source
from components.shared.chat import PromptFormat
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem, Split
from components.shared.tools import ToolsConfig

_CALL = re.compile(r"```calculator\n([-+*\d]+)\n```\n```output\n(\d+)\n```\n")


def _make(kind: str, seed: int = 1, **changes: Any) -> list[Problem]:
    source: Any = TypeAdapter[Any](Source).validate_python({"kind": kind, **changes})
    return list(source.problems(seed))


def _words(seed: int = 1, **changes: Any) -> list[Problem]:
    return _make("word_problems", seed, **{"num_train": 600, "num_test": 150, "worked_fraction": 0.3, **changes})


def _calls(seed: int = 1, **changes: Any) -> list[Problem]:
    return _make("calculator_problems", seed, **{"num_train": 400, "num_test": 120, "worked_fraction": 1.0, **changes})


def _chain(problem: Problem) -> tuple[int, ...]:
    """Return the calculation that a word problem asks for, from its words alone."""
    signed = re.sub(
        r"(?:loses|gives away) (\d(?:, \d)*)", lambda lost: re.sub(r"(\d)", r"-\1", lost[1]), problem.question
    )
    return tuple(int(number) for number in re.findall(r"-?\d+", signed))


def _numbers(problem: Problem) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", problem.question))


def _factors(problem: Problem) -> frozenset[str]:
    """Return the product that a problem for the calculator asks for."""
    return frozenset(_numbers(problem)[:2])


def test_worked_solution_goes_step_by_step_to_the_answer() -> None:
    """Each line adds or takes away one digit of the story, stays within 0 to 60, and the last one is the answer.

    A character-level model with few positions can read every question.
    """
    for problem in _words(worked_fraction=1.0):
        assert re.fullmatch(r"[A-Za-z0-9 ,.?]{1,75}", problem.question)
        total, *rest = _chain(problem)
        assert len(rest) == 2 + (problem.level or 0)
        *lines, last = problem.solution.splitlines()
        for line, step in zip(lines, rest, strict=True):
            assert line == f"{total}{step:+d}={total + step}"
            total += step
            assert 0 <= total <= 60
            assert 1 <= abs(step) <= 9
        assert (last, problem.answer) == (f"#### {total}", str(total))


def test_calculator_answers_a_solution_as_the_solution_shows() -> None:
    """A model that writes its parts of it reads, to the letter, what fine-tuning has shown it."""
    tools = ToolsConfig(environment="calculator", call_format="fenced")
    form = PromptFormat(ModelConfig(base="scratch:digits", tools=tools), template=None)
    for problem in _calls(num_train=40, num_test=8):
        environment = Calculator(tools)
        environment.reset(problem)
        *turns, (last, _) = form.response_parts(problem)
        for (text, by_environment), (shown, by_model) in zip(turns[::2], turns[1::2], strict=True):
            assert (by_environment, not by_model) == (False, False)
            assert text.endswith(form.turn_stops)
            observation = environment.step(text)
            assert not observation.done
            assert form.observation(observation.text, ended=False) == shown
        assert environment.step(last) == Observation(done=True)


def test_solution_calls_the_calculator_and_gives_what_it_answered() -> None:
    """Each output has four digits; operands are from the question or an earlier output."""
    for problem in _calls():
        calls = _CALL.findall(problem.solution)
        seen = re.findall(r"\d+", problem.question)
        for expression, output in calls:
            assert set(re.findall(r"\d+", expression)) <= set(seen)
            assert len(output) == 4
            seen.append(output)
        first, second, *changes = re.findall(r"(finds|loses|packs|of) (\d+)", problem.question)
        changed = sum(int(number) * (1 if verb == "finds" else -1) for verb, number in changes)
        assert problem.answer == calls[-1][1] == str(int(first[1]) * int(second[1]) + changed)
        assert _CALL.sub("", problem.solution) == f"#### {problem.answer}"
        assert problem.level == len(calls) == len(changes) + 1


def test_a_solution_of_one_step_is_a_true_calculation_with_numbers_of_the_story() -> None:
    """The answer is a whole number above 0; most stories have a number that is in no calculation."""
    num_distracted = 0
    for problem in _make("one_step_problems", num_train=960):
        calculation, answer = problem.solution.splitlines()[0].split(" = ")
        assert eval(calculation) == int(answer) > 0  # two numbers and a sign
        assert problem.solution == f"{calculation} = {answer}\n#### {problem.answer}"
        told, used = (Counter(re.findall(r"\d+", text)) for text in (problem.question, calculation))
        assert used <= told
        num_distracted += told.total() > 2
    assert num_distracted > 600


@settings(max_examples=20)
@given(st.integers(), st.integers(), st.sampled_from([(_words, _chain), (_calls, _factors)]))
def test_splits_share_no_calculation_under_any_seeds(seed: int, other_seed: int, kind: Any) -> None:
    """Nothing of a test split is in another split of any seed, and dev and train of one seed differ."""
    make, calculation = kind
    splits = [
        {split: {calculation(each) for each in made if each.split == split} for split in Split}
        for made in (make(each, num_train=60, num_test=20, num_dev=20) for each in (seed, other_seed))
    ]
    for one, other in itertools.product(splits, repeat=2):
        assert all(one.values())
        assert not one[Split.TEST] & (other[Split.TRAIN] | other[Split.DEV])
        assert not one[Split.DEV] & one[Split.TRAIN]


@pytest.mark.parametrize(
    ("make", "calculation", "worked", "share"), [(_words, _chain, "=", 0.3), (_calls, _numbers, "calculator", 0.7)]
)
def test_problems_are_distinct_and_balanced(make: Any, calculation: Any, worked: str, share: float) -> None:
    """Each family and level has its share, and a bare solution is the answer alone."""
    problems = make(num_train=3000, num_test=600, worked_fraction=share)
    assert len({problem.id for problem in problems}) == len(problems)
    assert len({(each.split, each.subject, calculation(each)) for each in problems}) == len(problems)
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    assert len(set(Counter((problem.subject, problem.level) for problem in train).values())) == 1
    bare = [problem for problem in train if worked not in problem.solution]
    assert all(problem.solution == f"#### {problem.answer}" for problem in bare)
    assert 1 - len(bare) / len(train) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (_words, "da87782daae3"),
        (_calls, "1ad8dc372541"),
        (lambda seed=1, **_: _make("one_step_problems", seed, num_train=400), "4669c3fae433"),
    ],
)
def test_seed_alone_decides_the_problems(make: Any, digest: str) -> None:
    """They stay byte-identical, also in later versions; bare solutions change no question, and a dev split no other."""
    problems = make()
    assert len({problem.question for problem in problems}) == len(problems)
    assert [problem for problem in make(num_dev=20) if problem.split != Split.DEV] == problems
    text = "".join(problem.model_dump_json(exclude_defaults=True) for problem in problems)
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)
    assert [problem.question for problem in make(worked_fraction=0.0)] == [problem.question for problem in problems]
    questions = {problem.question for problem in make(seed=5)}
    assert len(questions & {problem.question for problem in make(seed=6)}) < len(questions) / 10


def test_more_problems_than_exist_are_an_error() -> None:
    """The message names the key and how many there are, and no problem is repeated."""
    with pytest.raises(PipelineError, match=r"word_problems: num_train is 500, but only \d\d distinct problems exist"):
        _words(num_train=500, families=["total"], min_operands=2, max_operands=2)
