"""Feedback: the model is told that its answer is wrong and may try again; it is never told the right answer."""

from components.environments.environment import Observation
from components.grading.grade import grade
from components.grading.verdicts import Reason, Verdict
from components.shared.problem import Problem
from components.shared.tools import FeedbackArguments, ToolsConfig

RIGHT_AFTER_TRIES = "right_after_tries"
"""The part of the reward: 1 for a right answer at once, `discount` after one wrong try, its square after two."""
_NO_ANSWER = "No final answer was found. State it as asked."


class Feedback:
    """Grades every turn as an answer; a right answer or the last try ends the trajectory."""

    def __init__(self, config: ToolsConfig) -> None:
        self._arguments = FeedbackArguments.model_validate(config.arguments)
        self._num_tries = 0

    @staticmethod
    def prepare(_: ToolsConfig) -> None:
        """Import the libraries for algebra, which all processes then share."""
        from components.grading import algebra

        algebra.same_value(r"\sin{x}\cos{x}", r"\frac{\sin{2x}}{2}")

    def reset(self, problem: Problem) -> None:
        """Begin a trajectory."""
        self._problem, self._num_tries = problem, 0

    def step(self, text: str) -> Observation:
        """Grade the answer; end the trajectory where it is right or no tries are left."""
        problem = self._problem
        grading = grade(problem.answer, text, self._arguments.answer, problem.question)
        self._num_tries += 1
        if grading.verdict is Verdict.RIGHT:
            return Observation(
                done=True, rewards={RIGHT_AFTER_TRIES: self._arguments.discount ** (self._num_tries - 1)}
            )
        # Where no verdict is possible, another try would be graded no better.
        is_last = self._num_tries == self._arguments.num_tries or grading.verdict is Verdict.UNSCORABLE
        message = _NO_ANSWER if grading.reason is Reason.NO_ANSWER else self._arguments.message
        return Observation("" if is_last else message, done=is_last, rewards={RIGHT_AFTER_TRIES: 0.0})
