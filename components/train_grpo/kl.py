"""Per-token estimators of KL(pi || pi_ref) from samples of pi (arXiv 2402.03300, equation 4).

With x = log(pi_ref / pi), and samples from pi itself, all have the divergence as their mean or close to it. As terms
of a loss they differ: the mean of the gradient is zero for k1, that of KL(pi || pi_ref) for k2 and for k3 times the
ratio to the sampling policy, and that of the *other* divergence KL(pi_ref || pi) for k3, the paper's own
(http://joschu.net/blog/kl-approx.html has the names).

Shape suffixes:
    N  completion tokens
"""

from collections.abc import Callable

import torch
from torch import Tensor

from components.train_grpo.config import KLEstimator

_MAX_LOG_RATIO = 20.0
"""Bound on x before it is exponentiated: one token that the policy all but excludes is not infinitely far."""


def kl_to_reference(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, ratio_N: Tensor, estimator: KLEstimator
) -> Tensor:
    """Return the estimate for each token; `ratio_N` is pi / pi_old, which only `k3_corrected` looks at."""
    return _ESTIMATORS[estimator](reference_logprobs_N - logprobs_N, ratio_N)


def k1(log_ratio_N: Tensor) -> Tensor:
    """Return -x: unbiased, of either sign, and without any gradient in the mean."""
    return -log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """Return x^2 / 2: never negative, biased, with the right gradient in the mean."""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: Tensor) -> Tensor:
    """Return exp(x) - x - 1 (equation 4): never negative and unbiased."""
    bounded_N = log_ratio_N.clamp(max=_MAX_LOG_RATIO)  # in both places, or the gradient above it has the wrong sign
    return torch.expm1(bounded_N) - bounded_N


_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    KLEstimator.K1: lambda log_ratio_N, _: k1(log_ratio_N),
    KLEstimator.K2: lambda log_ratio_N, _: k2(log_ratio_N),
    KLEstimator.K3: lambda log_ratio_N, _: k3(log_ratio_N),
    KLEstimator.K3_CORRECTED: lambda log_ratio_N, ratio_N: ratio_N * k3(log_ratio_N),
}
