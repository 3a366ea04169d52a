"""The reward protocol and the built-in rewards.

A reward scores one completion, compares the completions of a group, or scores the steps of a completion by their text:

    (problem, completion, grade) -> float
    (problem, completions, grades) -> one float for each completion     (decorated with `group_reward`)
    (problem, steps, grade) -> one float for each step                  (decorated with `step_reward`)

To add a built-in reward, write such a function here and register it with `built_in`. A custom reward is the same kind
of function in any module, named in the params as `package.module:function`. One that waits for a server is an `async
def`, or marked `threaded_reward` (slow_rewards.py). NaN means no reward, for a completion that cannot be scored. If a
reward fails, the completion has no reward either, and counts as unscorable.

Do not import torch here: configs are validated against the registry, also where torch is not installed.

Shape suffixes: G completions per prompt (see objective.py)
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from components.grading.extract import outside_thoughts
from components.grading.verifier import Grade, Verdict, is_unit_tests, require_sandbox
from components.shared.custom_code import is_custom
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.train_grpo.custom_rewards import RewardFunction, load_reward
from components.train_grpo.judge import JudgeConfig, judge
from components.train_grpo.process_supervision import outcome

if TYPE_CHECKING:  # torch, and the config, which reads the registry
    from components.rollout.sampler import Completion
    from components.train_grpo.config import TrainGRPOConfig

Settings = Callable[["TrainGRPOConfig", ModelConfig], dict[str, Any]]
"""Keyword arguments of a built-in reward, from the config and from that of the model."""
_FunctionT = TypeVar("_FunctionT", bound=RewardFunction)

_THOUGHT_FIRST = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


# The registry ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltIn:
    """A reward that the params can name."""

    function: RewardFunction | None
    """None for those that `Scorer` itself computes."""
    key: str | None = None
    """The key of `reward` that must be set if and only if the reward has a weight."""
    settings: Settings = lambda config, model: {}


BUILT_IN = {
    "reward_model": BuiltIn(None, key="model"),  # the learned model's score of the completion, or of each step
    "environment": BuiltIn(None),  # the environment's rewards, summed over the completion, or for each turn
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
    for each completion, NaN for one that cannot be scored. If it returns another number of values, none of the
    completions has a reward.

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
    """Mark a reward that waits, such as for a server: it is called for many completions concurrently, in threads.

    Its arguments and result are the same as without the decorator; an `async def` needs no decorator. Calls that raise
    ConnectionError, TimeoutError or RetryableError are repeated, within the limits of `reward.calls`.

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

    It takes the problem, the texts of the steps and the completion's grade, and returns a number for each step. If it
    returns another number of values, the completion has no reward. `supervision: outcome` refuses it.

    >>> @step_reward
    ... def calculates(problem, steps, grade):
    ...     return [0.1 if "=" in step else 0.0 for step in steps]
    >>> calculates(None, ["3 + 4 = 7", "#### 7"], None)
    [0.1, 0.0]
    """
    function.judges_steps = True  # type: ignore[attr-defined]
    return function


def require_rewards(config: "TrainGRPOConfig", problems: Sequence[Problem]) -> None:
    """Raise PipelineError if a custom reward cannot be used, or if problems have unit tests but there is no sandbox."""
    for name in filter(is_custom, config.reward.names):
        load_reward(name, supervision=config.reward.supervision)
    if any(is_unit_tests(problem.answer) for problem in problems):
        require_sandbox()


# The built-in rewards -------------------------------------------------------------------------------------------------


@built_in("accuracy")
def accuracy(problem: Problem, completion: "Completion", grade: Grade) -> float:
    """Return 1 for a right final answer, 0 for a wrong one, and NaN for one that cannot be graded."""
    return outcome(grade)


@built_in("code_tests")
def code_tests(problem: Problem, completion: "Completion", grade: Grade) -> float:
    """Return the share of unit tests passed; 0 for a truncated completion, NaN for a problem without tests."""
    if grade.verdict is Verdict.UNSCORABLE:
        return math.nan
    if not completion.finished:
        return 0.0
    return math.nan if grade.tests_passed is None else grade.tests_passed


@built_in("format", settings=lambda config, model: {"model": model})
def answer_format(problem: Problem, completion: "Completion", grade: Grade, *, model: ModelConfig) -> float:
    """Return 1 if some reasoning precedes an answer in the required form, else 0, whether the answer is right or wrong.

    If the prompt asks for thoughts, or begins one, the completion must be one thought and then the answer; of several
    turns, the first must begin with the thought. Code must be in a fenced block, and needs no reasoning before it.
    """
    first_turn = completion.turns[0].response if completion.turns else completion.response
    must_think = completion.in_thought or model.asks_for_thoughts(problem.source)
    if not completion.finished or (must_think and not _thinks_first(first_turn)):
        return 0.0
    if is_unit_tests(problem.answer):
        return float(grade.extracted is not None)
    return float(completion.is_worked(model.answer))


def _thinks_first(text: str) -> bool:
    """Return whether a response is a single thought that is not empty, and then an answer without one."""
    match = _THOUGHT_FIRST.fullmatch(text)
    if match is None:
        return False
    thought, answer = match.groups()
    return thought.strip() != "" and "think>" not in thought + answer


@built_in("length")
@group_reward
def length(problem: Problem, completions_G: Sequence["Completion"], grades_G: Sequence[Grade]) -> list[float]:
    """Return the length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3).

    0.5 for the shortest, falling linearly to -0.5 for the longest; never above 0 for a wrong answer. A completion that
    is neither right nor wrong has a reward of NaN, and its length does not count.
    """
    pairs = list(zip(completions_G, grades_G, strict=True))
    lengths = [completion.num_tokens for completion, grade in pairs if grade.verdict is not Verdict.UNSCORABLE]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    rewards_G = []
    for completion, grade in pairs:
        reward = 0.0
        if grade.verdict is Verdict.UNSCORABLE:
            reward = math.nan
        elif longest > shortest:
            reward = 0.5 - (completion.num_tokens - shortest) / (longest - shortest)
        rewards_G.append(min(0.0, reward) if grade.verdict is Verdict.WRONG else reward)
    return rewards_G


@built_in("overlong", key="overlong_buffer_tokens", settings=lambda config, model: {"config": config})
def overlong(problem: Problem, completion: "Completion", grade: Grade, *, config: "TrainGRPOConfig") -> float:
    """Return 0 up to the buffer, then a line down to -1 at the length limit (DAPO, arXiv 2503.14476, equation 13)."""
    buffer, limit = config.reward.overlong_buffer_tokens, config.sampling.max_new_tokens
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
    """Return another model's rating of the response without its thoughts, from 0 to 1."""
    return judge(problem, outside_thoughts(completion.response), settings, timeout_s)
