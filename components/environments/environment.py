"""What a policy acts in: the interface of environments, and those that answer calls of one tool.

An environment reads what the model wrote in a turn, and answers. To add a built-in one, write such a class in a file of
its own here, name it in `BUILT_IN` of worker.py, and its arguments in shared/tools.py; a user's own is any class of
this kind, named in the params as `package.module:Class`. It lives in a process of its own (worker.py), which has its
limits: it may hang or crash without harm to others.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from components.shared.problem import Problem
from components.shared.tools import FUNCTIONS, Call, CallError, CallFormat, find_call

_MAX_NAME_CHARACTERS = 40


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to a turn."""

    text: str = ""
    """What the model reads next."""
    done: bool = False
    """Whether the trajectory ends here; its text is then not read by the model."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward of this turn, by name."""


class Environment(Protocol):
    """One trajectory's environment: made with the arguments of its config, and used for that trajectory alone.

    It answers the same to the same turns: a trajectory that is continued elsewhere is played again up to there.
    """

    def reset(self, problem: Problem) -> None:
        """Begin a trajectory."""

    def step(self, text: str) -> Observation:
        """Answer what the model wrote in a turn, without its end token."""


class ToolEnvironment(ABC):
    """An environment that answers calls of one tool; a turn without a call ends the trajectory."""

    name: str
    """Of the tool, one of `FUNCTIONS`."""

    def __init__(self, call_format: CallFormat | None, max_calls: int | None) -> None:
        self._call_format, self._max_calls = call_format, max_calls
        self._num_calls = 0
        (self._argument,) = FUNCTIONS[self.name].arguments

    def reset(self, problem: Problem) -> None:
        """Begin a trajectory."""
        self._num_calls = 0

    def step(self, text: str) -> Observation:
        """Answer the last call of a turn, or say what is wrong with it."""
        call = find_call(text, self._call_format)
        return Observation(self._answer(call)) if call else Observation(done=True)

    def _answer(self, call: Call) -> str:
        if call.error:
            return call.error
        if call.name != self.name:
            return f'There is no tool "{call.name[:_MAX_NAME_CHARACTERS]}"; the tool is "{self.name}".'
        if self._num_calls == self._max_calls:
            return "No calls are left; give the answer."
        self._num_calls += 1
        try:
            return self.use(call.text(self._argument))
        except CallError as error:
            return f"Error: {error}"

    @abstractmethod
    def use(self, text: str) -> str:
        """Return the answer to a call; CallError where it cannot be answered."""
