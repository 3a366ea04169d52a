"""An environment that answers whatever a model writes, for tests."""

from components.environments.environment import Observation
from components.shared.problem import Problem


class Echo:
    """Tells which turn it was, up to the third; one problem is too much for it."""

    def __init__(self, too_much: str = "") -> None:
        self.too_much = too_much

    def reset(self, problem: Problem) -> None:
        """See `Environment`."""
        self._problem, self._num_turns = problem, 0

    def step(self, text: str) -> Observation:
        """See `Environment`."""
        self._num_turns += 1
        if self._problem.id == self.too_much:
            raise ValueError("this is too much")
        return Observation(str(self._num_turns), done=self._num_turns == 3)
