"""From rewards of steps to an advantage for every token (arXiv 2402.03300, sections 4.1.2 and 4.1.3).

Outcome supervision is the case of one step, which ends with the completion.

Shape suffixes:
    P  prompts, G  completions per prompt
    K  steps of all completions of a prompt, one completion after the other, padded
    M  completion tokens of all groups, completion after completion
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Ends = Sequence[int]
"""Where each step of a completion ends: the number of tokens up to and including its last."""


def token_advantages(
    advantages_PK: Tensor, ends_PG: Sequence[Sequence[Ends]], num_tokens_PG: Sequence[Sequence[int]]
) -> Tensor:
    """Return for each token the sum of the advantages of the steps that end at it or later, (M,).

    The tokens after the last step's end get zero. A completion with more steps sums more of them: a bias of the
    paper's own.
    """
    tokens = []
    for advantages_K, ends_G, num_tokens_G in zip(advantages_PK, ends_PG, num_tokens_PG, strict=True):
        first = 0
        for ends, num_tokens in zip(ends_G, num_tokens_G, strict=True):
            at_end_T = torch.zeros(num_tokens, dtype=advantages_PK.dtype)
            at_end_T.index_add_(0, torch.tensor(ends) - 1, advantages_K[first : first + len(ends)])
            tokens.append(at_end_T.flip(0).cumsum(0).flip(0))
            first += len(ends)
    return torch.cat(tokens)
