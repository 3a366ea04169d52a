"""Group-relative advantages: how much better a completion did than its siblings (arXiv 2402.03300, section 4.1).

Shape suffixes:
    P  prompts, G  completions per prompt
    K  rewards of a prompt's group: G for outcome supervision, the steps of all its completions for process supervision

An estimator takes rewards of shape (P, K) and returns advantages of that shape. NaN is no reward: it is left out of
every statistic, and its advantage is zero. So is that of every reward of a group whose rewards are all equal.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from components.train_grpo.config import AdvantageEstimator

_SPREAD_TOLERANCE = 1e-6
"""Rewards that differ by less are equal: their standard deviation is rounding error, and dividing by it makes noise."""


def advantages(rewards_PK: Tensor, estimator: AdvantageEstimator) -> Tensor:
    """Return the advantage of each reward over its group, (P, K)."""
    return _ESTIMATORS[estimator](rewards_PK)


def z_score(rewards_PK: Tensor) -> Tensor:
    """Return (r - mean(r)) / std(r), with the biased standard deviation: the paper does not say which."""
    centered_PK, num_scored_P1 = _centered(rewards_PK)
    return centered_PK / _or_one(_biased_std(centered_PK, num_scored_P1))


def z_score_bessel(rewards_PK: Tensor) -> Tensor:
    """Return (r - mean(r)) / std(r), with the unbiased standard deviation, as most implementations do."""
    centered_PK, num_scored_P1 = _centered(rewards_PK)
    variance_P1 = centered_PK.square().sum(1, keepdim=True) / (num_scored_P1 - 1).clamp(min=1)
    return centered_PK / _or_one(variance_P1.sqrt())


def mean_only(rewards_PK: Tensor) -> Tensor:
    """Return r - mean(r): no preference for groups whose rewards hardly differ (Dr. GRPO, arXiv 2503.20783)."""
    return _centered(rewards_PK)[0]


def leave_one_out(rewards_PK: Tensor) -> Tensor:
    """Return r_i less the mean of the others, which is K / (K - 1) times r_i - mean(r) (RLOO, arXiv 2402.14740).

    Never divided by a standard deviation without r_i: that of a nearly constant rest is a rounding error.
    """
    centered_PK, num_scored_P1 = _centered(rewards_PK)
    return centered_PK * num_scored_P1 / (num_scored_P1 - 1).clamp(min=1)


def batch_std(rewards_PK: Tensor) -> Tensor:
    """Return r - mean(r) over the biased standard deviation of all rewards of the rollout (arXiv 2508.08221)."""
    centered_PK, _ = _centered(rewards_PK)
    return centered_PK / _or_one(_biased_std(*_centered(rewards_PK.reshape(1, -1))))


_ESTIMATORS: dict[AdvantageEstimator, Callable[[Tensor], Tensor]] = {
    AdvantageEstimator.Z_SCORE: z_score,
    AdvantageEstimator.Z_SCORE_BESSEL: z_score_bessel,
    AdvantageEstimator.MEAN_ONLY: mean_only,
    AdvantageEstimator.LEAVE_ONE_OUT: leave_one_out,
    AdvantageEstimator.BATCH_STD: batch_std,
}


def has_spread(rewards_PK: Tensor) -> Tensor:
    """Return whether each group's rewards differ at all, shape (P,): without it there is nothing to learn from."""
    unscored_PK = rewards_PK.isnan()
    highest_P = rewards_PK.masked_fill(unscored_PK, -torch.inf).amax(dim=1)
    lowest_P = rewards_PK.masked_fill(unscored_PK, torch.inf).amin(dim=1)
    return highest_P - lowest_P > _SPREAD_TOLERANCE


def _centered(rewards_PK: Tensor) -> tuple[Tensor, Tensor]:
    """Return r - mean(r), exactly zero where there is no reward or no spread, and the number of rewards (P, 1)."""
    scored_PK = ~rewards_PK.isnan()
    num_scored_P1 = scored_PK.sum(dim=1, keepdim=True).clamp(min=1)
    mean_P1 = rewards_PK.nansum(dim=1, keepdim=True) / num_scored_P1
    counted_PK = scored_PK & has_spread(rewards_PK)[:, None]
    return torch.where(counted_PK, rewards_PK - mean_P1, 0.0), num_scored_P1


def _biased_std(centered_PK: Tensor, num_scored_P1: Tensor) -> Tensor:
    return (centered_PK.square().sum(1, keepdim=True) / num_scored_P1).sqrt()


def _or_one(std: Tensor) -> Tensor:
    """A standard deviation that may be divided by: where nothing differs, everything centered is zero already."""
    return torch.where(std > 0, std, 1.0)
