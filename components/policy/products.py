"""Products of few rows with a large matrix on CPUs, which is what an output layer and a decoding step are made of.

torch has MKL multiply float32 matrices. MKL rearranges the whole matrix for each product, which takes longer than the
product where the other factor has a few dozen rows. oneDNN, which torch contains too and compiles models with, needs
less of that, and none if the matrix was rearranged ("packed") once: docs/decisions/0045-products-of-few-rows.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

_MIN_PACKED_ELEMENTS = 131_072
"""Of a weight that is packed: products with smaller ones take as long with MKL, and less with a single row."""
_PACKED_ROWS = 32
"""For how many rows weights are arranged; other numbers use the same arrangement."""


def few_rows_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product of two matrices of one type, without a gradient."""
    if not (_suits_onednn(left) and _suits_onednn(right)):
        return left @ right
    return _onednn_linear(left, right.T)


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Pack the large weights of all linear layers for the time of the block; they must not change, nor have gradients.

    A second copy of these weights exists meanwhile. Layers that compute in another way, such as quantised ones, stay.
    """
    layers = [each for each in model.modules() if type(each) is nn.Linear and _is_worth_packing(each.weight)]
    forwards = [each.__dict__.get("forward") for each in layers]
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _PACKED_ROWS)
            layer.__dict__["forward"] = partial(_onednn_linear, weight=packed, bias=layer.bias)
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


def _is_worth_packing(weight: Tensor) -> bool:
    return _suits_onednn(weight) and weight.numel() >= _MIN_PACKED_ELEMENTS


def _suits_onednn(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product
