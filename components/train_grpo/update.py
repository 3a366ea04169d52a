"""The optimizer steps on one rollout (arXiv 2402.03300, equation 3 and algorithm 1, lines 10 and 11).

Shape suffixes as in objective.py: B completions of the rollout, M all their tokens, N tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from components.policy.engine import Policy
from components.policy.logprobs import TokenLogprobs
from components.policy.packing import MicroBatch, Shard, TokenSequence, pack_shard
from components.policy.parallel import Ranks
from components.shared.errors import PipelineError
from components.train_grpo.config import Combination, KLPlacement, TrainGRPOConfig
from components.train_grpo.metrics import UpdateMetrics
from components.train_grpo.objective import (
    Tokens,
    advantages,
    decoupled_advantages,
    token_advantages,
    token_objective,
    token_weights,
)
from components.train_grpo.rewards import is_masked
from components.train_grpo.rollouts import Group, reward_tensors


class SamplerMismatchError(PipelineError):
    """The sampler does not sample from the policy that is trained."""


@dataclass
class Experience:
    """What a policy update learns from: every completion token of a rollout, on the device of the policy."""

    sequences_B: list[TokenSequence]
    in_loss_B: Tensor
    """Whether a completion is in the loss, and in what the loss is divided by: not if it is masked."""
    advantages_M: Tensor
    sampler_logprobs_M: Tensor
    """Under the policy that sampled, as the sampler computed them."""
    old_logprobs_M: Tensor
    """Under the policy that sampled, computed as in training; NaN until they are known."""
    reference_logprobs_M: Tensor | None = None

    @property
    def num_tokens_B(self) -> list[int]:
        """Completion tokens of each completion."""
        return [len(sequence.completion_ids) for sequence in self.sequences_B]


def make_experience(
    config: TrainGRPOConfig, groups: Sequence[Group], device: torch.device, penalties_B: Tensor | None = None
) -> Experience:
    """Compute the advantages of a rollout; `penalties_B` are taken off the completions' rewards (KL in the reward)."""
    completions_B = [scored.completion for group in groups for scored in group.scored_G]
    advantages_M = rollout_advantages(config, groups, penalties_B).to(device)
    sampler_logprobs_M = torch.tensor([x for completion in completions_B for x in completion.logprobs]).double()
    return Experience(
        sequences_B=[completion.tokens for completion in completions_B],
        in_loss_B=torch.tensor([not is_masked(config, completion) for completion in completions_B]),
        advantages_M=advantages_M,
        sampler_logprobs_M=sampler_logprobs_M.to(device),
        old_logprobs_M=torch.full_like(advantages_M, torch.nan),
    )


def rollout_advantages(config: TrainGRPOConfig, groups: Sequence[Group], penalties_B: Tensor | None = None) -> Tensor:
    """Return the advantage of every completion token, (M,), in float64."""
    rewards, estimator = reward_tensors(config, groups), config.advantage.estimator
    if config.reward.combination is Combination.AFTER_NORMALISATION:
        advantages_PK = decoupled_advantages(rewards, config.reward.weights, estimator)
    else:
        if penalties_B is not None:
            _subtract_penalties(rewards["combined"], groups, penalties_B)
        advantages_PK = advantages(rewards["combined"], estimator)
    step_ends_PG = [[[step.end for step in scored.steps] for scored in group.scored_G] for group in groups]
    num_tokens_PG = [[scored.completion.num_tokens for scored in group.scored_G] for group in groups]
    return token_advantages(advantages_PK, step_ends_PG, num_tokens_PG)


def _subtract_penalties(rewards_PK: Tensor, groups: Sequence[Group], penalties_B: Tensor) -> None:
    """Take each completion's penalty off its last step's reward, in place."""
    num_steps_PG = [[len(scored.steps) for scored in group.scored_G] for group in groups]
    penalties_PG = penalties_B.view(len(groups), -1)
    for rewards_K, num_steps_G, penalties_G in zip(rewards_PK, num_steps_PG, penalties_PG, strict=True):
        rewards_K[torch.tensor(list(accumulate(num_steps_G))) - 1] -= penalties_G


@dataclass(frozen=True)
class Minibatch:
    """This process's shard of an optimizer step, and the weight of each completion's tokens in its loss."""

    shard: Shard
    weights_B: Tensor


def update(
    config: TrainGRPOConfig,
    policy: Policy,
    minibatches: Sequence[Minibatch],
    experience: Experience,
    learning_rate: float,
) -> dict[str, float]:
    """Take an optimizer step on each minibatch, `updates_per_rollout` times; return the metrics of the last pass.

    Log-probabilities of the policy that sampled are those of the first step, before it changed anything: they cost no
    forward pass of their own, and the ratio of that step is exactly one. Only the minibatches after it take one more
    forward pass, before the policy changes.
    """
    if not minibatches:
        return UpdateMetrics.of_no_update(learning_rate)
    _fill_old_logprobs(policy, minibatches[1:], experience)
    metrics = UpdateMetrics()
    for epoch in range(config.updates_per_rollout):
        of_rank, steps = UpdateMetrics(), []
        for number, minibatch in enumerate(minibatches):
            _backward(config, policy, minibatch, experience, of_rank, first=epoch == number == 0)
            metrics = UpdateMetrics.merged(policy.ranks.all_gather(of_rank, "the metrics of an update"))
            _require_sampler_match(config, metrics.mean_mismatch)
            steps.append(policy.step(learning_rate))
    return metrics.figures(steps)


