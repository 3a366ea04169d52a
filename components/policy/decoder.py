"""Decoders of the usual kind on CPUs, in half as many operators as in transformers, to sample and to train.

Between the products of a small decoder, operators wait for memory: docs/decisions/0045-products-of-few-rows.md.

Shape suffixes:
    T  tokens of the row, U  those whose outputs are asked for, M  hidden size, I  width of the MLP
    H  heads of queries, K  heads of keys and values, D  size of a head
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from components.policy.products import JointLinear, PackedLinear

_USUAL_DECODERS = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
"""Classes of transformers that compute what `Decoder` does."""
_Linears = type[JointLinear] | type[PackedLinear]


def is_usual(decoder: Any) -> bool:
    """Tell whether `Decoder` computes what the module does: all in it is as its class has built it, with no window."""
    if type(decoder).__name__ not in _USUAL_DECODERS or not type(decoder).__module__.startswith("transformers.models."):
        return False
    layers = decoder.layers
    parts = [(each, each.self_attn, each.mlp, each.input_layernorm, each.post_attention_layernorm) for each in layers]
    head_norms = [
        (each.self_attn.q_norm, each.self_attn.k_norm) for each in layers if hasattr(each.self_attn, "q_norm")
    ]
    own = [decoder.norm, decoder.rotary_emb, *(part for each in (*parts, *head_norms) for part in each)]
    if any(type(each).__module__ != type(decoder).__module__ for each in own):
        return False
    attentions = [layer.self_attn for layer in layers]
    windows = [getattr(each, "sliding_window", getattr(each.config, "sliding_window", None)) for each in attentions]
    linears = [each for layer in layers for each in (*_projections(layer.self_attn), *_products(layer.mlp))]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parameters = list(decoder.parameters())
    return (
        0 < len(layers) == decoder.config.num_hidden_layers
        and not any(windows)
        and all(type(each) is nn.Linear for each in linears)
        and all(query.variance_epsilon == key.variance_epsilon for query, key in head_norms)
        and not any("forward" in vars(each) or any(vars(each)[name] for name in hooks) for each in decoder.modules())
        and len({(each.device.type, each.dtype) for each in parameters}) == 1
        and all(type(each.data) is Tensor for each in parameters)  # quantised ones are of classes of their own
    )


def trains_as_usual(decoder: Any) -> bool:
    """Tell whether `Decoder` may take the place of the module in training, with all its weights in this process."""
    if not is_usual(decoder):
        return False
    weight = decoder.embed_tokens.weight
    is_whole = weight.device.type == "cpu" and not hasattr(weight, "ds_id")  # the mark of what DeepSpeed has sharded
    recomputes = any(getattr(each, "recomputes", False) for each in decoder.modules())
    return is_whole and weight.dtype in (torch.float32, torch.float64) and not recomputes


class Decoder:
    """The decoder of a module that `is_usual`: embedding, layers, and a last norm."""

    def __init__(self, decoder: Any, linears: _Linears = JointLinear) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._layers = [_Layer(layer, linears) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm.weight, decoder.norm)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, layout: Any, places_U: Tensor | None = None) -> Tensor:
        """Return the hidden states of a row of tokens, (T, M), or of some of its places, (U, M)."""
        hidden_TM = self._embed(ids_T)
        rotation_T1C = _rotation(*self._rotary(hidden_TM, positions_T[None]))
        for layer in self._layers[:-1]:
            hidden_TM = layer(hidden_TM, rotation_T1C, layout)
        return self._norm(self._layers[-1](hidden_TM, rotation_T1C, layout, places_U))


class _Layer:
    """Attention with rotary positions, then a gated MLP, each of the normed input and added to it."""

    def __init__(self, layer: Any, linears: _Linears) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention, self._activation = attention, mlp.act_fn
        query, key, value, out = _projections(attention)
        gate, up, down = _products(mlp)
        # Queries and keys are multiplied with each other alone: any order of a head's numbers does.
        paired = [_PairedHeads(each, attention.head_dim) for each in (query, key)]
        self._qkv, self._out = linears(*paired, value), linears(out)
        self._gate_up, self._down = linears(gate, up), linears(down)
        self._num_heads = [each.out_features // attention.head_dim for each in (query, key, value)]
        self._input_norm, self._mlp_norm = (
            _Norm(each.weight, each) for each in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self._heads_norm: _Norm | None = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm] * self._num_heads[0] + [attention.k_norm] * self._num_heads[1]
            weights = [_alternating_halves(norm.weight, attention.head_dim) for norm in norms]
            self._heads_norm = _Norm(torch.stack(weights), attention.q_norm)

    def __call__(self, hidden_TM: Tensor, rotation_T1C: Tensor, layout: Any, places_U: Tensor | None = None) -> Tensor:
        heads = self._qkv(self._input_norm(hidden_TM)).unflatten(1, (-1, self._attention.head_dim))
        num_queries, num_keys, num_values = self._num_heads
        qk, v_TKD = heads.split((num_queries + num_keys, num_values), dim=1)
        if self._heads_norm is not None:
            qk = self._heads_norm(qk)
        q_THD, k_TKD = _rotate(qk, rotation_T1C).split((num_queries, num_keys), dim=1)
        attended_THD = layout.attend(self._attention.layer_idx, q_THD, k_TKD, v_TKD, self._attention.scaling)
        if places_U is not None:
            hidden_TM, attended_THD = hidden_TM[places_U], attended_THD[places_U]
        hidden_TM = self._out(attended_THD.flatten(1), hidden_TM)
        gated_TI = _gate(self._gate_up(self._mlp_norm(hidden_TM)), self._activation)
        return self._down(gated_TI, hidden_TM)


class _PairedHeads:
    """A linear layer of heads, of which the numbers that rotary positions turn together are neighbours.

    In transformers they are half a head apart.
    """

    def __init__(self, layer: nn.Linear, head_dim: int) -> None:
        self._layer, self._head_dim = layer, head_dim

    @property
    def out_features(self) -> int:
        return self._layer.out_features

    @property
    def weight(self) -> Tensor:
        return _alternating_halves(self._layer.weight, self._head_dim)

    @property
    def bias(self) -> Tensor | None:
        return None if self._layer.bias is None else _alternating_halves(self._layer.bias, self._head_dim)


def _alternating_halves(rows: Tensor, size: int) -> Tensor:
    """Take rows from the first and the second half of each `size` of them in turn."""
    halves: Tensor = rows.unflatten(0, (-1, 2, size // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _projections(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]


def _products(mlp: Any) -> list[Any]:
    return [mlp.gate_proj, mlp.up_proj, mlp.down_proj]


class _Norm:
    """RMS normalisation of the last dimension (arXiv 1910.07467), by one weight or by one for each head."""

    def __init__(self, weight: Tensor, norm: Any) -> None:
        self._weight, self._eps = weight, weight.new_tensor(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return (x * _rms_scale(x, self._eps)).mul_(self._weight)
        normed: Tensor = _RMSNorm.apply(x, self._weight, self._eps)  # type: ignore[no-untyped-call]
        return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        by_weight = grad * normed
        mean = (by_weight * weight).mean(-1, keepdim=True)
        # With n = x s and s = mean(x^2)^-1/2: dn/dx = s (1 - n n' / size)
        by_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return by_x, by_weight.sum_to_size(weight.shape), None


def _rms_scale(x: Tensor, eps: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()


def _rotation(cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
    """Return the angles by which positions turn heads, as complex numbers, (T, 1, D / 2)."""
    cos_1TC, sin_1TC = (each.chunk(2, dim=-1)[0] for each in (cos_1TD, sin_1TD))
    return torch.complex(cos_1TC, sin_1TC).transpose(0, 1)


def _rotate(x_THD: Tensor, rotation_T1C: Tensor) -> Tensor:
    """Turn pairs of numbers by the angles of their positions (arXiv 2104.09864)."""
    if not torch.is_grad_enabled():
        return _turned(x_THD, rotation_T1C)
    rotated: Tensor = _Rotation.apply(x_THD, rotation_T1C)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, rotation_T1C: Tensor) -> Tensor:
        ctx.save_for_backward(rotation_T1C)
        return _turned(x_THD, rotation_T1C)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        (rotation_T1C,) = ctx.saved_tensors
        return _turned(grad_THD, rotation_T1C.conj().resolve_conj()), None


def _turned(x_THD: Tensor, rotation_T1C: Tensor) -> Tensor:
    x_THC = torch.view_as_complex(x_THD.unflatten(-1, (-1, 2)))
    turned: Tensor = torch.view_as_real(x_THC * rotation_T1C).flatten(-2)
    return turned


def _gate(gate_up: Tensor, activation: nn.Module) -> Tensor:
    """Return act(gate) * up, whose inputs are side by side in the last dimension."""
    if torch.is_grad_enabled() and type(activation) is SiLUActivation:
        gated: Tensor = _GatedSiLU.apply(gate_up)  # type: ignore[no-untyped-call]
        return gated
    gate_TI, up_TI = gate_up.chunk(2, dim=-1)
    active_TI: Tensor = activation(gate_TI)
    return active_TI * up_TI if torch.is_grad_enabled() else active_TI.mul_(up_TI)


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate_TI, up_TI = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate_TI).mul_(up_TI)

    @staticmethod
    def backward(ctx: Any, grad_TI: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate_TI, up_TI = gate_up.chunk(2, dim=-1)
        by_both = torch.empty_like(gate_up)
        by_gate_TI, by_up_TI = by_both.chunk(2, dim=-1)
        torch.mul(grad_TI, nn.functional.silu(gate_TI), out=by_up_TI)
        torch.ops.aten.silu_backward.grad_input(grad_TI * up_TI, gate_TI, grad_input=by_gate_TI)
        return by_both
