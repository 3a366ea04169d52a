"""What completions are worth: each reward a small function, chosen by name and weight in the params.

A reward is given for steps: for outcome supervision a completion is one step. NaN is no reward at all, for what could
not be scored. `accuracy`, `format` and `overlong` judge a whole completion, and stand with its last step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.policy.checkpoint import Checkpoint
from components.rollout.completion import Completion, grade_completion
from components.shared.grading.answer import final_answer, has_reasoning
from components.shared.grading.verdict import Grade
from components.shared.problem import Problem
from components.train_grpo.config import RewardName, Supervision, TrainGRPOConfig, Truncated
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.steps import Step, outcome, verified_steps


@dataclass(frozen=True)
class Scored:
    """A completion with its grade and rewards."""

    completion: Completion
    grade: Grade
    steps: tuple[Step, ...]
    """Where its steps end and what the verifier says of them; one step for outcome supervision."""
    rewards: dict[RewardName, tuple[float, ...]]
    """For each reward that counts, one number per step, or one that stands with the last step."""

    def combined(self, weights: dict[RewardName, float]) -> tuple[float, ...]:
        """Return the weighted sum of the rewards for each step; one that has no reward for it makes it NaN."""
        total = [0.0] * len(self.steps)
        for name, weight in weights.items():
            values = self.rewards[name]
            for place, value in enumerate(values, start=len(total) - len(values)):
                total[place] += weight * value
        return tuple(total)

    def without_reward(self) -> "Scored":
        """Return the completion with no reward for any step."""
        nothing = {name: (math.nan,) * len(values) for name, values in self.rewards.items()}
        return Scored(self.completion, self.grade, self.steps, nothing)


class Scorer:
    """Grades and rewards completions."""

    def __init__(self, config: TrainGRPOConfig, checkpoint: Checkpoint, reward_model: RewardModel | None) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.reward_model = reward_model

    def __call__(self, problem: Problem, completions_G: Sequence[Completion]) -> list[Scored]:
        """Return the completions of a problem with their rewards, as the config weighs and masks them."""
        grades_G = [grade_completion(problem.answer, completion) for completion in completions_G]
        steps_G = [self._steps(*pair) for pair in zip(completions_G, grades_G, strict=True)]
        learned_G = self._learned(completions_G, steps_G)
        scored_G = []
        for completion, grade, steps, learned in zip(completions_G, grades_G, steps_G, learned_G, strict=True):
            known = {RewardName.STEPS: tuple(step.reward for step in steps), RewardName.REWARD_MODEL: learned}
            rewards = {
                name: known[name] if name in known else (_REWARDS[name](self.config, completion, grade),)
                for name in self.config.reward.weights
            }
            scored = Scored(completion, grade, steps, rewards)
            scored_G.append(scored.without_reward() if is_masked(self.config, completion) else scored)
        return scored_G

    def _steps(self, completion: Completion, grade: Grade) -> tuple[Step, ...]:
        if self.config.reward.supervision is Supervision.PROCESS:
            return tuple(verified_steps(completion, grade, self.checkpoint.decode))
        return (Step(len(completion.tokens.completion_ids), outcome(grade)),)

    def _learned(
        self, completions_G: Sequence[Completion], steps_G: Sequence[tuple[Step, ...]]
    ) -> list[tuple[float, ...]]:
        if self.reward_model is None:
            return [() for _ in completions_G]
        ends_G = [tuple(step.end for step in steps) for steps in steps_G]
        found = self.reward_model.score([completion.tokens for completion in completions_G], ends_G)
        return [tuple(rewards) for rewards in found]


def is_masked(config: TrainGRPOConfig, completion: Completion) -> bool:
    """Tell whether a completion is without reward and out of the loss because it was cut off."""
    return config.sampling.truncated is Truncated.MASK and not completion.finished


def accuracy(config: TrainGRPOConfig, completion: Completion, grade: Grade) -> float:
    """Return 1 for a right answer, 0 for a wrong one, and NaN (no reward at all) for one that cannot be scored."""
    del config, completion
    return outcome(grade)


def answer_format(config: TrainGRPOConfig, completion: Completion, grade: Grade) -> float:
    """Return 1 where some reasoning leads to an answer in the designated place, else 0, whatever the answer is."""
    del config, grade
    worked = has_reasoning(completion.text) and final_answer(completion.text) is not None
    return float(completion.finished and worked)


def overlong(config: TrainGRPOConfig, completion: Completion, grade: Grade) -> float:
    """Return 0 up to the buffer, then a line down to -1 at the length limit (DAPO, arXiv 2503.14476, equation 13)."""
    del grade
    buffer = config.reward.overlong_buffer_tokens
    over = len(completion.tokens.completion_ids) - (config.sampling.max_new_tokens - buffer)
    return -max(0, over) / buffer


_REWARDS: dict[RewardName, Callable[[TrainGRPOConfig, Completion, Grade], float]] = {
    RewardName.ACCURACY: accuracy,
    RewardName.FORMAT: answer_format,
    RewardName.OVERLONG: overlong,
}
