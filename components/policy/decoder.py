"""Decoders of the Llama and Qwen families on CPUs, for sampling and training, in half the operators of transformers.

The operators between the matrix products of a small decoder wait for memory: see
docs/decisions/0045-products-of-few-rows.md.

Shape suffixes:
    T  tokens of the row, U  those whose outputs are needed, M  hidden size, I  width of the MLP
    H  heads of queries, K  heads of keys and values, D  size of a head, C  complex numbers of a head (D / 2)
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from components.policy.products import JointLinear, PackedLinear

_SUPPORTED_CLASSES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
"""Classes of transformers that compute the same as `Decoder`."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Linears = type[JointLinear] | type[PackedLinear]


def is_supported(decoder: Any) -> bool:
    """Tell whether `Decoder` computes the same as the module: its class is known, and nothing in it was replaced."""
    name, source = type(decoder).__name__, type(decoder).__module__
    if name not in _SUPPORTED_CLASSES or not source.startswith("transformers.models."):
        return False
    layers, attentions = decoder.layers, [layer.self_attn for layer in decoder.layers]
    head_norms = [(each.q_norm, each.k_norm) for each in attentions if hasattr(each, "q_norm")]
    parts = [decoder.norm, decoder.rotary_emb, *layers, *attentions, *chain(*head_norms)]
    for layer in layers:
        parts += [layer.mlp, layer.input_layernorm, layer.post_attention_layernorm]
    if any(type(part).__module__ != source for part in parts):
        return False
    # As in attention.py: a layer without this attribute has the window of its config, and None means no window.
    windows = [getattr(each, "sliding_window", getattr(each.config, "sliding_window", None)) for each in attentions]
    linears = [linear for layer in layers for linear in _layer_linears(layer)]
    parameters = list(decoder.parameters())
    return (
        0 < len(layers) == decoder.config.num_hidden_layers
        and not any(windows)
        and all(type(each) is nn.Linear for each in linears)
        and all(query.variance_epsilon == key.variance_epsilon for query, key in head_norms)
        and not any(_is_patched(module) for module in decoder.modules())
        and len({(each.device.type, each.dtype) for each in parameters}) == 1
        and all(type(each.data) is Tensor for each in parameters)  # quantised weights have other classes
    )


