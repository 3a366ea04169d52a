"""Products with the weights of linear layers on CPUs.

torch has MKL multiply float32 matrices. MKL rearranges the whole weight for each product, which takes longer than the
product where the other factor has a few dozen rows. oneDNN, which torch contains too and compiles models with, needs
less of that, and none if the weight was rearranged ("packed") once: docs/decisions/0045-products-of-few-rows.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PACKED_ROWS = 32
"""For how many rows weights are arranged; other numbers use the same arrangement."""


def onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product of two matrices of one type, without a gradient."""
    if not (suits_onednn(left) and suits_onednn(right)):
        return left @ right
    return _onednn_linear(left, right.T, None)


LinearLayer = Any
"""A linear layer, of which `out_features`, `weight` and `bias` are read."""


class JointLinear:
    """Linear layers that read the same rows, (T, M), as one product with their weights; gradients go to each."""

    def __init__(self, *layers: LinearLayer) -> None:
        self._layers = layers

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs of all layers, side by side in the last dimension, plus as large a tensor."""
        weights = [layer.weight for layer in self._layers]
        product: Tensor = _Linear.apply(rows, _joint_bias(self._layers), residual, *weights)  # type: ignore[no-untyped-call]
        return product


class _Linear(torch.autograd.Function):
    """rows W' + bias + residual, where W are all weights, joined for each pass: the joint copy is not kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor | None, residual: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        weight = _joined(weights)
        if suits_onednn(rows):
            return _onednn_linear(rows, weight, bias, residual)
        product = rows @ weight.T
        for term in (bias, residual):
            product = product if term is None else product + term
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        rows_wanted, bias_wanted, residual_wanted, *weights_wanted = ctx.needs_input_grad
        parts = grad.split([len(weight) for weight in weights], dim=1)
        return (
            onednn_product(grad, _joined(weights)) if rows_wanted else None,
            grad.sum(0) if bias_wanted else None,
            grad if residual_wanted else None,
            # The one product that MKL is better at; of each weight, as a part of a joint gradient would keep all of it.
            *(part.T @ rows if wanted else None for part, wanted in zip(parts, weights_wanted, strict=True)),
        )


class PackedLinear:
    """A `JointLinear` with a packed copy of the weights, for any rows, without gradients.

    What changes in the weights later is not seen.
    """

    def __init__(self, *layers: LinearLayer) -> None:
        """Copy the weights, which must suit oneDNN."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(
            _joined([layer.weight.detach() for layer in layers]), _PACKED_ROWS
        )
        bias = _joint_bias(layers)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs of all layers, side by side in the last dimension, plus as large a tensor."""
        return _onednn_linear(rows, self._weight, self._bias, residual)


def _onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    product: Tensor
    if residual is None:
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        product = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add")
    return product


def _joined(weights: Sequence[Tensor]) -> Tensor:
    # No other copy of a single weight: that of an output layer is large.
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


def _joint_bias(layers: Sequence[LinearLayer]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = (layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers)
    return torch.cat(list(biases))


def suits_onednn(tensor: Tensor) -> bool:
    """Tell whether products with the tensor go through oneDNN."""
    is_plain = type(tensor.data) is Tensor  # quantised ones are of classes of their own
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return is_plain and on_cpu and torch.backends.mkldnn.is_available()
