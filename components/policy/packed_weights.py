"""Models for decoding on CPUs: many calls with few rows each, between which the weights stay as they are.

A decoding step reads every weight for a few dozen rows. Packed weights take less time to read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from components.policy.decoder import Decoder, is_usual
from components.policy.products import PackedLinear, suits_onednn

_MIN_PACKED_ELEMENTS = 131_072
"""Of a weight that is packed by itself: products with smaller ones take about as long with MKL."""


@contextmanager
def packed_weights(model: PreTrainedModel) -> Iterator[None]:
    """Have the model compute with packed weights for the time of the block; they must not change, nor have gradients.

    A second copy of these weights exists meanwhile. The model must attend by a layout (`use_packed_attention`). Layers
    that compute in another way, such as quantised or adapted ones, stay as they are, and the decoder around them too.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    if is_usual(decoder) and all(suits_onednn(parameter) for parameter in decoder.parameters()):
        forwards[decoder] = _forward(Decoder(decoder, PackedLinear))
    for module in [output] if decoder in forwards else model.modules():
        # The output layer's own forward is that of `use_float32_logits`, which suits the types that are packed.
        is_plain = type(module) is nn.Linear and (module is output or "forward" not in vars(module))
        if is_plain and suits_onednn(module.weight) and module.weight.numel() >= _MIN_PACKED_ELEMENTS:
            forwards[module] = PackedLinear(module)
    if output not in forwards and type(output) is nn.Linear and _is_half_on_cpu(output.weight):
        forwards[output] = _float32_forward(output)
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def _is_half_on_cpu(weight: Tensor) -> bool:
    return (
        type(weight.data) is Tensor and weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
    )


def _float32_forward(output: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a forward of an output layer in half precision whose logits are those of `use_float32_logits`.

    Its weight is converted and packed once, and not for each token.
    """
    layer = nn.Linear(output.in_features, output.out_features, bias=output.bias is not None, device="meta")
    layer.weight = nn.Parameter(output.weight.detach().float(), requires_grad=False)
    if output.bias is not None:
        layer.bias = nn.Parameter(output.bias.detach().float(), requires_grad=False)
    packed = PackedLinear(layer)
    return lambda rows: packed(rows.float())


def _forward(decoder: Decoder) -> Callable[..., BaseModelOutputWithPast]:
    """Return a forward of the module that the decoder computes: of a batch of one row."""

    def forward(*, input_ids: Tensor, position_ids: Tensor, layout: Any, use_cache: bool) -> BaseModelOutputWithPast:
        assert not use_cache, "keys and values are kept by the layout"
        return BaseModelOutputWithPast(last_hidden_state=decoder(input_ids[0], position_ids[0], layout)[None])

    return forward
