"""Products of few rows with a large matrix are as exact as torch's own, and layers are left as they were."""

import pytest
import torch
from torch import nn

from components.policy.logprobs import use_float32_logits
from components.policy.products import few_rows_product, packed_weights

_ROUNDING = 1e-6
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
    product = few_rows_product(left, right)
    assert product.dtype == dtype
    assert (product.double() - expected).abs().max() < _ROUNDING * expected.abs().max()


@pytest.mark.parametrize("shape", [(1, 512), (5, 512), (2, 33, 512)], ids=["a row", "five rows", "two dimensions"])
def test_layers_with_packed_weights_compute_the_same(shape: tuple[int, ...]) -> None:
    """With a bias and without, of large weights and of small ones, and in any number of rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 64, bias=False), nn.Linear(64, 4096, bias=False))
    rows = torch.randn(shape)
    with torch.no_grad():
        expected = model.double()(rows.double())
        model.float()
        with packed_weights(model):
            computed = model(rows)
    assert computed.shape == expected.shape
    assert (computed.double() - expected).abs().max() < _ROUNDING * 10 * expected.abs().max()


def test_packed_weights_are_those_of_the_beginning_of_the_block() -> None:
    """A weight that changes in the block is packed anew by the next one only."""
    layer, row = nn.Linear(512, 512, bias=False), torch.ones(1, 512)
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        with packed_weights(model):
            layer.weight.fill_(2.0)
            first = model(row)
        after = model(row)
        with packed_weights(model):
            second = model(row)
    assert (first[0, 0], after[0, 0], second[0, 0]) == (512, 1024, 1024)


def test_an_output_layer_with_float32_logits_keeps_them() -> None:
    """Its own forward comes back, also after an error."""
    layer = nn.Linear(512, 512, bias=False)
    use_float32_logits(layer)
    own = layer.forward
    with pytest.raises(RuntimeError, match=r"shape|primitive"), packed_weights(nn.Sequential(layer)):
        layer(torch.ones(1, 511))
    assert layer.forward == own


def test_weights_in_other_types_are_not_packed() -> None:
    """What oneDNN is not used for computes as ever."""
    layer = nn.Linear(512, 512).double()
    with packed_weights(nn.Sequential(layer)):
        assert "forward" not in vars(layer)


def test_a_layer_that_computes_in_another_way_is_left_alone() -> None:
    """As those of quantised models do, which are linear layers to torch."""

    class Doubled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    layer, rows = Doubled(512, 512), torch.ones(1, 512)
    with torch.no_grad():
        expected = layer(rows)
        with packed_weights(nn.Sequential(layer)):
            assert torch.equal(layer(rows), expected)
