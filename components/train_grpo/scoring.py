"""The rewards of a rollout's completions: grading, each reward with a weight, and their combination.

Shape suffixes: P prompts, G completions per prompt (see objective.py)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from components.grading.verifier import Grade, Verdict
from components.rollout.sampler import Completion
from components.shared.answer_policy import AnswerPolicy
from components.shared.custom_code import is_custom
from components.shared.problem import Problem
from components.shared.progress import say
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.custom_rewards import Failure, RewardFunction, is_slow, load_reward, values_of
from components.train_grpo.process_supervision import Step, steps_of
from components.train_grpo.rewards import BUILT_IN, BuiltIn
from components.train_grpo.slow_rewards import Answers, calls_for

if TYPE_CHECKING:  # transformers, and what learns from the scores
    from components.policy.checkpoint import Checkpoint
    from components.train_grpo.reward_model import RewardModel


@dataclass
class ScoredCompletion:
    """A completion with its grade and rewards."""

    completion: Completion
    grade: Grade
    steps: tuple[Step, ...]
    """One step for outcome supervision."""
    rewards: dict[str, tuple[float, ...]]
    """By name: a value for each step, or a single one, which counts for the last step."""
    failure: Failure | None = None
    """The first reward that failed; then all of `rewards` are NaN."""

    @property
    def why_unscorable(self) -> Failure | None:
        """Why the completion cannot be scored; None if it can."""
        if self.grade.verdict is Verdict.UNSCORABLE:
            if self.completion.failure is not None:
                return Failure(self.grade.reason, f"its environment failed: {self.completion.failure}")
            return Failure(self.grade.reason, f"the grader says: {self.grade.why}")
        return self.failure

    def combined(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        """Return the weighted sum of the rewards for each step; a reward of NaN makes it NaN."""
        totals = [0.0] * len(self.steps)
        for name, weight in weights.items():
            values = self.rewards[name]
            # A single value is added to the last step.
            for index, value in enumerate(values, start=len(totals) - len(values)):
                totals[index] += weight * value
        return tuple(totals)


@dataclass(frozen=True)
class Group:
    """A problem and its completions, whose rewards are compared with each other."""

    problem: Problem
    scored_G: list[ScoredCompletion]

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
        config: TrainGRPOConfig,
        checkpoint: "Checkpoint",
        grade: Callable[[list[Problem], list[Completion], AnswerPolicy], list[Grade]],
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
                # update_wrapper copies the attributes by which decorators such as group_reward mark a function.
                self._functions[name] = update_wrapper(partial(reward.function, **settings), reward.function)
        self.answers = Answers()
        """Earlier answers of slow rewards, to which new ones are added."""
        self._failures_shown: set[str] = set()

    def __call__(self, problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[Group]:
        """Return a group per problem; masked completions, and those for which a reward failed, have rewards of NaN."""
        problems_B = [problem for problem, group in zip(problems_P, completions_PG, strict=True) for _ in group]
        grades_B = iter(self._grade(problems_B, list(chain(*completions_PG)), self.checkpoint.config.answer))
        groups, unmasked_groups = [], []
        for problem, completions_G in zip(problems_P, completions_PG, strict=True):
            group = Group(problem, [self._without_reward(problem, each, next(grades_B)) for each in completions_G])
            groups.append(group)
            self._show_masked(group)
            unmasked_G = [each for each in group.scored_G if not is_masked(self.config, each.completion)]
            if unmasked_G:
                unmasked_groups.append(Group(problem, unmasked_G))
        self._reward(unmasked_groups)
        return groups

    def _reward(self, groups: Sequence[Group]) -> None:
        """Set the rewards of completions, or their first failure; print each kind of failure once."""
        answers = self._slow_answers(groups)
        for name in self.config.reward.names:
            groups_with = self._groups_with(name, groups)
            values_PG = self._values(name, groups_with, answers)
            for group, values_G in zip(groups_with, values_PG, strict=True):
                for scored, value in zip(group.scored_G, values_G, strict=True):
                    if isinstance(value, Failure):
                        scored.failure = scored.failure or value
                    else:
                        scored.rewards[name] = value
        for group in groups:
            for scored in group.scored_G:
                if scored.failure is not None:
                    scored.rewards = dict.fromkeys(scored.rewards, (math.nan,) * len(scored.steps))
                    self._show_once(group.problem, scored.failure)

    def _groups_with(self, name: str, groups: Sequence[Group]) -> list[Group]:
        """Return the groups whose source has the reward `name`."""
        return [group for group in groups if name in self.config.reward.weights_of(group.problem.source)]

    def _slow_answers(self, groups: Sequence[Group]) -> Iterator[Any]:
        """Call all slow rewards concurrently; iterate over their answers, reward by reward and group by group."""
        calls = []
        for name, function in self._functions.items():
            if is_slow(function):
                for group in self._groups_with(name, groups):
                    calls += calls_for(name, function, group.problem, group.scored_G)
        return iter(self.answers.get(calls, self.config.reward.calls))

    def _values(
        self, name: str, groups: Sequence[Group], answers: Iterator[Any]
    ) -> Sequence[Sequence[tuple[float, ...] | Failure]]:
        """Return the reward `name` of each completion, (P, G): values as in `ScoredCompletion.rewards`, or a Failure.

        If the reward is slow, its values are the next of `answers`.
        """
        if name == "reward_model":
            # A single call, also in processes without groups: all must make it together, as the model may be sharded.
            assert self.reward_model is not None
            scored_B = [scored for group in groups for scored in group.scored_G]
            ends_B = [tuple(each.completion.tokens.length_to(step.end) for step in each.steps) for each in scored_B]
            scores = map(tuple, self.reward_model.score([each.completion.tokens for each in scored_B], ends_B))
            return [list(islice(scores, len(group.scored_G))) for group in groups]
        if name == "environment":
            by_turn = self.config.reward.supervision == "turn"
            return [[environment_rewards(each.completion, by_turn=by_turn) for each in g.scored_G] for g in groups]
        function, deadline_s = self._functions[name], self.config.engine.deadline_s
        return [values_of(name, function, g.problem, g.scored_G, answers, deadline_s=deadline_s) for g in groups]

    def _without_reward(self, problem: Problem, completion: Completion, grade: Grade) -> ScoredCompletion:
        """Return a completion with its grade and steps, and with NaN for each reward."""
        steps = steps_of(self.config.reward.supervision, completion, grade, self.checkpoint.decode)
        names = self.config.reward.weights_of(problem.source)
        return ScoredCompletion(completion, grade, steps, dict.fromkeys(names, (math.nan,) * len(steps)))

    def _show_masked(self, group: Group) -> None:
        """Print why completions of a group are masked for another reason than `sampling.truncated: mask`."""
        for scored in group.scored_G:
            if scored.completion.failure is not None and scored.why_unscorable is not None:
                self._show_once(group.problem, scored.why_unscorable)
            elif not scored.completion.num_tokens:
                reason = "its prompt fills the context of the model: lower validate_data.max_prompt_tokens"
                self._show_once(group.problem, Failure("no tokens", reason))

    def _show_once(self, problem: Problem, failure: Failure) -> None:
        """Print why a completion has no reward, unless a failure of the same kind was printed before."""
        if failure.kind not in self._failures_shown:
            self._failures_shown.add(failure.kind)
            say("train_grpo", f"warning: no reward for a completion of {problem.id}: {failure.message}")


def environment_rewards(completion: Completion, *, by_turn: bool) -> tuple[float, ...]:
    """Return the environment's reward of each turn with `by_turn`, else that of all turns together."""
    rewards = tuple(sum(turn.rewards.values()) for turn in completion.turns)
    if by_turn and rewards:
        return rewards
    return (sum(rewards, 0.0),)


def is_masked(config: TrainGRPOConfig, completion: Completion) -> bool:
    """Return whether a completion has no reward and is left out of the loss.

    That holds if it is truncated, with `sampling.truncated: mask`; if its environment failed, without which the model
    might have answered well; and if it has no tokens, because its prompt fills the context.
    """
    is_truncated = config.sampling.truncated == "mask" and completion.truncated
    return is_truncated or completion.failure is not None or completion.num_tokens == 0
