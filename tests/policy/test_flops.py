import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from components.policy.flops import FlopCounter
from components.policy.packing import TokenSequence
from tests import tiny

SEQUENCES = [TokenSequence((1, 2, 3), (4, 5)), TokenSequence((1, 2, 3), (6,)), TokenSequence((7, 8), (9, 1))]
"""A group of two, and a sequence alone: 10 tokens of which 5 are scored, if the prompt is computed once."""
NUM_PAIRS = 6 + 3 + 1 + 3 * 3 + 10
"""The prompt, each completion with itself, both with the prompt, and the sequence alone."""


@pytest.mark.parametrize("tied", [False, True])
def test_operations_by_hand(tied: bool) -> None:
    """Two layers of 576 weights on 10 tokens, an output layer of 80 on 5, and 29 pairs for 2 heads of 6."""
    sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=tied)
    layer = 8 * 12 + 8 * 6 + 8 * 6 + 12 * 8 + 3 * 8 * 12
    products = 2 * layer * 10 + 8 * 10 * 5
    attention = 2 * (6 + 6) * 2 * 2 * NUM_PAIRS  # both products, over both heads and both layers
    assert (layer, NUM_PAIRS, 2 * products + attention) == (576, 29, 26_624)
    assert FlopCounter(Qwen3ForCausalLM(config)).forward_flops(tiny.batches(SEQUENCES, 100)) == 26_624
