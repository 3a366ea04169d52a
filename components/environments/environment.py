"""The interface of environments, and the base class of those that answer calls of one tool.

An environment reads what the model wrote in a turn and returns an observation. To add a built-in one, write its class
in a new file here, name it in `BUILT_IN` of worker.py, and define its arguments in shared/tools.py. A user's
environment is any such class, named in the params as `package.module:Class`. Environments run in worker processes with
limits (worker.py): one that hangs or crashes does not harm the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from components.shared.problem import Problem
from components.shared.tools import FUNCTIONS, NEXT_ANSWER, Call, CallError, CallFormat, find_calls

_MAX_NAME_CHARACTERS = 40


@dataclass(frozen=True)
class Observation:
    """What an environment returns for a turn.

    >>> Observation("Too low.", rewards={"form": -0.1})
    Observation(text='Too low.', done=False, rewards={'form': -0.1})
    """

    text: str = ""
    """What the model reads next; `NEXT_ANSWER` separates the answers to several calls."""
    done: bool = False
    """Whether the trajectory ends here, so that the model does not read the text."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Parts of this turn's reward, by name."""


class Environment(Protocol):
    """The environment of one trajectory, created for it with the arguments in the config.

    It must be deterministic: the same turns give the same observations, because turns are replayed when a trajectory
    continues in another process. A method `close()` is optional; it is called when the trajectory has ended. After an
    exception, the trajectory has failed and has no reward.

    >>> class Politeness:
    ...     def reset(self, problem):
    ...         pass
    ...
    ...     def step(self, text):
    ...         if "please" in text:
    ...             return Observation(done=True, rewards={"polite": 1.0})
    ...         return Observation("Say please.")
    >>> Politeness().step("More apples").text
    'Say please.'
    """

    def reset(self, problem: Problem) -> None:
        """Begin a trajectory."""

    def step(self, text: str) -> Observation:
        """Return the observation that follows a turn of the model; `text` is without the turn's end token."""


class ToolEnvironment(ABC):
    r"""An environment that answers calls of one tool; a turn without a call ends the trajectory.

    >>> class Capitals(ToolEnvironment):
    ...     name = "search"
    ...
    ...     def __init__(self) -> None:
    ...         super().__init__("fenced", max_calls=2)
    ...
    ...     def use(self, text):
    ...         return {"France": "Paris"}.get(text, "Nothing was found.")
    >>> Capitals().step("```search\nFrance\n```\n").text
    'Paris'
    >>> Capitals().step("It is Paris.").done
    True
    """

    name: str
    """The tool's name, one of `FUNCTIONS`."""

    def __init__(self, call_format: CallFormat | None, max_calls: int | None) -> None:
        self._call_format, self._max_calls = call_format, max_calls
        self._num_calls = 0
        (self._argument,) = FUNCTIONS[self.name].arguments

    def reset(self, problem: Problem) -> None:
        """Begin a trajectory."""
        self._num_calls = 0

    def step(self, text: str) -> Observation:
        """Return the answers to the calls of a turn, in order; the answer to an invalid call is the error."""
        answers = [self._answer(call).replace(NEXT_ANSWER, " ") for call in find_calls(text, self._call_format)]
        return Observation(NEXT_ANSWER.join(answers), done=not answers)

    def _answer(self, call: Call) -> str:
        """Return the tool's answer to a call, or the reason why there is none."""
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
        """Return the answer to a call with this argument; CallError if it cannot be answered."""
