"""Packed weights for decoding on CPUs: many calls of a model with a few dozen rows each, and constant weights.

Each call reads every weight, and packed weights (products.py) take less time to read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from components.policy.decoder import Decoder, is_supported
from components.policy.products import PackedLinear, suits_onednn

_MIN_PACKED_ELEMENTS = 131_072
"""Smallest weight that is packed by itself: products with smaller ones take about as long with MKL."""


@contextmanager
def packed_weights(model: PreTrainedModel) -> Iterator[None]:
    """Make the model compute with a packed copy of its weights in the block, without gradients.

    The weights must not change meanwhile, and the model must attend by a layout (`use_packed_attention`). Layers that
    compute in another way, such as quantised or adapted ones, are not replaced, nor is the decoder that has them.
    """
    forwards = _packed_forwards(model)
    previous = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, own_forward in previous.items():
            del vars(module)["forward"]
            if own_forward is not None:
                vars(module)["forward"] = own_forward


def _packed_forwards(model: PreTrainedModel) -> dict[nn.Module, Callable[..., Any]]:
    """Return a new `forward` for each module that is computed with packed weights."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    if is_supported(decoder) and all(suits_onednn(parameter) for parameter in decoder.parameters()):
        forwards[decoder] = _decoder_forward(Decoder(decoder, PackedLinear))
    for module in [output] if decoder in forwards else model.modules():
        # The output layer alone may have an own forward: that of `use_float32_logits` computes the same in float32.
        is_plain = type(module) is nn.Linear and (module is output or "forward" not in vars(module))
        if is_plain and suits_onednn(module.weight) and module.weight.numel() >= _MIN_PACKED_ELEMENTS:
            forwards[module] = PackedLinear(module)
    if output not in forwards and type(output) is nn.Linear and _is_half_on_cpu(output.weight):
        forwards[output] = _float32_forward(output)
    return forwards


def _is_half_on_cpu(weight: Tensor) -> bool:
    """Tell whether a weight is in half precision on the CPU, and not quantised."""
    is_plain = type(weight.data) is Tensor  # quantised tensors have other classes
    return is_plain and weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)


def _float32_forward(output: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a forward with the logits of `use_float32_logits` that converts and packs the weight only once."""
    layer = nn.Linear(output.in_features, output.out_features, bias=output.bias is not None, device="meta")
    layer.weight = nn.Parameter(output.weight.detach().float(), requires_grad=False)
    if output.bias is not None:
        layer.bias = nn.Parameter(output.bias.detach().float(), requires_grad=False)
    packed = PackedLinear(layer)
    return lambda rows: packed(rows.float())


def _decoder_forward(decoder: Decoder) -> Callable[..., BaseModelOutputWithPast]:
    """Return a forward that calls `decoder` with the arguments of the module that it replaces, for one row."""

    def forward(*, input_ids: Tensor, position_ids: Tensor, layout: Any, use_cache: bool) -> BaseModelOutputWithPast:
        assert not use_cache, "the layout keeps keys and values"
        return BaseModelOutputWithPast(last_hidden_state=decoder(input_ids[0], position_ids[0], layout)[None])

    return forward
