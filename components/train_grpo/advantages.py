"""Group-relative advantages: how much better a completion did than its siblings (arXiv 2402.03300, section 4.1.2).

Shape suffixes:
    P  prompts, G  completions per prompt
"""

import torch
from torch import Tensor

_SPREAD_TOLERANCE = 1e-6
"""Rewards that differ by less are equal: their standard deviation is rounding error, and dividing by it makes noise."""


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Return (r - mean(r)) / std(r) over each group, shape (P, G).

    The standard deviation is the biased one (divided by G): the paper does not say which; with Bessel's correction
    every advantage would be sqrt((G - 1) / G) of this. A group without spread has advantage exactly zero. A reward
    that is NaN could not be scored: it is left out of its group's statistics and its advantage is zero.
    """
    scored_PG = ~rewards_PG.isnan()
    num_scored_P1 = scored_PG.sum(dim=1, keepdim=True).clamp(min=1)
    filled_PG = rewards_PG.nan_to_num(0.0)
    mean_P1 = filled_PG.sum(dim=1, keepdim=True) / num_scored_P1
    centered_PG = torch.where(scored_PG, filled_PG - mean_P1, 0.0)
    std_P1 = (centered_PG.square().sum(dim=1, keepdim=True) / num_scored_P1).sqrt()
    spread_P1 = has_spread(rewards_PG)[:, None]
    return torch.where(spread_P1, centered_PG / torch.where(spread_P1, std_P1, 1.0), 0.0)


def has_spread(rewards_PG: Tensor) -> Tensor:
    """Return whether each group's rewards differ at all, shape (P,): without it there is nothing to learn from."""
    scored_PG = ~rewards_PG.isnan()
    highest_P = rewards_PG.masked_fill(~scored_PG, -torch.inf).amax(dim=1)
    lowest_P = rewards_PG.masked_fill(~scored_PG, torch.inf).amin(dim=1)
    return highest_P - lowest_P > _SPREAD_TOLERANCE
