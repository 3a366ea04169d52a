"""The operations that a model needs, and the rate at which this machine could do them.

A product of an (a x b) and a (b x c) matrix is 2abc operations. Each prompt token counts once per group, each
completion token once; embeddings are looked up, not multiplied.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from components.policy.attention import Segments
from components.policy.packing import MicroBatch


class FlopCounter:
    """Counts the operations of a model; to be made before its weights are sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        decoder = model.get_decoder()
        matrices = sum(weight.numel() for weight in decoder.parameters() if weight.dim() > 1)
        tables = (module for module in decoder.modules() if isinstance(module, nn.Embedding))
        self._layer_weights = matrices - sum(table.weight.numel() for table in tables)
        self._head_weights = model.get_output_embeddings().weight.numel()
        self._attention_size: int = head_size * config.num_attention_heads * config.num_hidden_layers

    def forward_flops(self, batches: Sequence[MicroBatch]) -> float:
        """Return the operations of one forward pass; a backward pass takes twice as many."""
        num_tokens = sum(len(batch.input_ids_T) for batch in batches)
        num_scored = sum(len(batch.target_N) for batch in batches)
        num_pairs = sum(_pairs(batch.layout.own) + _pairs(batch.layout.shared) for batch in batches)
        products: float = self._layer_weights * num_tokens + self._head_weights * num_scored
        return 2.0 * products + 4.0 * self._attention_size * num_pairs


def _pairs(segments: Segments) -> float:
    """Return the number of pairs of a query and a key that it sees."""
    return sum(q * (q + 1) / 2 if segments.causal else q * k for q, k in segments.lengths)


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured operations per second of a large matrix product here: the upper limit of utilisation."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    size = 8192 if device.type == "cuda" else 2048
    left = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(8):  # the first are slower
        synchronize()
        started = time.perf_counter()
        torch.mm(left, left)
        synchronize()
        fastest = min(fastest, time.perf_counter() - started)
    return 2.0 * size**3 / fastest
