"""Products with weights are as exact as torch's own."""

import pytest
import torch

from components.policy.products import onednn_product

_ROUNDING = 3e-6
"""Of a mean of several hundred products in float32, relative to the largest."""


@pytest.mark.parametrize("num_rows", [1, 3, 32, 131])
@pytest.mark.parametrize("transposed", [False, True], ids=["weight", "transposed weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_that_of_float64_up_to_rounding(num_rows: int, transposed: bool, dtype: torch.dtype) -> None:
    """Whether the large matrix is the weight, as in a backward pass, or its transpose, as in a forward pass."""
    torch.manual_seed(0)
    weight = torch.randn(1000, 320, dtype=dtype)
    right = weight.T if transposed else weight
    left = torch.randn(num_rows, len(right), dtype=dtype)
    expected = left.double() @ right.double()
    product = onednn_product(left, right)
    assert product.dtype == dtype
    assert (product.double() - expected).abs().max() < _ROUNDING * expected.abs().max()
