"""The probability ratio of the policy to the one that sampled (arXiv 2402.03300, equation 3).

Shape suffixes:
    N  completion tokens of a micro-batch, B  sequences of the optimizer step
"""

from collections.abc import Callable

import torch
from torch import Tensor

from components.train_grpo.config import RatioLevel

_MAX_LOG_RATIO = 20.0
"""Bound on log(pi / pi_old) before it is exponentiated, or one outlier overflows."""


def policy_ratio(
    logprobs_N: Tensor, old_logprobs_N: Tensor, sequence_N: Tensor, num_tokens_B: Tensor, level: RatioLevel
) -> Tensor:
    """Return the ratio that stands before each token's advantage.

    A micro-batch holds each of its sequences whole; `num_tokens_B` counts the completion tokens of every sequence.
    """
    return _LEVELS[level](logprobs_N - old_logprobs_N, sequence_N, num_tokens_B)


def token_ratio(log_ratio_N: Tensor) -> Tensor:
    """Return pi / pi_old of each token (equation 3)."""
    return log_ratio_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def sequence_ratio(log_ratio_N: Tensor, sequence_N: Tensor, num_tokens_B: Tensor) -> Tensor:
    """Return (pi(o) / pi_old(o))^(1/|o|) of the completion each token is of (GSPO, arXiv 2507.18071, equation 7)."""
    sum_B = torch.zeros_like(num_tokens_B, dtype=log_ratio_N.dtype).index_add(0, sequence_N, log_ratio_N)
    mean_B = sum_B / num_tokens_B.clamp(min=1)
    return mean_B.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()[sequence_N]


_LEVELS: dict[RatioLevel, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    RatioLevel.TOKEN: lambda log_ratio_N, *_: token_ratio(log_ratio_N),
    RatioLevel.SEQUENCE: sequence_ratio,
}
