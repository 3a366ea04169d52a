"""Products of few rows with a large matrix on CPUs, which is what an output layer and a decoding step are made of.

torch has MKL multiply float32 matrices. MKL rearranges the whole matrix for each product, which takes longer than the
product where the other factor has a few dozen rows. oneDNN, which torch contains too and compiles models with, needs
less of that, and none if the matrix was rearranged ("packed") once: docs/decisions/0045-products-of-few-rows.md.
"""

import torch
from torch import Tensor, nn

_PACKED_ROWS = 32
"""For how many rows weights are arranged; other numbers use the same arrangement."""


def few_rows_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product of two matrices of one type, without a gradient."""
    if not (suits_onednn(left) and suits_onednn(right)):
        return left @ right
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return product


class PackedLinear:
    """Linear layers that read the same rows, as one product with a packed copy of their weights; without a gradient."""

    def __init__(self, *layers: nn.Linear) -> None:
        """Copy the weights, which must suit oneDNN; what changes in them afterwards is not seen."""
        weights = [layer.weight.detach() for layer in layers]
        # No other copy of a single weight: that of an output layer is large.
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            zeros = (weight.new_zeros(layer.out_features) for layer in layers)
            pairs = zip(layers, zeros, strict=True)
            self._bias = torch.cat([zero if layer.bias is None else layer.bias.detach() for layer, zero in pairs])

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of all layers, side by side in the last dimension."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Return the outputs plus as large a tensor."""
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._weight, self._bias, "add")
        return total


def suits_onednn(tensor: Tensor) -> bool:
    """Tell whether products with the tensor go through oneDNN."""
    is_plain = type(tensor.data) is Tensor  # quantised ones are of classes of their own
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return is_plain and on_cpu and torch.backends.mkldnn.is_available()
