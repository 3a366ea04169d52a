"""The floating-point operations (FLOPs) of a model, and the rate at which this machine can do them.

A product of an (a x b) and a (b x c) matrix takes 2abc operations; embeddings are looked up, not multiplied.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from components.policy.packing import MicroBatch


class FlopCounter:
    """Counts the operations of a model; create it before the weights are sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, decoder = model.config, model.get_decoder()
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        embeddings = [module.weight for module in decoder.modules() if isinstance(module, nn.Embedding)]
        matrices = [weight for weight in decoder.parameters() if weight.dim() > 1]
        self._layer_weights = sum(map(torch.numel, matrices)) - sum(map(torch.numel, embeddings))
        self._head_weights = model.get_output_embeddings().weight.numel()
        self._attention_size: int = head_size * config.num_attention_heads * config.num_hidden_layers

    def forward_flops(self, batches: Sequence[MicroBatch]) -> float:
        """Return the operations of one forward pass; a backward pass takes twice as many."""
        num_products = num_pairs = 0.0
        for batch in batches:
            num_products += self._layer_weights * len(batch.input_ids_T) + self._head_weights * len(batch.target_N)
            # Pairs of a query and a key: (1 + 2 + ... + n) if causal, as many queries as keys.
            num_pairs += sum(length * (length + 1) / 2 for length, _ in batch.layout.self_attention.lengths)
            num_pairs += sum(queries * keys for queries, keys in batch.layout.prompt_attention.lengths)
        # Attention multiplies each pair twice: for its score, and for the weighted value.
        return 2.0 * num_products + 4.0 * self._attention_size * num_pairs


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product, measured here: the upper limit of utilisation."""
    is_cuda = device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    # CPUs without half-precision instructions would take minutes for a product that takes others a tenth of a second.
    cpu_size = 2048 if dtype == torch.float32 else 512
    size = 8192 if is_cuda else cpu_size
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(8):  # the first are slower
        synchronize()
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronize()
        times.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(times)
