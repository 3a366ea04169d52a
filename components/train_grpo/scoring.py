"""From the completions of a rollout to their grades and rewards.

A reward is given for steps: for outcome supervision a completion is one step. Rewards of a whole completion stand with
its last step.

Shape suffixes:
    P  prompts, G  completions per prompt, B  all completions, group after group
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from components.grading.verifier import Grade, Verdict, Verifier
from components.policy.checkpoint import Checkpoint
from components.rollout.sampler import Completion, grade_completions
from components.shared.problem import Problem
from components.shared.progress import say
from components.train_grpo.config import RewardName, Supervision, TrainGRPOConfig, Truncated
from components.train_grpo.failure import Failure, attempt, too_large
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import chosen_rewards, length
from components.train_grpo.steps import Step, outcome, verified_steps


@dataclass(frozen=True)
class Scored:
    """A completion with its grade and rewards."""

    completion: Completion
    grade: Grade
    steps: tuple[Step, ...]
    """Where its steps end and what the verifier says of them; one step for outcome supervision."""
    rewards: dict[str, tuple[float, ...]]
    """For each reward that counts, one number per step, or one that stands with the last step."""
    failure: Failure | None = None
    """The first reward that failed, and left the completion without any."""

    @property
    def unscorable(self) -> Failure | None:
        """Why nothing can be said of the completion; None where something can."""
        if self.grade.verdict is Verdict.UNSCORABLE:
            return Failure(self.grade.reason, f"the grader says: {self.grade.reason}")
        return self.failure

    def combined(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        """Return the weighted sum of the rewards for each step; one that has no reward for it makes it NaN."""
        total = [0.0] * len(self.steps)
        for name, weight in weights.items():
            values = self.rewards[name]
            for place, value in enumerate(values, start=len(total) - len(values)):
                total[place] += weight * value
        return tuple(total)

    def without_reward(self) -> "Scored":
        """Return the completion with no reward for any step."""
        return replace(self, rewards=dict.fromkeys(self.rewards, (math.nan,) * len(self.steps)))


class Scorer:
    """Grades and rewards completions."""

    def __init__(
        self, config: TrainGRPOConfig, checkpoint: Checkpoint, verify: Verifier, reward_model: RewardModel | None
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.verify = verify
        self.reward_model = reward_model
        self._rewards = chosen_rewards(config, checkpoint.config)
        self._shown: set[str] = set()

    def __call__(
        self, problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]
    ) -> list[list[Scored]]:
        """Return the completions of each problem with their rewards, as the config weighs and masks them."""
        sizes_P = [len(completions_G) for completions_G in completions_PG]
        golds_B = [problem.answer for problem, size in zip(problems_P, sizes_P, strict=True) for _ in range(size)]
        completions_B = list(chain.from_iterable(completions_PG))
        grades_B = iter(grade_completions(self.verify, golds_B, completions_B, self.checkpoint.config.answer))
        return [
            self._group(problem, completions_G, list(islice(grades_B, len(completions_G))))
            for problem, completions_G in zip(problems_P, completions_PG, strict=True)
        ]

    def _group(self, problem: Problem, completions_G: Sequence[Completion], grades_G: Sequence[Grade]) -> list[Scored]:
        steps_G = [self._steps(*pair) for pair in zip(completions_G, grades_G, strict=True)]
        known = {
            RewardName.STEPS: [tuple(step.reward for step in steps) for steps in steps_G],
            RewardName.LENGTH: self._lengths(completions_G, grades_G),
            RewardName.REWARD_MODEL: self._learned(completions_G, steps_G),
        }
        known_G = [dict(zip(known, rewards, strict=True)) for rewards in zip(*known.values(), strict=True)]
        rows_G = zip(completions_G, grades_G, steps_G, known_G, strict=True)
        return [self._scored(problem, *row) for row in rows_G]

    def _steps(self, completion: Completion, grade: Grade) -> tuple[Step, ...]:
        if self.config.reward.supervision is Supervision.PROCESS:
            return tuple(verified_steps(completion, grade, self.checkpoint.decode))
        return (Step(len(completion.tokens.completion_ids), outcome(grade)),)

    def _lengths(self, completions_G: Sequence[Completion], grades_G: Sequence[Grade]) -> list[tuple[float, ...]]:
        pairs = zip(completions_G, grades_G, strict=True)
        outcomes_G = [math.nan if is_masked(self.config, each) else outcome(grade) for each, grade in pairs]
        return [(x,) for x in length([len(each.tokens.completion_ids) for each in completions_G], outcomes_G)]

    def _learned(
        self, completions_G: Sequence[Completion], steps_G: Sequence[tuple[Step, ...]]
    ) -> list[tuple[float, ...]]:
        if self.reward_model is None:
            return [() for _ in completions_G]
        ends_G = [tuple(step.end for step in steps) for steps in steps_G]
        found = self.reward_model.score([completion.tokens for completion in completions_G], ends_G)
        return [tuple(rewards) for rewards in found]

    def _scored(
        self,
        problem: Problem,
        completion: Completion,
        grade: Grade,
        steps: tuple[Step, ...],
        known: Mapping[str, tuple[float, ...]],
    ) -> Scored:
        nothing = Scored(completion, grade, steps, dict.fromkeys(self.config.reward.weights, ())).without_reward()
        if is_masked(self.config, completion):
            return nothing
        rewards = {name: known[name] for name in self.config.reward.weights if name in known}
        for name, reward in self._rewards.items():
            value = attempt(name, reward, problem, completion, grade)
            if isinstance(value, Failure):
                return self._failed(nothing, value, problem)
            rewards[name] = (value,)
        for name, weight in self.config.reward.weights.items():
            failure = too_large(name, weight, rewards[name])
            if failure:
                return self._failed(nothing, failure, problem)
        return replace(nothing, rewards=rewards)

    def _failed(self, nothing: Scored, failure: Failure, problem: Problem) -> Scored:
        """Return a completion without reward because one of them failed, and print the first failure of each kind."""
        if failure.kind not in self._shown:
            self._shown.add(failure.kind)
            say("train_grpo", f"warning: no reward for a completion of {problem.id}: {failure.message}")
        return replace(nothing, failure=failure)


def is_masked(config: TrainGRPOConfig, completion: Completion) -> bool:
    """Tell whether a completion is without reward and out of the loss because it was cut off."""
    return config.sampling.truncated is Truncated.MASK and not completion.finished
