"""The least time a GRPO step can take on a machine: its arithmetic at the rate of a large matrix product.

Each prompt token counts once per group and each completion token once. A token costs 2 operations, a multiplication
and an addition, for each parameter of the layers in each of sampling, reference and policy forward, and 4 in the
backward pass. The output layer (a tied embedding, counted once) costs the same, but only for completion tokens: nothing
is asked of it at the others. To attend, a token multiplies its query with the keys before it and its own, and their
values with the weights: 4 L d operations for each of them, with L layers and a width d of all heads together; the k-th
token of a sequence sees k. The backward pass costs twice the forward pass here too.

The optimizer, the softmax and everything else that is no product of matrices are not counted at all.
"""

from case import Row
from transformers import PretrainedConfig

_REFERENCE_AND_TRAINING = 4
"""Forward passes that reference, policy forward and backward together cost."""


def forward_flops(config: PretrainedConfig, row: Row, *, num_parameters: int) -> float:
    """Return the operations of one pass over all prompts and completions of a step."""
    lengths_B = row.lengths_B()
    head_parameters = config.vocab_size * config.hidden_size
    num_prompt_tokens = row.num_prompts * row.prompt_tokens
    in_prompts = row.num_prompts * _seen(0, row.prompt_tokens)
    in_completions = sum(_seen(row.prompt_tokens, length) for length in lengths_B)
    attention: float = 4.0 * config.num_hidden_layers * config.hidden_size * (in_prompts + in_completions)
    layers = 2.0 * (num_parameters - head_parameters) * (num_prompt_tokens + sum(lengths_B))
    return layers + 2.0 * head_parameters * sum(lengths_B) + attention


def _seen(before: int, count: int) -> int:
    """Keys that `count` tokens see together, of which the first follows `before` others."""
    return count * before + count * (count + 1) // 2


def update_operations(forward: float) -> float:
    """Return the operations of reference, policy forward and backward."""
    return _REFERENCE_AND_TRAINING * forward


def step_operations(forward: float) -> float:
    """Return the operations of a whole step: sampling is one more forward pass."""
    return forward + update_operations(forward)
