"""The optimizer steps on one rollout (arXiv 2402.03300, equation 3 and algorithm 1, lines 10 and 11).

Shape suffixes:
    N  completion tokens of a micro-batch
    B  completions of the rollout, M  all their completion tokens, end to end
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from components.policy.engine import Policy
from components.policy.logprobs import TokenLogprobs
from components.policy.packing import MicroBatch, Shard, pack_shard
from components.policy.parallel import Ranks
from components.train_grpo.aggregation import token_weights
from components.train_grpo.config import KLPlacement, TrainGRPOConfig
from components.train_grpo.experience import Experience
from components.train_grpo.kl import kl_to_reference
from components.train_grpo.loss import clipped_surrogate
from components.train_grpo.ratio import policy_ratio, token_ratio
from components.train_grpo.sampler_correction import importance_weights, refuse_mismatch
from components.train_grpo.tally import Tally


@dataclass(frozen=True)
class TokenData:
    """What the loss of each completion token is computed from, beside the policy's scores of it."""

    advantages_M: Tensor
    old_logprobs_M: Tensor
    """Of the policy that sampled, computed as in training."""
    sampler_logprobs_M: Tensor
    """Of the policy that sampled, as the sampler computed them."""
    reference_logprobs_M: Tensor | None
    num_tokens_B: Tensor


@dataclass(frozen=True)
class Minibatch:
    """What this process computes of one optimizer step, and the weight of each completion's tokens in its loss."""

    share: Shard
    weights_B: Tensor

    @property
    def batches(self) -> list[MicroBatch]:
        """The micro-batches that count."""
        return self.share.batches


def minibatches(config: TrainGRPOConfig, given: Experience, device: torch.device, *, ranks: Ranks) -> list[Minibatch]:
    """Split a rollout into optimizer steps, without the completions of which nothing is in the loss.

    Left out they still count in what the loss is divided by, unless they are masked.
    """
    num_tokens_B = given.num_tokens_B * given.counted_B
    lost_B = ~given.counted_B
    if not everything_counts(config):
        lost_B = lost_B | ~_any_per_completion(given.advantages_M != 0, given.num_tokens_B)
    parts = []
    for numbers in given.minibatches(config.minibatches_per_rollout):
        own = slice(numbers.start, numbers.stop)
        weights_B = torch.zeros(len(num_tokens_B), dtype=torch.float64)
        weights_B[own] = token_weights(
            num_tokens_B[own].double(), config.loss.aggregation, max_new_tokens=config.sampling.max_new_tokens
        )
        chosen = [number for number in numbers if not lost_B[number]]
        if chosen:
            tokens = config.engine.micro_batch_tokens
            share = pack_shard(ranks, given.sequences_B, max_tokens=tokens, device=device, indices=chosen)
            parts.append(Minibatch(share, weights_B.to(device)))
    return parts


def everything_counts(config: TrainGRPOConfig) -> bool:
    """Tell whether a token adds to the loss even where its advantage is zero."""
    kl_in_loss = config.loss.kl.coefficient > 0 and config.loss.kl.placement is KLPlacement.LOSS
    return kl_in_loss or config.loss.entropy_coefficient > 0


def _any_per_completion(flags_M: Tensor, num_tokens_B: Tensor) -> Tensor:
    return torch.stack([part.any() for part in flags_M.split(num_tokens_B.tolist())])


def update(
    config: TrainGRPOConfig,
    policy: Policy,
    parts: list[Minibatch],
    data: TokenData,
    learning_rate: float,
) -> dict[str, float]:
    """Take an optimizer step on each minibatch, `updates_per_rollout` times over; return the metrics of the last pass.

    Log-probabilities of the policy that sampled are those of the first step, before it changed anything: they cost no
    forward of their own, and the ratio of that step is exactly one. Only for the minibatches that come after it is
    there one more forward, before the policy changes.
    """
    if not parts:
        return Tally.of_nothing(learning_rate)
    _fill_old_logprobs(policy, parts[1:], data)
    whole = Tally()
    for epoch in range(config.updates_per_rollout):
        own, steps = Tally(), []
        for number, part in enumerate(parts):
            _accumulate(config, policy, part, data, own, first=epoch == number == 0)
            whole = Tally.whole(policy.ranks.all_gather(own, "the metrics of an update"))
            refuse_mismatch(whole.mean_mismatch, maximum=config.sampler.max_mismatch)
            steps.append(policy.step(learning_rate))
    for step in steps:
        whole.add_step(step)
    return whole.figures()


