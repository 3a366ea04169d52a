"""The reward protocol and the built-in rewards.

A reward looks at one completion, or compares the completions of a group:

    (problem, completion, grade) -> float
    (problem, completions, grades) -> one float for each completion     (decorated with `group_reward`)

or at the texts of its steps, with `supervision: process` or `turn`:

    (problem, steps, grade) -> one float for each step                  (decorated with `step_reward`)

To add a built-in reward, write such a function here and register it with `built_in`. A user's own reward is the same
kind of function in any module, named in the params as `package.module:function`. One that waits for a server is an
`async def`, or marked `threaded_reward` (slow_rewards.py). NaN is no reward at all, for what could not be scored. A
completion for which a reward fails has none either, and is counted as unscorable.

No torch is imported here: configurations are checked against the registry, wherever that is.

Shape suffixes: G completions per prompt (see objective.py)
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from components.grading.extract import outside_thoughts
from components.grading.verifier import Grade, Verdict, is_unit_tests, require_sandbox
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.train_grpo.custom_rewards import RewardFunction, is_custom, load_reward
from components.train_grpo.judge import JudgeConfig, judge
from components.train_grpo.process_supervision import outcome

if TYPE_CHECKING:  # torch, and the config, which reads the registry
    from components.rollout.sampler import Completion
    from components.train_grpo.config import TrainGRPOConfig

Settings = Callable[["TrainGRPOConfig", ModelConfig], dict[str, Any]]
"""Keyword arguments of a built-in reward, from the config and from that of the model."""
_FunctionT = TypeVar("_FunctionT", bound=RewardFunction)

_THOUGHT_FIRST = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


# The registry ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltIn:
    """A reward that the params can name."""

    function: RewardFunction | None
    """None for those that have a value for each step: the scorer computes them itself."""
    key: str | None = None
    """The key of `reward` that is set together with its weight, and only then."""
    settings: Settings = lambda config, model: {}


BUILT_IN = {
    "reward_model": BuiltIn(None, key="model"),  # what the learned model says of the completion, or of each step
    "environment": BuiltIn(None),  # the sum of what the environment says of the completion, or of each turn
}


def built_in(
    name: str, *, key: str | None = None, settings: Settings = BuiltIn.settings
) -> Callable[[_FunctionT], _FunctionT]:
    """Register a reward under the name that it has in `reward.weights`."""

    def register(function: _FunctionT) -> _FunctionT:
        BUILT_IN[name] = BuiltIn(function, key, settings)
        return function

    return register


def group_reward(function: _FunctionT) -> _FunctionT:
    """Mark a reward that compares the completions of a group.

    It takes the problem, the unmasked completions and their grades (two lists of equal length), and returns a number
    for each completion, NaN for one that cannot be scored. Any other number of values leaves all of them without a
    reward.

    >>> from components.grading.verifier import grade
    >>> from components.shared.answer_policy import AnswerPolicy
    >>> @group_reward
    ... def rare(problem, completions, grades):
    ...     num_right = sum(grade.verdict == "right" for grade in grades)
    ...     return [1 / num_right if grade.verdict == "right" else 0.0 for grade in grades]
    >>> texts = ["#### 7", "#### 8", "It is seven: #### 7"]
    >>> rare(None, texts, [grade("7", text, AnswerPolicy.MARKED) for text in texts])
    [0.5, 0.0, 0.5]
    """
    function.compares_group = True  # type: ignore[attr-defined]
    return function


def threaded_reward(function: _FunctionT) -> _FunctionT:
    """Mark a reward that waits, such as for a server: it is called for many completions at once, in threads.

    It takes and returns the same as without the decorator; an `async def` needs no decorator. A call that raises
    ConnectionError, TimeoutError or RetryableError is repeated, within the limits of `reward.calls`.

    >>> from urllib.request import urlopen
    >>> @threaded_reward
    ... def served(problem, completion, grade):
    ...     with urlopen("data:,0.5") as answer:  # or the address of your server
    ...         return float(answer.read())
    >>> served(None, None, None)
    0.5
    """
    function.runs_in_thread = True  # type: ignore[attr-defined]
    return function


def step_reward(function: _FunctionT) -> _FunctionT:
    """Mark a reward that scores each step of a completion: lines or turns, as `reward.supervision` says.

    It takes the problem, the texts of the steps and the completion's grade, and returns a number for each step. Any
    other number of values leaves the completion without a reward. With `supervision: outcome` it is refused.

    >>> @step_reward
    ... def calculates(problem, steps, grade):
    ...     return [0.1 if "=" in step else 0.0 for step in steps]
    >>> calculates(None, ["3 + 4 = 7", "#### 7"], None)
    [0.1, 0.0]
    """
    function.judges_steps = True  # type: ignore[attr-defined]
    return function


def require_rewards(config: "TrainGRPOConfig", problems: Sequence[Problem]) -> None:
    """Raise PipelineError where a custom reward cannot be loaded, or there is no sandbox for unit tests."""
    for name in filter(is_custom, config.reward.names):
        if getattr(load_reward(name), "judges_steps", False) and config.reward.supervision == "outcome":
            key = "train_grpo.reward.supervision"
            raise PipelineError(f"{key}: {name} rewards each step; set it to process (lines) or turn")
    if any(is_unit_tests(problem.answer) for problem in problems):
        require_sandbox()


# The built-in rewards -------------------------------------------------------------------------------------------------


@built_in("accuracy")
def accuracy(problem: Problem, completion: "Completion", grade: Grade) -> float:
    """Return 1 for a right final answer, 0 for a wrong one, and NaN for one that cannot be graded."""
    return outcome(grade)


@built_in("code_tests")
def code_tests(problem: Problem, completion: "Completion", grade: Grade) -> float:
    """Return the share of the unit tests passed; 0 for a truncated completion, NaN where there are no tests."""
    if grade.verdict is Verdict.UNSCORABLE:
        return math.nan
    if not completion.finished:
        return 0.0
    return math.nan if grade.tests_passed is None else grade.tests_passed


@built_in("format", settings=lambda config, model: {"model": model})
def answer_format(problem: Problem, completion: "Completion", grade: Grade, *, model: ModelConfig) -> float:
    """Return 1 where some reasoning leads to an answer in the designated place, else 0, whatever the answer is.

    Where the prompt asks for thoughts or begins one, the completion has to be one thought and, after it, the answer; of
    several turns the first begins with the thought. The place of code is a fenced block, and it needs no words before
    it.
    """
    begin = completion.response
    if len(completion.turns) > 1:
        begin = ("<think>" if completion.in_thought else "") + completion.turns[0].text
    must_think = completion.in_thought or model.asks_for_thoughts(problem.source)
    if not completion.finished or (must_think and not _thinks_first(begin)):
        return 0.0
    if is_unit_tests(problem.answer):
        return float(grade.extracted is not None)
    return float(completion.is_worked(model.answer))


def _thinks_first(text: str) -> bool:
    """Return whether a response is a single thought that is not empty, and then something else."""
    match = _THOUGHT_FIRST.fullmatch(text)
    return match is not None and bool(match["thought"].strip()) and "think>" not in match["thought"] + match["answer"]


@built_in("length")
@group_reward
def length(problem: Problem, completions_G: Sequence["Completion"], grades_G: Sequence[Grade]) -> list[float]:
    """Return the length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3).

    0.5 for the shortest, falling linearly to -0.5 for the longest; never above 0 for a wrong answer. A completion that
    is neither right nor wrong has no reward, and its length does not count.
    """
    outcomes_G = [outcome(grade) for grade in grades_G]
    counted = [each.num_tokens for each, right in zip(completions_G, outcomes_G, strict=True) if not math.isnan(right)]
    shortest, longest = min(counted, default=0), max(counted, default=0)
    rewards_G = []
    for completion, right in zip(completions_G, outcomes_G, strict=True):
        reward = 0.5 - (completion.num_tokens - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards_G.append(right if math.isnan(right) else reward if right else min(0.0, reward))
    return rewards_G


@built_in("overlong", key="overlong_buffer_tokens", settings=lambda config, model: {"config": config})
def overlong(problem: Problem, completion: "Completion", grade: Grade, *, config: "TrainGRPOConfig") -> float:
    """Return 0 up to the buffer, then a line down to -1 at the length limit (DAPO, arXiv 2503.14476, equation 13)."""
    buffer, limit = config.reward.overlong_buffer_tokens, config.max_sampled_tokens
    return -max(0, completion.num_tokens - (limit - buffer)) / buffer


@built_in(
    "judge",
    key="judge",
    settings=lambda config, model: {"settings": config.reward.judge, "timeout_s": config.reward.calls.timeout_s},
)
@threaded_reward
def judged(
    problem: Problem, completion: "Completion", grade: Grade, *, settings: JudgeConfig, timeout_s: float
) -> float:
    """Return what a model says of the response, from 0 to 1; its thoughts are left out."""
    return judge(problem, outside_thoughts(completion.response), settings, timeout_s)
