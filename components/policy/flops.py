"""The operations that a model needs, and the rate at which this machine could do them.

A product of an (a x b) and a (b x c) matrix is 2abc operations; embeddings are looked up, not multiplied.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from components.policy.packing import MicroBatch


class FlopCounter:
    """Counts the operations of a model; to be made before its weights are sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, decoder = model.config, model.get_decoder()
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        tables = [module.weight for module in decoder.modules() if isinstance(module, nn.Embedding)]
        matrices = [weight for weight in decoder.parameters() if weight.dim() > 1]
        self._layer_weights = sum(map(torch.numel, matrices)) - sum(map(torch.numel, tables))
        self._head_weights = model.get_output_embeddings().weight.numel()
        self._attention_size: int = head_size * config.num_attention_heads * config.num_hidden_layers

    def forward_flops(self, batches: Sequence[MicroBatch]) -> float:
        """Return the operations of one forward pass; a backward pass takes twice as many."""
        products = num_pairs = 0.0
        for batch in batches:
            products += self._layer_weights * len(batch.input_ids_T) + self._head_weights * len(batch.target_N)
            for segments in (batch.layout.own, batch.layout.shared):
                num_pairs += sum(q * (q + 1) / 2 if segments.causal else q * k for q, k in segments.lengths)
        return 2.0 * products + 4.0 * self._attention_size * num_pairs


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured operations per second of a large matrix product here: the upper limit of utilisation."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    # Processors without instructions for half precision take minutes for what takes others a tenth of a second.
    on_processor = 2048 if dtype == torch.float32 else 512
    size = 8192 if device.type == "cuda" else on_processor
    left = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(8):  # the first are slower
        synchronize()
        started = time.perf_counter()
        torch.mm(left, left)
        synchronize()
        times.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(times)
