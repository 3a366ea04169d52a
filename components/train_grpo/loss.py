"""The clipped surrogate of the GRPO objective (arXiv 2402.03300, equation 3).

Shape suffixes:
    N  completion tokens
"""

import torch
from torch import Tensor

from components.train_grpo.config import ClipConfig


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip: ClipConfig) -> Tensor:
    """Return min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) per token, to be maximised (equation 3).

    The paper's epsilon is both `low` and `high`; DAPO's clip-higher (arXiv 2503.14476, section 3.1) raises `high`.
    With a dual clip (arXiv 1912.09729, equation 5) a negative advantage is never multiplied by more than `dual`.
    """
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if clip.dual is None:
        return surrogate_N
    return torch.where(advantages_N < 0, torch.maximum(surrogate_N, clip.dual * advantages_N), surrogate_N)


def clipped_high(ratio_N: Tensor, advantages_N: Tensor, clip: ClipConfig) -> Tensor:
    """Return which tokens have a positive advantage and a ratio so high that the clip stops their gradient."""
    return (ratio_N > 1 + clip.high) & (advantages_N > 0)


def clipped_low(ratio_N: Tensor, advantages_N: Tensor, clip: ClipConfig) -> Tensor:
    """Return which tokens have a negative advantage and a ratio that stops their gradient: too low, or above `dual`."""
    stopped_N = ratio_N < 1 - clip.low
    if clip.dual is not None:
        stopped_N = stopped_N | (ratio_N > clip.dual)
    return stopped_N & (advantages_N < 0)
