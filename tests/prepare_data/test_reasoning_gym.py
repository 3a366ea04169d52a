"""Tasks of the package reasoning_gym: different questions, equal for equal seeds, whose answers our grader decides."""

import importlib.util
import sys
from typing import Any

import pytest

from components.grading.grade import grade
from components.grading.verdicts import Verdict
from components.prepare_data.config import ContaminationConfig
from components.prepare_data.contamination import find_contamination
from components.prepare_data.reasoning_gym import TASKS, ReasoningGym
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.problem import Problem

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the optional package reasoning-gym"
)


def _made(tasks: dict[str, Any], seed: int = 1, **sizes: int) -> list[Problem]:
    sizes = {"num_train": 6, "num_test": 4, **sizes}
    return list(ReasoningGym.model_validate({"kind": "reasoning_gym", "tasks": tasks, **sizes}).problems(seed))


@needs_package
@pytest.mark.parametrize("task", TASKS)
def test_the_grader_takes_the_answer_of_a_task_and_no_other(task: str) -> None:
    """Its own answer is right, that of the next question wrong, never without a verdict; no two questions are equal."""
    problems = _made({task: {}})
    held_out, train = problems[:4], problems[4:]
    assert find_contamination(train, held_out, ContaminationConfig(max_overlap=1.0)) == []
    for problem, other in zip(problems, [*problems[1:], problems[0]], strict=True):
        assert "\n" not in problem.answer

        def verdict(response: str, problem: Problem = problem) -> Verdict:
            return grade(problem.answer, response, AnswerPolicy.DECLARED, problem.question).verdict

        assert verdict(problem.solution) is Verdict.RIGHT
        assert verdict(other.solution) is (Verdict.RIGHT if other.answer == problem.answer else Verdict.WRONG)


@needs_package
@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"gcd": {"min_number": 3}}, r"reasoning_gym: tasks.gcd: .*unexpected keyword argument 'min_number'"),
        ({"gcd": {"min_numbers": 1}}, r"reasoning_gym: tasks.gcd: min_numbers must be at least 2"),
        (
            {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}},
            r"num_train is 900, but chain_sum has no further question after \d+ problems",
        ),
    ],
)
def test_arguments_that_give_no_problems_are_named(tasks: dict[str, Any], message: str) -> None:
    """By their task."""
    with pytest.raises(PipelineError, match=message):
        _made(tasks, num_train=900)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other source needs it. A task that does not exist is refused without it."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(PipelineError, match=r"the package cannot be imported .*pip install reasoning-gym"):
        _made({"gcd": {}})
    with pytest.raises(ValueError, match="no such task: gdc; accepted: acre, aiw"):
        _made({"gdc": {}})
