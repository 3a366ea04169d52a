"""Products with the weights of linear layers on CPUs.

torch multiplies float32 matrices with MKL, which rearranges the whole weight for each product. For a few dozen rows
that takes longer than the product itself. oneDNN, which torch also contains, rearranges less, and nothing at all if the
weight is already rearranged ("packed"): see docs/decisions/0045-products-of-few-rows.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PACKED_ROWS = 32
"""Number of rows for which packed weights are optimised; products with other numbers of rows work too."""


def onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices of the same type, without a gradient."""
    if not (suits_onednn(left) and suits_onednn(right)):
        return left @ right
    return _onednn_linear(left, right.T, None)


LinearLayer = Any
"""An object with the attributes `out_features`, `weight` and `bias` of `nn.Linear`."""


class JointLinear:
    """Linear layers with the same input (T, M), computed as one product; each layer gets its gradient."""

    def __init__(self, *layers: LinearLayer) -> None:
        self._layers = layers

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs of all layers, side by side in the last dimension, plus the residual."""
        weights = [layer.weight for layer in self._layers]
        product: Tensor = _Linear.apply(rows, _joint_bias(self._layers), residual, *weights)  # type: ignore[no-untyped-call]
        return product


class _Linear(torch.autograd.Function):
    """rows W' + bias + residual, where W is all weights joined; each pass joins them anew and keeps no copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor | None, residual: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        weight = _join(weights)
        if suits_onednn(rows):
            return _onednn_linear(rows, weight, bias, residual)
        product = rows @ weight.T
        if bias is not None:
            product = product + bias
        return product if residual is None else product + residual

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        needs_rows, needs_bias, needs_residual, *needs_weights = ctx.needs_input_grad
        parts = grad.split([len(weight) for weight in weights], dim=1)
        return (
            onednn_product(grad, _join(weights)) if needs_rows else None,
            grad.sum(0) if needs_bias else None,
            grad if needs_residual else None,
            # MKL is faster here. One product per weight: slices of a joint gradient would keep all of it in memory.
            *(part.T @ rows if needed else None for part, needed in zip(parts, needs_weights, strict=True)),
        )


class PackedLinear:
    """A `JointLinear` with a packed copy of the weights, without gradients; later changes of weights have no effect."""

    def __init__(self, *layers: LinearLayer) -> None:
        """Copy the weights, for which `suits_onednn` must hold."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(
            _join([layer.weight.detach() for layer in layers]), _PACKED_ROWS
        )
        bias = _joint_bias(layers)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs of all layers, side by side in the last dimension, plus the residual."""
        return _onednn_linear(rows, self._weight, self._bias, residual)


def _onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Return rows W' + bias + residual, without a gradient; the weight may be packed."""
    product: Tensor
    if residual is None:
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        product = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add")
    return product


def _join(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights of layers as one; a single weight is not copied, as that of an output layer is large."""
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


def _joint_bias(layers: Sequence[LinearLayer]) -> Tensor | None:
    """Return the biases of all layers end to end, zeros for a layer without one; None if no layer has a bias."""
    if all(layer.bias is None for layer in layers):
        return None
    biases = (layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers)
    return torch.cat(list(biases))


def suits_onednn(tensor: Tensor) -> bool:
    """Tell whether oneDNN can multiply a tensor: float32 on the CPU, and not quantised."""
    is_plain = type(tensor.data) is Tensor  # quantised tensors have other classes
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return is_plain and on_cpu and torch.backends.mkldnn.is_available()
