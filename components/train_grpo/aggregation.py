"""How the token losses of an optimizer step become one number: a weight for each completion's tokens.

The weights are counted over the whole optimizer step, all its micro-batches and processes, before the first of them
runs: the sum of weighted token losses is then the objective, however the step is split.

Shape suffixes:
    B  completions of the optimizer step
"""

from collections.abc import Callable

import torch
from torch import Tensor

from components.train_grpo.config import Aggregation


def token_weights(num_tokens_B: Tensor, aggregation: Aggregation, *, max_new_tokens: int) -> Tensor:
    """Return the weight of each token of each completion, (B,); a completion of no tokens is not counted at all.

    A completion out of the loss, such as a masked one, is given with no tokens; one whose advantage is zero is not:
    it counts like any other.
    """
    return torch.where(num_tokens_B > 0, _AGGREGATIONS[aggregation](num_tokens_B, max_new_tokens), 0.0)


def sequence_mean(num_tokens_B: Tensor) -> Tensor:
    """Return 1 / (B |o_i|): the double mean of equation 3, over groups, completions and tokens."""
    return 1.0 / (_num_completions(num_tokens_B) * num_tokens_B.clamp(min=1))


def token_mean(num_tokens_B: Tensor) -> Tensor:
    """Return 1 / sum_i |o_i|: every token counts alike, so long completions count for more (DAPO, equation 8)."""
    return (1.0 / num_tokens_B.sum().clamp(min=1)).expand(len(num_tokens_B))


def constant(num_tokens_B: Tensor, max_new_tokens: int) -> Tensor:
    """Return 1 / (B L) for the length limit L: no completion's length changes its tokens' weight (Dr. GRPO)."""
    return (1.0 / (_num_completions(num_tokens_B) * max_new_tokens)).expand(len(num_tokens_B))


def _num_completions(num_tokens_B: Tensor) -> Tensor:
    return (num_tokens_B > 0).sum(dtype=num_tokens_B.dtype).clamp(min=1)


_AGGREGATIONS: dict[Aggregation, Callable[[Tensor, int], Tensor]] = {
    Aggregation.SEQUENCE_MEAN: lambda num_tokens_B, _: sequence_mean(num_tokens_B),
    Aggregation.TOKEN_MEAN: lambda num_tokens_B, _: token_mean(num_tokens_B),
    Aggregation.CONSTANT: constant,
}