def split_minibatches(config: TrainGRPOConfig, experience: Experience, *, ranks: Ranks) -> list[Minibatch]:
    """Split a rollout into optimizer steps of whole groups, without the completions that add nothing to the loss.

    Those still count in what the loss is divided by, unless they are masked.
    """
    num_tokens_B = torch.tensor(experience.num_tokens_B)
    in_loss_B = experience.in_loss_B.cpu()
    contributes_B = in_loss_B if zero_advantages_count(config) else in_loss_B & _any_advantage(experience)
    minibatches = []
    for start, stop in pairwise(_bounds(len(num_tokens_B) // config.group_size, config)):
        weights_B = torch.zeros(len(num_tokens_B), dtype=torch.float64)
        weights_B[start:stop] = token_weights(
            (num_tokens_B * in_loss_B)[start:stop].double(),
            config.loss.aggregation,
            max_new_tokens=config.sampling.max_new_tokens,
        )
        indices = [index for index in range(start, stop) if contributes_B[index]]
        if indices:
            shard = pack_shard(
                ranks,
                experience.sequences_B,
                max_tokens=config.engine.micro_batch_tokens,
                device=experience.advantages_M.device,
                indices=indices,
            )
            minibatches.append(Minibatch(shard, weights_B.to(experience.advantages_M.device)))
    return minibatches


def zero_advantages_count(config: TrainGRPOConfig) -> bool:
    """Return whether a token adds to the loss even where its advantage is zero."""
    kl_in_loss = config.loss.kl.coefficient > 0 and config.loss.kl.placement is KLPlacement.LOSS
    return kl_in_loss or config.loss.entropy_coefficient > 0


def _any_advantage(experience: Experience) -> Tensor:
    parts = (experience.advantages_M != 0).cpu().split(experience.num_tokens_B)
    return torch.stack([part.any() for part in parts])


def _bounds(num_groups: int, config: TrainGRPOConfig) -> list[int]:
    """Return where each minibatch begins and the last one ends, in completions; fewer parts where groups are few."""
    count = config.minibatches_per_rollout
    return sorted({num_groups * part // count * config.group_size for part in range(count + 1)})


def _fill_old_logprobs(policy: Policy, minibatches: Sequence[Minibatch], experience: Experience) -> None:
    """Score the minibatches after the first before it changes the policy, unless that is known already."""
    if not experience.old_logprobs_M.isnan().any():
        return
    for minibatch in minibatches:
        for batch in minibatch.shard.all_batches:
            with torch.no_grad():
                _store(experience.old_logprobs_M, batch, policy(batch).logprobs_N)


def _backward(
    config: TrainGRPOConfig,
    policy: Policy,
    minibatch: Minibatch,
    experience: Experience,
    metrics: UpdateMetrics,
    *,
    first: bool,
) -> None:
    """Add up the gradient of this process's shard of an optimizer step; the `first` step gives the old policy."""
    for batch in minibatch.shard.batches:
        scores = policy(batch)
        if first:
            _store(experience.old_logprobs_M, batch, scores.logprobs_N)
        policy.backward(_loss(config, scores, batch, minibatch.weights_B, experience, metrics))
    for batch in minibatch.shard.dummies:  # other processes have more micro-batches, and wait for as many here
        policy.backward(0.0 * policy(batch).logprobs_N.sum())


def _loss(
    config: TrainGRPOConfig,
    scores: TokenLogprobs,
    batch: MicroBatch,
    weights_B: Tensor,
    experience: Experience,
    metrics: UpdateMetrics,
) -> Tensor:
    """Return a micro-batch's part of the loss: minus the weighted sum of its tokens' objectives (equation 3)."""

    def of_batch(values_M: Tensor) -> Tensor:
        return values_M[batch.token_N].to(scores.logprobs_N.dtype)

    reference_M = experience.reference_logprobs_M
    tokens = Tokens(
        logprobs_N=scores.logprobs_N,
        old_logprobs_N=of_batch(experience.old_logprobs_M),
        sampler_logprobs_N=of_batch(experience.sampler_logprobs_M),
        reference_logprobs_N=None if reference_M is None else of_batch(reference_M),
        entropy_N=scores.entropy_N,
        advantages_N=of_batch(experience.advantages_M),
        sequence_N=batch.sequence_N,
        num_tokens_B=torch.tensor(experience.num_tokens_B, device=batch.sequence_N.device),
    )
    terms = token_objective(config.loss, tokens, max_importance_weight=config.sampler.max_importance_weight)
    metrics.add(config.loss.clip, tokens, terms)
    return -(weights_B[batch.sequence_N].to(terms.objective_N.dtype) * terms.objective_N).sum()


def _store(values_M: Tensor, batch: MicroBatch, values_N: Tensor) -> None:
    values_M[batch.token_N] = values_N.detach().to(values_M.dtype)


def _require_sampler_match(config: TrainGRPOConfig, mean_nats: float) -> None:
    """Stop a run whose sampler samples from another distribution, as one with stale weights does."""
    if not mean_nats <= config.sampler.max_mismatch:  # written so that NaN does not pass
        raise SamplerMismatchError(
            f"the sampler's log-probabilities differ from the trainer's by {mean_nats:.4g} nats per token on average, "
            f"more than sampler.max_mismatch = {config.sampler.max_mismatch:g}: it does not sample from the policy "
            "under training"
        )
