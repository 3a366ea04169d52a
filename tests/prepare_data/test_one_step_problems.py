"""The built-in one-step problems: right arithmetic on the numbers that matter, reproducible from a seed."""

import re
from collections import Counter

from components.prepare_data.one_step_problems import OneStepProblems
from components.shared.problem import Problem


def _made(num_train: int = 960, seed: int = 1) -> list[Problem]:
    return list(OneStepProblems(kind="one_step_problems", num_train=num_train).problems(seed))


def test_a_solution_is_one_true_calculation_with_numbers_of_the_story() -> None:
    """The answer is a whole number above 0; most stories have a number that is in no calculation."""
    num_distracted = 0
    for problem in _made():
        calculation, answer = problem.solution.splitlines()[0].split(" = ")
        assert eval(calculation) == int(answer) > 0  # two numbers and a sign
        assert problem.solution == f"{calculation} = {answer}\n#### {problem.answer}"
        told, used = (Counter(re.findall(r"\d+", text)) for text in (problem.question, calculation))
        assert used <= told
        num_distracted += told.total() > 2
    assert num_distracted > 600


def test_subjects_take_turns_and_the_seed_decides() -> None:
    """No two problems are equal; the same seed makes the same ones, a longer list begins with the shorter."""
    problems = _made()
    assert len({each.question for each in problems}) == len(problems)
    assert Counter(each.subject for each in problems).keys() == {
        "addition",
        "subtraction",
        "multiplication",
        "division",
    }
    assert _made(200) == problems[:200]
    assert _made(200, seed=2) != problems[:200]
