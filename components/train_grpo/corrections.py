"""The correction for a sampler that is not the policy before the update: weights of tokens, and masked completions.

Shape suffixes as in objective.py.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.logprobs import completion_logprobs
from components.policy.packing import pack_shard
from components.shared.errors import PipelineError
from components.train_grpo.config import CorrectionConfig, ImportanceMaskConfig, TrainGRPOConfig
from components.train_grpo.objective import MAX_LOG_RATIO, Tokens, completion_sums

if TYPE_CHECKING:  # update.py imports this module
    from components.train_grpo.update import Experience

MASKED_COMPLETIONS = "masked_completion_fraction"
"""Column of the curves: the share of completions that `sampler.correction.mask` takes out of the loss."""


def importance_weights(tokens: Tokens, correction: CorrectionConfig) -> Tensor | None:
    """Return the factor of each token's policy loss, without gradient; None if no token is corrected.

    The samples are from pi_sampler. Weighted by pi_old / pi_sampler, they have the mean of samples from pi_old. So the
    weight corrects for older weights and other kernels of the sampler, and the clipped ratio, pi / pi_old, for the
    updates on this rollout (decoupled PPO, arXiv 2110.00641; asynchronous RL of language models: AReaL, arXiv
    2505.24298).

    - Truncated importance sampling: min(weight, max), of tokens (https://fengyao.notion.site/off-policy-rl) or, with
      smaller bias and larger variance, of completions, whose ratio is the product of their tokens' ratios
      (https://richardli.xyz/rl-collapse).
    - IcePop (Ring-1T, arXiv 2510.18855): the weight of a token is zero if its ratio is outside [low, high]. The token
      still counts in the divisor of the loss, as a clipped one does.
    """
    weight = correction.weight
    token_mask = correction.mask if correction.mask and correction.mask.level == "token" else None
    if weight is None and token_mask is None:
        return None
    log_ratio_N = (tokens.old_logprobs_N - tokens.sampler_logprobs_N).detach()
    weight_N = torch.ones_like(log_ratio_N)
    if weight is not None:
        log_weight_N = log_ratio_N
        if weight.level == "sequence":
            log_weight_N = completion_sums(log_ratio_N, tokens)[tokens.sequence_N]
        weight_N = log_weight_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight_N = weight_N.clamp(max=math.inf if weight.max is None else weight.max)
    if token_mask is not None:
        weight_N = weight_N * _is_within(log_ratio_N, token_mask)
    return weight_N


def old_logprobs(config: TrainGRPOConfig, policy: Policy, checkpoint: Checkpoint, experience: "Experience") -> Tensor:
    """Return the policy's log-probability of every completion token, (M,); each process computes its shard."""
    sequences_B = experience.sequences_B
    shard = pack_shard(
        policy.ranks,
        sequences_B,
        max_tokens=config.engine.micro_batch_tokens,
        device=checkpoint.device,
        indices=[index for index, sequence in enumerate(sequences_B) if sequence.num_sampled],
        padded=checkpoint.is_padded,
    )
    of_shard_M = completion_logprobs(policy, shard.all_batches, len(experience.advantages_M))
    of_ranks = policy.ranks.all_gather(of_shard_M.cpu(), "the log-probabilities of a rollout")
    # NaN for tokens of other shards. Several processes have those of dummy batches, equal up to rounding.
    return torch.stack(of_ranks).nanmean(0).to(checkpoint.device)


def mask_completions(config: TrainGRPOConfig, experience: "Experience") -> None:
    """Take completions outside the bounds of `sampler.correction.mask` out of the loss, by their `old_logprobs_M`."""
    mask = config.sampler.correction.mask
    assert mask is not None
    old_M, sampler_M = experience.old_logprobs_M, experience.sampler_logprobs_M
    # Checked before masking: the metrics of the update lack the masked completions, and would not show stale weights.
    require_sampler_match(config, float((old_M - sampler_M).abs().mean()))
    within_B = is_within_mask(old_M, sampler_M, experience.num_tokens_B, mask).cpu()
    experience.in_loss_B = experience.in_loss_B & within_B
    experience.masked_B = ~within_B


def is_within_mask(
    old_logprobs_M: Tensor, sampler_logprobs_M: Tensor, num_tokens_B: Sequence[int], mask: ImportanceMaskConfig
) -> Tensor:
    """Return whether pi_old / pi_sampler of each completion is within the bounds of the mask, (B,) (MIS).

    The ratio of a completion is the product over its tokens, or their geometric mean, which does not grow with the
    length: masked importance sampling and geometric sequence masking of J. Liu, Y. Li et al., "When Speed Kills
    Stability", 2025, https://richardli.xyz/rl-collapse.
    """
    log_ratio_B = torch.stack([part.sum() for part in (old_logprobs_M - sampler_logprobs_M).split(list(num_tokens_B))])
    if mask.level == "geometric":
        log_ratio_B = log_ratio_B / torch.tensor(num_tokens_B, device=log_ratio_B.device).clamp(min=1)
    return _is_within(log_ratio_B, mask)


def _is_within(log_ratio: Tensor, mask: ImportanceMaskConfig) -> Tensor:
    """Return whether each ratio is within the bounds of the mask."""
    lowest = math.log(mask.low) if mask.low else -math.inf
    return (log_ratio >= lowest) & (log_ratio <= math.log(mask.high))


def require_sampler_match(config: TrainGRPOConfig, mean_nats: float) -> None:
    """Raise PipelineError if the sampler samples from another distribution, such as that of stale weights."""
    if not mean_nats <= config.sampler.max_mismatch:  # not `>`, which is false for NaN
        raise PipelineError(
            f"the sampler's log-probabilities differ from the trainer's by {mean_nats:.4g} nats per token on average, "
            f"more than sampler.max_mismatch = {config.sampler.max_mismatch:g}: it does not sample from the policy "
            "under training"
        )