def _accumulate(
    config: TrainGRPOConfig, policy: Policy, part: Minibatch, data: TokenData, tally: Tally, *, first: bool
) -> None:
    """Add up the gradient of this process's share of an optimizer step; the `first` one gives the old policy."""
    for batch in part.batches:
        scores = policy(batch)
        if first:
            _keep(data.old_logprobs_M, batch, scores.logprobs_N)
        policy.backward(_loss(config, scores, batch, part.weights_B, data, tally))
    for batch in part.share.dummies:
        policy.backward(0.0 * policy(batch).logprobs_N.sum())


def _fill_old_logprobs(policy: Policy, parts: list[Minibatch], data: TokenData) -> None:
    """Score what comes after the first optimizer step before it changes the policy, unless it is known already."""
    if not data.old_logprobs_M.isnan().any():
        return
    for part in parts:
        for batch in part.share.all_batches:
            with torch.no_grad():
                _keep(data.old_logprobs_M, batch, policy(batch).logprobs_N)


def _keep(kept_M: Tensor, batch: MicroBatch, values_N: Tensor) -> None:
    kept_M[batch.token_N] = values_N.detach().to(kept_M.dtype)


def _loss(
    config: TrainGRPOConfig,
    scores: TokenLogprobs,
    batch: MicroBatch,
    weights_B: Tensor,
    data: TokenData,
    tally: Tally,
) -> Tensor:
    """Return a micro-batch's part of the loss: minus the weighted sum of its tokens' objectives (equation 3)."""
    logprobs_N, token_N = scores.logprobs_N, batch.token_N
    advantages_N, old_N, sampler_N = (
        x_M[token_N].to(logprobs_N.dtype) for x_M in (data.advantages_M, data.old_logprobs_M, data.sampler_logprobs_M)
    )
    ratio_N = policy_ratio(logprobs_N, old_N, batch.sequence_N, data.num_tokens_B, config.loss.ratio)
    objective_N = clipped_surrogate(ratio_N, advantages_N, config.loss.clip)
    if config.sampler.max_importance_weight is not None:
        objective_N = objective_N * importance_weights(old_N, sampler_N, maximum=config.sampler.max_importance_weight)
    kl_N = None
    if data.reference_logprobs_M is not None:
        reference_N = data.reference_logprobs_M[token_N].to(logprobs_N.dtype)
        kl_N = kl_to_reference(logprobs_N, reference_N, token_ratio(logprobs_N - old_N), config.loss.kl.estimator)
        if config.loss.kl.placement is KLPlacement.LOSS:
            objective_N = objective_N - config.loss.kl.coefficient * kl_N
    if config.loss.entropy_coefficient:
        objective_N = objective_N + config.loss.entropy_coefficient * scores.entropy_N
    tally.add(config.loss.clip, ratio_N, advantages_N, kl_N, scores.entropy_N, old_N, sampler_N)
    return -(weights_B[batch.sequence_N].to(objective_N.dtype) * objective_N).sum()


def token_data(
    given: Experience, *, old_logprobs_M: Tensor | None, reference_logprobs_M: Tensor | None, device: torch.device
) -> TokenData:
    """Put what the loss needs where the policy is; log-probabilities not known yet are NaN."""
    unknown_M = torch.full_like(given.advantages_M, torch.nan)
    return TokenData(
        advantages_M=given.advantages_M.to(device),
        old_logprobs_M=(unknown_M if old_logprobs_M is None else old_logprobs_M).to(device),
        sampler_logprobs_M=given.sampler_logprobs_M.to(device),
        reference_logprobs_M=reference_logprobs_M,
        num_tokens_B=given.num_tokens_B.to(device),
    )
