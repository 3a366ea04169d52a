"""Products with weights are as exact as torch's own."""

import pytest
import torch
from torch import Tensor, nn

from components.policy.products import JointLinear, PackedLinear, onednn_product

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


@pytest.mark.parametrize(
    ("linears", "shape"),
    [(PackedLinear, (1, 512)), (PackedLinear, (5, 512)), (PackedLinear, (2, 33, 512)), (JointLinear, (33, 512))],
)
def test_a_joint_product_is_that_of_all_its_layers(
    linears: type[PackedLinear] | type[JointLinear], shape: tuple[int, ...]
) -> None:
    """Side by side, with a bias and without, in any number of rows; and added to something else."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.Linear(512, 64, bias=False), nn.Linear(512, 40)]
    rows, residual = torch.randn(shape), torch.randn(*shape[:-1], 616)
    joint = linears(*layers)
    with torch.no_grad():
        product, total = joint(rows), joint.added_to(residual, rows)
        expected = torch.cat([layer.double()(rows.double()) for layer in layers], dim=-1)
    assert product.shape == total.shape == expected.shape
    largest = expected.abs().max()
    assert (product.double() - expected).abs().max() < _ROUNDING * 10 * largest
    assert (total.double() - residual - expected).abs().max() < _ROUNDING * 10 * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_joint_product_are_those_of_its_layers(dtype: torch.dtype) -> None:
    """Of rows, weights, biases and what is added; each in memory of its own, and none where it is not wanted."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.Linear(64, 32, bias=False), nn.Linear(64, 16)]
    layers[2].weight.requires_grad_(False)
    rows, residual, factors = torch.randn(33, 64), torch.randn(33, 144), torch.randn(33, 144)
    found: list[list[Tensor | None]] = []
    for exact in (False, True):
        copies = [nn.Linear(64, len(layer.weight), layer.bias is not None) for layer in layers]
        for copy, layer in zip(copies, layers, strict=True):
            copy.load_state_dict(layer.state_dict())
            copy.to(torch.float64 if exact else dtype)
            copy.weight.requires_grad_(layer.weight.requires_grad)
        own = [each.to(torch.float64 if exact else dtype).requires_grad_() for each in (rows.clone(), residual.clone())]
        total = JointLinear(*copies).added_to(own[1], own[0])
        if exact:
            total = torch.cat([copy(own[0]) for copy in copies], dim=1) + own[1]
        (total * factors).sum().backward()
        found.append([each.grad for each in (*own, *(one for copy in copies for one in copy.parameters()))])
    for gradient, expected in zip(*found, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            assert (gradient.double() - expected).abs().max() < _ROUNDING * 10 * expected.abs().max()
    weights = [found[0][place] for place in (2, 4)]
    assert all(each is not None and each.untyped_storage().nbytes() == each.nbytes for each in weights)


def test_a_packed_product_has_the_weights_of_its_beginning() -> None:
    """What changes in its layers afterwards is not seen."""
    layer, row = nn.Linear(512, 512, bias=False), torch.ones(1, 512)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        packed = PackedLinear(layer)
        layer.weight.fill_(2.0)
        assert packed(row)[0, 0] == 512
