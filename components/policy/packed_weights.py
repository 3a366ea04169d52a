"""Models for decoding on CPUs: many calls with few rows each, between which the weights stay as they are.

A decoding step reads every weight for a few dozen rows. That pushes everything else out of the caches, so that each
operator takes several times as long as it would alone. Packed weights take less time to read, and decoders of the usual
kind are computed here in half as many operators as in transformers: docs/decisions/0045-products-of-few-rows.md.

Shape suffixes:
    T  tokens of the row, M  hidden size, I  width of the MLP
    H  heads of queries, K  heads of keys and values, D  size of a head
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from components.policy.products import PackedLinear, suits_onednn

_USUAL_DECODERS = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
"""Classes of transformers that compute what `_Decoder` does."""
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
    if _is_usual(decoder):
        forwards[decoder] = _Decoder(decoder)
    for module in [output] if decoder in forwards else model.modules():
        # The output layer's own forward is that of `use_float32_logits`, which suits the types that are packed.
        is_plain = type(module) is nn.Linear and (module is output or "forward" not in vars(module))
        if is_plain and suits_onednn(module.weight) and module.weight.numel() >= _MIN_PACKED_ELEMENTS:
            forwards[module] = PackedLinear(module)
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


def _is_usual(decoder: Any) -> bool:
    """Tell whether `_Decoder` computes what the module does: all in it is as its class has built it, with no window."""
    if type(decoder).__name__ not in _USUAL_DECODERS or not type(decoder).__module__.startswith("transformers.models."):
        return False
    attentions = [layer.self_attn for layer in decoder.layers]
    windows = [getattr(each, "sliding_window", getattr(each.config, "sliding_window", None)) for each in attentions]
    norms = [norm for layer in decoder.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    inner = [module for module in decoder.modules() if module is not decoder]
    return (
        0 < len(decoder.layers) == decoder.config.num_hidden_layers
        and not any(windows)
        and all(hasattr(norm, "variance_epsilon") for norm in (*norms, decoder.norm))
        and all(type(each) is nn.Linear for each in inner if hasattr(each, "in_features"))
        and not any(each._forward_hooks or each._forward_pre_hooks or "forward" in vars(each) for each in inner)
        and all(suits_onednn(parameter) for parameter in decoder.parameters())
    )


class _Decoder:
    """A decoder that is called with a row of tokens: embedding, layers, and a last norm."""

    def __init__(self, decoder: Any) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm)

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, layout: Any, use_cache: bool) -> Any:
        assert not use_cache, "keys and values are kept by the layout"
        hidden_1TM = self._embed(input_ids)
        cos_1TD, sin_1TD = self._rotary(hidden_1TM, position_ids)
        half = sin_1TD.shape[-1] // 2
        sin_1TD = torch.cat([-sin_1TD[..., :half], sin_1TD[..., half:]], dim=-1)
        cos_T1D, sin_T1D = cos_1TD.transpose(0, 1), sin_1TD.transpose(0, 1)
        hidden_TM = hidden_1TM[0]
        for layer in self._layers:
            hidden_TM = layer(hidden_TM, cos_T1D, sin_T1D, layout)
        return BaseModelOutputWithPast(last_hidden_state=self._norm(hidden_TM)[None])


class _Layer:
    """Attention with rotary positions, then a gated MLP, each of the normed input and added to it."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention, self._activation = attention, mlp.act_fn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._qkv, self._out = PackedLinear(*projections), PackedLinear(attention.o_proj)
        self._gate_up, self._down = PackedLinear(mlp.gate_proj, mlp.up_proj), PackedLinear(mlp.down_proj)
        self._num_heads = [each.out_features // attention.head_dim for each in projections]
        self._input_norm, self._mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._heads_norm: _Norm | None = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm] * self._num_heads[0] + [attention.k_norm] * self._num_heads[1]
            self._heads_norm = _Norm(*norms)

    def __call__(self, hidden_TM: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, layout: Any) -> Tensor:
        heads = self._qkv(self._input_norm(hidden_TM)).unflatten(1, (-1, self._attention.head_dim))
        num_queries, num_keys, num_values = self._num_heads
        qk, v_TKD = heads.split((num_queries + num_keys, num_values), dim=1)
        if self._heads_norm is not None:
            qk = self._heads_norm(qk)
        # Rotary positions (arXiv 2104.09864): x cos + (-x2, x1) sin, where x1 and x2 are the halves of a head.
        qk = torch.addcmul(qk * cos_T1D, qk.roll(qk.shape[-1] // 2, -1), sin_T1D)
        q_THD, k_TKD = qk.split((num_queries, num_keys), dim=1)
        attended_THD = layout.attend(self._attention.layer_idx, q_THD, k_TKD, v_TKD, self._attention.scaling)
        hidden_TM = self._out.added_to(hidden_TM, attended_THD.flatten(1))
        gate_TI, up_TI = self._gate_up(self._mlp_norm(hidden_TM)).chunk(2, dim=-1)
        return self._down.added_to(hidden_TM, self._activation(gate_TI) * up_TI)


class _Norm:
    """RMS normalisation of the last dimension (arXiv 1910.07467), by one weight or by one for each head.

    In the order in which transformers computes it, so that sampler and trainer round alike.
    """

    def __init__(self, *norms: Any) -> None:
        weights = [norm.weight.detach() for norm in norms]
        self._weight = torch.stack(weights) if len(weights) > 1 else weights[0]
        self._eps = norms[0].variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = (x * x.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()).mul_(self._weight)
        return normed
