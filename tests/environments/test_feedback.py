import pytest

from components.environments.environment import Observation
from components.environments.feedback import Feedback
from components.environments.pool import Environments
from components.shared.tools import ToolsConfig
from tests import tiny

_WRONG = "That is not right. Try again."
PROBLEM = tiny.problem(0, answer="1776", question="What is 37 times 48?")


def _feedback(**arguments: object) -> Feedback:
    feedback = Feedback(ToolsConfig(environment="feedback", arguments=arguments))
    feedback.reset(PROBLEM)
    return feedback


@pytest.mark.parametrize(("num_wrong", "reward"), [(0, 1.0), (1, 0.5), (2, 0.25)])
def test_a_right_answer_is_worth_less_after_each_wrong_try(num_wrong: int, reward: float) -> None:
    """It ends the trajectory."""
    feedback, wrong = _feedback(num_tries=3), Observation(_WRONG, rewards={"right_after_tries": 0.0})
    assert [feedback.step("#### 1775") for _ in range(num_wrong)] == [wrong] * num_wrong
    assert feedback.step("#### 1776") == Observation(done=True, rewards={"right_after_tries": reward})


def test_the_last_try_ends_the_trajectory() -> None:
    """And a new one has all of them."""
    feedback = _feedback(num_tries=2, message="No.")
    for _ in range(2):
        feedback.reset(PROBLEM)
        assert feedback.step("#### 1").text == "No."
        assert feedback.step("#### 1776 or so, not 5") == Observation(done=True, rewards={"right_after_tries": 0.0})
    feedback.reset(tiny.problem(0, answer="\\frac{1}{"))
    assert feedback.step("#### 5").done  # nobody can judge another try either


def test_what_is_said_leaks_nothing_of_the_answer() -> None:
    """It depends on whether there is an answer, and on nothing else."""
    said = {_feedback().step(f"#### {number}").text for number in (*range(50), 1775, 1777, 17760)}
    assert said == {_WRONG}
    assert _feedback().step("It is about 1776.").text == "No final answer was found. State it as asked."


def test_answers_are_graded_in_the_processes_of_the_pool() -> None:
    """Algebra included."""
    problem = tiny.problem(0, answer="\\frac{x+1}{2}", question="Simplify.")
    with Environments(ToolsConfig(environment="feedback", num_workers=1)) as environments:
        episode = environments.begin(problem)
        assert not episode.step("So $\\boxed{\\frac{x}{2}}$.").result().observation.done
        answer = episode.step("So $\\boxed{\\frac{1}{2}x + \\frac{1}{2}}$.").result()
        assert answer.observation == Observation(done=True, rewards={"right_after_tries": 0.5})
