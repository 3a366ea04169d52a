"""The environment of tools.py, in a file of its own: the processes that run it import nothing else of benchmarks."""

from components.environments.environment import Observation
from components.shared.problem import Problem


class Look:
    """Answers each turn but the last with the same words."""

    def __init__(self, text: str, num_turns: int) -> None:
        self._text, self._num_turns = text, num_turns

    def reset(self, problem: Problem) -> None:
        """See `Environment`."""
        del problem
        self._num_left = self._num_turns

    def step(self, text: str) -> Observation:
        """See `Environment`."""
        del text
        self._num_left -= 1
        return Observation(self._text, done=self._num_left == 0)
