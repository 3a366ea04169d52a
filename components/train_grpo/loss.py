"""The GRPO objective (arXiv 2402.03300, equations 3 and 4) in three pure functions.

Shape suffixes:
    N  completion tokens, the sequences of an optimizer step end to end
    B  sequences of the optimizer step
"""

import torch
from torch import Tensor


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, *, clip_range: float) -> Tensor:
    """Return min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) per token, to be maximised (equation 3)."""
    clipped_N = ratio_N.clamp(1 - clip_range, 1 + clip_range)
    return torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def kl_to_reference(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Return pi_ref / pi - log(pi_ref / pi) - 1 per token, the estimator called k3 (equation 4); never negative."""
    log_ratio_N = reference_logprobs_N - logprobs_N
    return torch.expm1(log_ratio_N) - log_ratio_N


def sequence_mean_weights(num_tokens_B: Tensor) -> Tensor:
    """Return 1 / (B * |o_i|) for each sequence: the weight of its tokens in the objective's double mean.

    B counts every sequence of the optimizer step, over all micro-batches, so that the sum of weighted token losses is
    the objective however the step is split.
    """
    return 1.0 / (num_tokens_B * num_tokens_B.numel())


def is_clipped(ratio_N: Tensor, advantages_N: Tensor, *, clip_range: float) -> Tensor:
    """Return which tokens' gradient the clip stops: above where the advantage is positive, below where negative."""
    above_N = (ratio_N > 1 + clip_range) & (advantages_N > 0)
    below_N = (ratio_N < 1 - clip_range) & (advantages_N < 0)
    return above_N | below_N