def _layer_linears(layer: Any) -> list[Any]:
    """Return the linear layers for query, key, value, attention output, gate, up and down."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _is_patched(module: nn.Module) -> bool:
    """Tell whether a module has hooks, or another `forward` than its class."""
    return "forward" in vars(module) or any(vars(module)[name] for name in _HOOKS)


def is_supported_in_training(decoder: Any) -> bool:
    """Tell whether `Decoder` may replace the module in training.

    It needs all weights, on the CPU, in full precision, and does not recompute activations as `recompute_layers` asks.
    """
    if not is_supported(decoder):
        return False
    weight = decoder.embed_tokens.weight
    is_sharded = hasattr(weight, "ds_id")  # set by ZeRO 3
    recomputes = any(getattr(each, "recomputes", False) for each in decoder.modules())
    is_full_precision = weight.dtype in (torch.float32, torch.float64)
    return weight.device.type == "cpu" and is_full_precision and not is_sharded and not recomputes


class Decoder:
    """Computes the same as a transformers module that `is_supported`: embedding, layers, and a final norm."""

    def __init__(self, decoder: Any, linears: _Linears = JointLinear) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._layers = [_Layer(layer, linears) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm.weight, decoder.norm)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, layout: Any, places_U: Tensor | None = None) -> Tensor:
        """Return the hidden states of a row of tokens, (T, M), or at `places_U` alone, (U, M)."""
        hidden_TM = self._embed(ids_T)
        # transformers repeats the C angles in the second half of D.
        cos_1TC, sin_1TC = (each.chunk(2, dim=-1)[0] for each in self._rotary(hidden_TM, positions_T[None]))
        rotation_T1C = torch.complex(cos_1TC, sin_1TC).transpose(0, 1)
        for layer in self._layers[:-1]:
            hidden_TM = layer(hidden_TM, rotation_T1C, layout)
        return self._norm(self._layers[-1](hidden_TM, rotation_T1C, layout, places_U))


class _Layer:
    """Attention with rotary positions, then a gated MLP; each reads the normed hidden states and is added to them."""

    def __init__(self, layer: Any, linears: _Linears) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention, self._activation = attention, mlp.act_fn
        query, key, value, out, gate, up, down = _layer_linears(layer)
        # Reordering the numbers of a head in queries and keys alike leaves their dot products unchanged.
        paired = [_PairedHeads(each, attention.head_dim) for each in (query, key)]
        self._qkv, self._out = linears(*paired, value), linears(out)
        self._gate_up, self._down = linears(gate, up), linears(down)
        self._num_heads = [each.out_features // attention.head_dim for each in (query, key, value)]
        self._input_norm = _Norm(layer.input_layernorm.weight, layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm.weight, layer.post_attention_layernorm)
        self._heads_norm: _Norm | None = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm] * self._num_heads[0] + [attention.k_norm] * self._num_heads[1]
            weights = [_interleave_halves(norm.weight, attention.head_dim) for norm in norms]
            self._heads_norm = _Norm(torch.stack(weights), attention.q_norm)

    def __call__(self, hidden_TM: Tensor, rotation_T1C: Tensor, layout: Any, places_U: Tensor | None = None) -> Tensor:
        """Return the hidden states after the layer, of all tokens or of those at `places_U` alone."""
        num_queries, num_keys, num_values = self._num_heads
        heads = self._qkv(self._input_norm(hidden_TM)).unflatten(1, (-1, self._attention.head_dim))
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
    """A query or key layer with reordered outputs: the pairs that RoPE rotates are adjacent, not half a head apart."""

    def __init__(self, layer: nn.Linear, head_dim: int) -> None:
        self._layer, self._head_dim = layer, head_dim

    @property
    def out_features(self) -> int:
        return self._layer.out_features

    @property
    def weight(self) -> Tensor:
        return _interleave_halves(self._layer.weight, self._head_dim)

    @property
    def bias(self) -> Tensor | None:
        return None if self._layer.bias is None else _interleave_halves(self._layer.bias, self._head_dim)


def _interleave_halves(rows: Tensor, size: int) -> Tensor:
    """Reorder each block of `size` rows as 0, size / 2, 1, size / 2 + 1, ..."""
    halves: Tensor = rows.unflatten(0, (-1, 2, size // 2))
    return halves.transpose(1, 2).flatten(0, 2)


class _Norm:
    """RMS normalisation of the last dimension (arXiv 1910.07467), with one weight or one for each head."""

    def __init__(self, weight: Tensor, norm: Any) -> None:
        """Take the weight, and epsilon from a norm of transformers."""
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
        grad_weight = grad * normed
        mean = (grad_weight * weight).mean(-1, keepdim=True)
        # With n = x s and s = mean(x^2)^-1/2: dn/dx = s (1 - n n' / size)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x, grad_weight.sum_to_size(weight.shape), None


def _rms_scale(x: Tensor, eps: Tensor) -> Tensor:
    """Return (mean(x^2) + eps)^-1/2 over the last dimension, without a tensor of squares."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()


def _rotate(x_THD: Tensor, rotation_T1C: Tensor) -> Tensor:
    """Rotate adjacent pairs of a head's numbers by the angles of their positions (RoPE, arXiv 2104.09864)."""
    if not torch.is_grad_enabled():
        return _rotate_pairs(x_THD, rotation_T1C)
    rotated: Tensor = _Rotation.apply(x_THD, rotation_T1C)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, rotation_T1C: Tensor) -> Tensor:
        ctx.save_for_backward(rotation_T1C)
        return _rotate_pairs(x_THD, rotation_T1C)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        (rotation_T1C,) = ctx.saved_tensors
        return _rotate_pairs(grad_THD, rotation_T1C.conj().resolve_conj()), None


def _rotate_pairs(x_THD: Tensor, rotation_T1C: Tensor) -> Tensor:
    """Multiply adjacent pairs of numbers, read as complex numbers, by the rotation."""
    x_THC = torch.view_as_complex(x_THD.unflatten(-1, (-1, 2)))
    rotated: Tensor = torch.view_as_real(x_THC * rotation_T1C).flatten(-2)
    return rotated


def _gate(gate_up: Tensor, activation: nn.Module) -> Tensor:
    """Return act(gate) * up, (T, I), where gate and up are side by side in the last dimension."""
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
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate_TI, grad_up_TI = grad_gate_up.chunk(2, dim=-1)  # views, which the next lines fill
        torch.mul(grad_TI, nn.functional.silu(gate_TI), out=grad_up_TI)
        torch.ops.aten.silu_backward.grad_input(grad_TI * up_TI, gate_TI, grad_input=grad_gate_TI)
        return grad_gate_up
