"""Feedback: the model learns that its answer is wrong and may try again; it never reads the right answer."""

from components.environments.environment import Observation
from components.grading.grade import grade
from components.grading.verdicts import Reason, Verdict
from components.shared.problem import Problem
from components.shared.tools import FeedbackArguments, ToolsConfig

RIGHT_AFTER_TRIES = "right_after_tries"
"""Name of the reward: 1 if the first try is right, `discount` if the second is, `discount` squared if the third is."""
_NO_ANSWER = "No final answer was found. State it as asked."


class Feedback:
    """Grades every turn as an answer; a right answer or the last try ends the trajectory."""

    def __init__(self, config: ToolsConfig) -> None:
        self._arguments = FeedbackArguments.model_validate(config.arguments)

    @staticmethod
    def prepare(_: ToolsConfig) -> None:
        """Import the libraries for algebra before workers are forked, so that all share them."""
        from components.grading import algebra

        algebra.same_value(r"\sin{x}\cos{x}", r"\frac{\sin{2x}}{2}")  # the first comparison imports the libraries

    def reset(self, problem: Problem) -> None:
        """Begin a trajectory."""
        self._problem, self._num_tries = problem, 0

    def step(self, text: str) -> Observation:
        """Grade the answer; end the trajectory if it is right or no tries are left."""
        result = grade(self._problem.answer, text, self._arguments.answer, self._problem.question)
        self._num_tries += 1
        if result.verdict is Verdict.RIGHT:
            reward = self._arguments.discount ** (self._num_tries - 1)
            return Observation(done=True, rewards={RIGHT_AFTER_TRIES: reward})
        # An unscorable answer ends the trajectory, too: the next try would be unscorable as well.
        is_last = self._num_tries == self._arguments.num_tries or result.verdict is Verdict.UNSCORABLE
        message = _NO_ANSWER if result.reason is Reason.NO_ANSWER else self._arguments.message
        return Observation("" if is_last else message, done=is_last, rewards={RIGHT_AFTER_TRIES: 0.0})
