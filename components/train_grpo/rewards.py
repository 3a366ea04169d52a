"""What a completion is worth: the reward protocol, the built-in rewards, and their combination.

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

Shape suffixes: P prompts, G completions per prompt (see objective.py)
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from components.grading.extract import outside_thoughts
from components.grading.verifier import Grade, Verdict, is_unit_tests, require_sandbox
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.shared.progress import say
from components.train_grpo.custom_rewards import (
    Failure,
    RewardFunction,
    ask,
    in_order,
    is_custom,
    load_reward,
    numbers_of,
)
from components.train_grpo.judge import JudgeConfig, judge
from components.train_grpo.process_supervision import Step, line_steps, outcome, turn_steps
from components.train_grpo.slow_rewards import Answers, Call, is_slow

if TYPE_CHECKING:  # torch, and the config, which reads the registry
    from components.policy.checkpoint import Checkpoint
    from components.rollout.sampler import Completion
    from components.train_grpo.config import TrainGRPOConfig
    from components.train_grpo.reward_model import RewardModel

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


@built_in("judge", key="judge", settings=lambda config, model: {"settings": config.reward.judge})
async def judged(problem: Problem, completion: "Completion", grade: Grade, *, settings: JudgeConfig) -> float:
    """Return what a model says of the response, from 0 to 1; its thoughts are left out."""
    return await judge(problem, outside_thoughts(completion.response), settings)


# Scoring --------------------------------------------------------------------------------------------------------------


@dataclass
class Scored:
    """A completion with its grade and rewards."""

    completion: "Completion"
    grade: Grade
    steps: tuple[Step, ...]
    """One step for outcome supervision."""
    rewards: dict[str, tuple[float, ...]]
    """Of its source, by name: a value for each step, or one for the completion, added to that of its last step."""
    failure: Failure | None = None
    """The first reward that failed, which leaves the completion without any."""

    @property
    def unscorable(self) -> Failure | None:
        """Why the completion cannot be scored; None where it can."""
        if self.grade.verdict is Verdict.UNSCORABLE:
            if self.completion.failure is not None:
                return Failure(self.grade.reason, f"its environment failed: {self.completion.failure}")
            return Failure(self.grade.reason, f"the grader says: {self.grade.why}")
        return self.failure

    def combined(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        """Return the weighted sum of the rewards for each step; a missing reward makes it NaN."""
        total = [0.0] * len(self.steps)
        for name, weight in weights.items():
            values = self.rewards[name]
            for place, value in enumerate(values, start=len(total) - len(values)):
                total[place] += weight * value
        return tuple(total)


@dataclass(frozen=True)
class Group:
    """A problem with the completions that are each other's baseline."""

    problem: Problem
    scored_G: list[Scored]

    @property
    def num_right(self) -> int:
        """Completions with the right answer."""
        return sum(scored.grade.verdict is Verdict.RIGHT for scored in self.scored_G)

    @property
    def num_scorable(self) -> int:
        """Completions whose answer could be graded."""
        return sum(scored.grade.verdict is not Verdict.UNSCORABLE for scored in self.scored_G)


