"""The built-in problems for a calculator: correct arithmetic, splits that share no product, equal for equal seeds."""

import hashlib
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.environments.calculator import Calculator
from components.environments.environment import Observation
from components.prepare_data.calculator_problems import CalculatorProblems
from components.shared.chat import PromptFormat
from components.shared.model import ModelConfig
from components.shared.problem import Problem, Split
from components.shared.tools import ToolsConfig

_CALL = re.compile(r"```calculator\n([-+*\d]+)\n```\n```output\n(\d+)\n```\n")


def _make(seed: int = 1, **changes: Any) -> list[Problem]:
    sizes = {"num_train": 400, "num_test": 120, "worked_fraction": 1.0}
    return list(CalculatorProblems.model_validate({"kind": "calculator_problems", **sizes, **changes}).problems(seed))


def test_calculator_answers_a_solution_as_the_solution_shows() -> None:
    """A model that writes its parts of it reads, to the letter, what fine-tuning has shown it."""
    tools = ToolsConfig(environment="calculator", call_format="fenced")
    form = PromptFormat(ModelConfig(base="scratch:digits", tools=tools), template=None)
    for problem in _make(num_train=40, num_test=8):
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
    for problem in _make():
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


@settings(max_examples=15)
@given(st.integers(), st.integers())
def test_splits_share_no_product_under_any_seeds(seed: int, other_seed: int) -> None:
    """Whichever factor comes first, and in whatever family; even between splits of two seeds."""
    sizes = {"num_train": 60, "num_test": 20, "num_dev": 20}
    problems = [*_make(seed, **sizes), *_make(other_seed, **sizes)]
    factors = [frozenset(re.findall(r"\d+", each.question)[:2]) for each in problems]
    products = {
        split: {pair for pair, each in zip(factors, problems, strict=True) if each.split == split} for split in Split
    }
    assert all(products.values())
    assert not products[Split.TRAIN] & products[Split.TEST]
    assert not products[Split.DEV] & (products[Split.TRAIN] | products[Split.TEST])


def test_problems_are_distinct_and_balanced_and_most_solutions_bare_if_so_asked() -> None:
    """Each family has its share, and a bare solution is the answer alone."""
    problems = _make(num_train=2000, worked_fraction=0.3)
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    assert len({problem.id for problem in problems}) == len(problems)
    assert len({(problem.subject, *re.findall(r"\d+", problem.question)) for problem in train}) == len(train)
    assert set(Counter(problem.subject for problem in train).values()) == {500}
    bare = [problem for problem in train if "calculator" not in problem.solution]
    assert all(problem.solution == f"#### {problem.answer}" for problem in bare)
    assert 1 - len(bare) / len(train) == pytest.approx(0.3, abs=0.04)


def test_seed_alone_decides_the_problems() -> None:
    """The problems of a seed stay byte-identical, also in later versions; the fraction changes no question."""
    text = "".join(problem.model_dump_json(exclude_defaults=True) for problem in _make())
    assert hashlib.sha256(text.encode()).hexdigest().startswith("1ad8dc372541")
    bare = _make(worked_fraction=0.0)
    assert [problem.question for problem in bare] == [problem.question for problem in _make()]
    questions = {problem.question for problem in _make(seed=5)}
    assert len(questions & {problem.question for problem in _make(seed=6)}) < len(questions) / 10
