"""What a policy update learns from: every completion token of a rollout, with its advantage.

Shape suffixes:
    P  prompts, G  completions per prompt, B = P * G completions, group after group
    K  steps of all completions of a prompt, padded with NaN
    M  completion tokens of all B, completion after completion
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from components.policy.packing import TokenSequence
from components.train_grpo.advantages import advantages, has_spread
from components.train_grpo.config import Combination, TrainGRPOConfig
from components.train_grpo.rollout import Group, reward_sets
from components.train_grpo.scoring import is_masked
from components.train_grpo.supervision import token_advantages


@dataclass(frozen=True)
class Experience:
    """The completions of a rollout, as the update sees them."""

    sequences_B: list[TokenSequence]
    group_size: int
    counted_B: Tensor
    """Whether a completion is in the loss, and in what the loss is divided by."""
    advantages_M: Tensor
    sampler_logprobs_M: Tensor
    """What the sampler said of each token when it drew it."""

    @property
    def num_tokens_B(self) -> Tensor:
        """Completion tokens of each completion."""
        return torch.tensor([len(sequence.completion_ids) for sequence in self.sequences_B])

    def minibatches(self, count: int) -> list[range]:
        """Return the completions of each of `count` optimizer steps, in whole groups."""
        num_groups = len(self.sequences_B) // self.group_size
        bounds = [num_groups * part // count * self.group_size for part in range(count + 1)]
        return [range(start, stop) for start, stop in pairwise(bounds) if stop > start]


def experience(config: TrainGRPOConfig, groups: Sequence[Group], penalties_B: Tensor | None = None) -> Experience:
    """Compute the advantages of a rollout; `penalties` are taken off each completion's reward (KL in the reward)."""
    scored_B = [scored for group in groups for scored in group.scored_G]
    completions_B = [scored.completion for scored in scored_B]
    return Experience(
        sequences_B=[completion.tokens for completion in completions_B],
        group_size=config.group_size,
        counted_B=torch.tensor([not is_masked(config, completion) for completion in completions_B]),
        advantages_M=rollout_advantages(config, groups, penalties_B),
        sampler_logprobs_M=torch.tensor([x for completion in completions_B for x in completion.logprobs]).double(),
    )


def rollout_advantages(config: TrainGRPOConfig, groups: Sequence[Group], penalties_B: Tensor | None = None) -> Tensor:
    """Return the advantage of every completion token, (M,), in float64."""
    rewards = reward_sets(config, groups)
    if config.reward.combination is Combination.AFTER_NORMALISATION:
        return _spread_over_tokens(groups, _decoupled(config, rewards))
    if penalties_B is not None:
        _subtract(penalties_B, groups, rewards["combined"])
    return _spread_over_tokens(groups, advantages(rewards["combined"], config.advantage.estimator))


def _spread_over_tokens(groups: Sequence[Group], advantages_PK: Tensor) -> Tensor:
    ends_PG = [[[step.end for step in scored.steps] for scored in group.scored_G] for group in groups]
    num_tokens_PG = [[len(scored.completion.tokens.completion_ids) for scored in group.scored_G] for group in groups]
    return token_advantages(advantages_PK, ends_PG, num_tokens_PG)


def _decoupled(config: TrainGRPOConfig, rewards: dict[str, Tensor]) -> Tensor:
    """Normalise each reward by itself, sum, and divide by the sum's deviation over the rollout (GDPO, 2601.05242).

    A completion that lacks one of the rewards is in the statistics of none. The groups' means are zero then, and there
    is no mean of the rollout to take off.
    """
    unscored_PG = torch.stack([rewards_PG.isnan() for rewards_PG in rewards.values()]).any(0)
    weighted = [
        weight * advantages(rewards[name].masked_fill(unscored_PG, torch.nan), config.advantage.estimator)
        for name, weight in config.reward.weights.items()
    ]
    summed_PG = torch.stack(weighted).sum(0).masked_fill(unscored_PG, torch.nan)
    # Rewards that cancel out leave rounding errors, which are no advantages.
    if not has_spread(summed_PG.reshape(1, -1)).item():
        return torch.zeros_like(summed_PG)
    return (summed_PG / summed_PG[~unscored_PG].std(correction=0)).nan_to_num(0.0)


def _subtract(penalties_B: Tensor, groups: Sequence[Group], rewards_PK: Tensor) -> None:
    """Take each completion's penalty off its last step's reward, in place."""
    num_steps_PG = [[len(scored.steps) for scored in group.scored_G] for group in groups]
    penalties_PG = penalties_B.view(len(groups), -1)
    for rewards_K, num_steps_G, penalties_G in zip(rewards_PK, num_steps_PG, penalties_PG, strict=True):
        rewards_K[torch.tensor(list(accumulate(num_steps_G))) - 1] -= penalties_G