class Scorer:
    """Grades completions and computes their rewards."""

    def __init__(
        self,
        config: "TrainGRPOConfig",
        checkpoint: "Checkpoint",
        grade: Callable[[list[Problem], list["Completion"], AnswerPolicy], list[Grade]],
        reward_model: "RewardModel | None" = None,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.reward_model = reward_model
        self._grade = grade
        self._functions: dict[str, RewardFunction] = {}
        for name in config.reward.names:
            reward = BuiltIn(load_reward(name)) if is_custom(name) else BUILT_IN[name]
            if reward.function is not None:
                settings = reward.settings(config, checkpoint.config)
                self._functions[name] = update_wrapper(partial(reward.function, **settings), reward.function)
        self.answers = Answers()
        """What rewards that wait have answered before; new answers are kept there."""
        self._failures_shown: set[str] = set()

    def __call__(self, problems_P: Sequence[Problem], completions_PG: Sequence[Sequence["Completion"]]) -> list[Group]:
        """Return the completions of each problem with their rewards; a masked or failed one has none.

        They are graded in one call, which keeps every grader busy.
        """
        problems_B = [problem for problem, group in zip(problems_P, completions_PG, strict=True) for _ in group]
        grades_B = iter(self._grade(problems_B, list(chain(*completions_PG)), self.checkpoint.config.answer))
        groups = [
            Group(problem, [self._without_reward(problem, completion, next(grades_B)) for completion in completions_G])
            for problem, completions_G in zip(problems_P, completions_PG, strict=True)
        ]
        for group in groups:
            self._show_masked(group)
        masked = partial(is_masked, self.config)
        rewarded_PG = [[each for each in group.scored_G if not masked(each.completion)] for group in groups]
        pairs = zip(groups, rewarded_PG, strict=True)
        learned = self._learned(
            [each for group, scored_G in pairs if self._uses_model(group.problem) for each in scored_G]
        )
        called = self._called([(group.problem, each) for group, each in zip(groups, rewarded_PG, strict=True)])
        for group, scored_G in zip(groups, rewarded_PG, strict=True):
            self._reward(group.problem, scored_G, learned, called)
        return groups

    def _called(self, asked_P: Sequence[tuple[Problem, Sequence[Scored]]]) -> Iterator[Any]:
        """Return the answers of rewards that wait, to all completions of a rollout at once, as `_column` takes them."""
        calls: list[Call] = []
        for problem, scored_G in asked_P:
            for name in self.config.reward.weights_of(problem.source) if scored_G else ():
                if (function := self._functions.get(name)) and is_slow(function):
                    calls += calls_about(name, function, problem, scored_G)
        return iter(self.answers.get(calls, self.config.reward.calls))

    def _uses_model(self, problem: Problem) -> bool:
        return "reward_model" in self.config.reward.weights_of(problem.source)

    def _learned(self, scored: Sequence[Scored]) -> Iterator[tuple[float, ...]]:
        """Return the scores of the reward model for all steps of each completion.

        Those of a whole rollout in one call: where the model is sharded, all processes make it together.
        """
        if "reward_model" not in self.config.reward.names:
            return iter(())
        assert self.reward_model is not None
        tokens = [each.completion.tokens for each in scored]
        step_ends = [
            tuple(map(sequence.length_to, (step.end for step in each.steps)))
            for each, sequence in zip(scored, tokens, strict=True)
        ]
        return map(tuple, self.reward_model.score(tokens, step_ends))

    def _without_reward(self, problem: Problem, completion: "Completion", grade: Grade) -> Scored:
        steps: tuple[Step, ...] = (Step(completion.num_tokens, outcome(grade)),)
        if self.config.reward.supervision == "process":
            steps = tuple(line_steps(completion, grade, self.checkpoint.decode))
        elif self.config.reward.supervision == "turn":
            steps = tuple(turn_steps(completion, grade))
        names = self.config.reward.weights_of(problem.source)
        return Scored(completion, grade, steps, dict.fromkeys(names, (math.nan,) * len(steps)))

    def _reward(
        self,
        problem: Problem,
        scored_G: Sequence[Scored],
        learned: Iterator[tuple[float, ...]],
        called: Iterator[Any],
    ) -> None:
        """Set the rewards of completions, or their first failure; print each kind of failure once."""
        names = self.config.reward.weights_of(problem.source) if scored_G else ()
        columns = {name: self._column(name, problem, scored_G, learned, called) for name in names}
        for g, scored in enumerate(scored_G):
            values = {name: column[g] for name, column in columns.items()}
            scored.failure = next((value for value in values.values() if isinstance(value, Failure)), None)
            if scored.failure is None:
                scored.rewards = {name: value for name, value in values.items() if not isinstance(value, Failure)}
            else:
                self._show_once(problem, scored.failure)

    def _show_masked(self, group: Group) -> None:
        """Print why completions of a group are masked that no setting masks."""
        for scored in group.scored_G:
            if scored.completion.failure is not None and scored.unscorable is not None:
                self._show_once(group.problem, scored.unscorable)
            elif not scored.completion.num_tokens:
                reason = "its prompt fills the context of the model: lower validate_data.max_prompt_tokens"
                self._show_once(group.problem, Failure("no tokens", reason))

    def _show_once(self, problem: Problem, failure: Failure) -> None:
        """Print why a completion has no reward, the first time that there is this kind of reason."""
        if failure.kind not in self._failures_shown:
            self._failures_shown.add(failure.kind)
            say("train_grpo", f"warning: no reward for a completion of {problem.id}: {failure.message}")

    def _column(
        self,
        name: str,
        problem: Problem,
        scored_G: Sequence[Scored],
        learned: Iterator[tuple[float, ...]],
        called: Iterator[Any],
    ) -> "Sequence[tuple[float, ...] | Failure]":
        """Return one reward of each completion: a value for every step, or one for the last."""
        if name == "reward_model":
            return list(islice(learned, len(scored_G)))
        if name == "environment":
            by_turn = self.config.reward.supervision == "turn"
            return [environment_rewards(scored.completion, by_turn=by_turn) for scored in scored_G]
        weight, deadline_s = self.config.reward.weights_of(problem.source)[name], self.config.engine.deadline_s
        return values_of(name, weight, self._functions[name], problem, scored_G, called, deadline_s=deadline_s)


def values_of(
    name: str,
    weight: float,
    function: RewardFunction,
    problem: Problem,
    scored_G: Sequence[Scored],
    called: Iterator[Any],
    *,
    deadline_s: float,
) -> "Sequence[tuple[float, ...] | Failure]":
    """Return what a function says of each completion: a value for every step, or one for the last."""
    grades_G = [scored.grade for scored in scored_G]
    if is_slow(function):
        of_group = getattr(function, "compares_group", False)
        answers = next(called) if of_group else list(islice(called, len(scored_G)))
        pairs = zip(in_order(name, answers, len(scored_G)), grades_G, strict=True)
        return [numbers_of(name, weight, each, grade) for each, grade in pairs]
    asked_G: list[Any] = [scored.completion for scored in scored_G]
    if getattr(function, "judges_steps", False):
        asked_G = [[step.text for step in scored.steps] for scored in scored_G]
    return ask(name, weight, function, problem, asked_G, grades_G, deadline_s=deadline_s)


def calls_about(name: str, function: RewardFunction, problem: Problem, scored_G: Sequence[Scored]) -> list[Call]:
    """Return the calls of a reward that waits: one for each completion, or one for the group."""
    in_thread = getattr(function, "runs_in_thread", False)
    texts_G = [scored.completion.text for scored in scored_G]
    completions_G, grades_G = ([getattr(each, key) for each in scored_G] for key in ("completion", "grade"))
    if getattr(function, "compares_group", False):
        whole = partial(function, problem, completions_G, grades_G)
        return [Call(name, json.dumps([problem.id, *texts_G]), whole, in_thread)]
    return [
        Call(name, json.dumps([problem.id, text]), partial(function, problem, completion, grade), in_thread)
        for text, completion, grade in zip(texts_G, completions_G, grades_G, strict=True)
    ]


def environment_rewards(completion: "Completion", *, by_turn: bool) -> tuple[float, ...]:
    """Return the sums of the parts of the reward that the environment gave: one for each turn, or one for all."""
    turns = tuple(sum(turn.rewards.values()) for turn in completion.turns)
    return turns if by_turn and turns else (sum(turns, 0.0),)


def is_masked(config: "TrainGRPOConfig", completion: "Completion") -> bool:
    """Return whether a completion is without reward and out of the loss.

    That is a truncated one with `sampling.truncated: mask`, one whose environment failed, as the model may have
    answered well without the failure, and one without a single token, as its prompt fills the context.
    """
    is_excluded = config.sampling.truncated == "mask" and completion.truncated
    return is_excluded or completion.failure is not None or completion.num_tokens == 0
