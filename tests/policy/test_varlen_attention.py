import math

import pytest
import torch
from torch import Tensor

from components.policy import attention
from components.policy.attention import Segments, attend, attend_backward

SCALE = 0.3
CASES = {
    "causal": Segments((0, 3, 4, 9, 14), (0, 3, 4, 9, 14), causal=True),
    "to-other-keys": Segments((0, 4, 8, 11), (0, 2, 9, 10), causal=False),
    "equal-neighbours": Segments((0, 5, 10, 15, 17), (0, 4, 8, 12, 16), causal=False),
    "longer-than-a-block": Segments((0, 5, 705), (0, 5, 705), causal=True),
    "many-keys": Segments((0, 2, 33), (0, 1, 901), causal=False),
}


def _inputs(
    segments: Segments, dtype: torch.dtype = torch.float64, *, device: str = "cpu", heads: int = 3, size: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random queries, keys, values and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    lengths = (segments.query_bounds[-1], segments.key_bounds[-1], segments.key_bounds[-1], segments.query_bounds[-1])
    found = [torch.randn(length, heads, size, dtype=torch.float64, generator=generator) for length in lengths]
    q, k, v, grad = (x.to(dtype).to(device) for x in found)
    return q, k, v, grad


def _allowed(segments: Segments) -> Tensor:
    """Which query sees which key, (T, S)."""
    allowed_TS = torch.zeros(segments.query_bounds[-1], segments.key_bounds[-1], dtype=torch.bool)
    for number, (queries, keys) in enumerate(segments.lengths):
        start, first = segments.query_bounds[number], segments.key_bounds[number]
        block = torch.ones(queries, keys, dtype=torch.bool)
        allowed_TS[start : start + queries, first : first + keys] = block.tril() if segments.causal else block
    return allowed_TS


def _plain_attention(q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, allowed_TS: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over all keys at once, in float64, with its log-sum-exp."""
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * SCALE
    scores_HTS = scores_HTS.masked_fill(~allowed_TS, -torch.inf)
    return torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v_SHD), scores_HTS.logsumexp(-1).T


def _plain_gradients(
    q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, grad_THD: Tensor, allowed_TS: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q_THD, k_SHD, v_SHD)]
    out_THD, _ = _plain_attention(leaves[0], leaves[1], leaves[2], allowed_TS)
    return torch.autograd.grad(out_THD, leaves, grad_THD)


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES)
def test_attention_is_a_softmax_per_sequence(segments: Segments) -> None:
    """Output, log-sum-exp and gradients equal those of one masked softmax, in float64."""
    q, k, v, grad = _inputs(segments)
    expected_out, expected_lse = _plain_attention(q, k, v, _allowed(segments))
    out, lse = attend(q, k, v, segments, SCALE)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    found = attend_backward(grad, (q, k, v), out, lse, segments, SCALE)
    for values, expected in zip(found, _plain_gradients(q, k, v, grad, _allowed(segments)), strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_two_keys_by_hand() -> None:
    """Scores of 0 and log 3 give weights of 1/4 and 3/4, and a log-sum-exp of log 4."""
    q = torch.tensor([[[2.0]]], dtype=torch.float64)
    k = torch.tensor([[[0.0]], [[math.log(3)]]], dtype=torch.float64)
    v = torch.tensor([[[8.0]], [[4.0]]], dtype=torch.float64)
    out, lse = attend(q, k, v, Segments((0, 1), (0, 2), causal=False), 0.5)
    assert float(out) == pytest.approx(8 / 4 + 4 * 3 / 4)
    assert float(lse) == pytest.approx(math.log(4))


def test_gradients_are_those_of_a_part_of_a_larger_softmax() -> None:
    """Given output and log-sum-exp over two sets of keys, the two backward passes add up to that of all keys."""
    own = Segments((0, 3, 4, 9), (0, 3, 4, 9), causal=True)
    other = Segments((0, 4, 9), (0, 6, 7), causal=False)
    q, k, v, grad = _inputs(own)
    _, more_k, more_v, _ = _inputs(other)
    allowed = torch.cat([_allowed(own), _allowed(other)], dim=1)
    all_k, all_v = torch.cat([k, more_k]), torch.cat([v, more_v])
    out, lse = _plain_attention(q, all_k, all_v, allowed)
    first = attend_backward(grad, (q, k, v), out, lse, own, SCALE)
    second = attend_backward(grad, (q, more_k, more_v), out, lse, other, SCALE)
    found = (first[0] + second[0], torch.cat([first[1], second[1]]), torch.cat([first[2], second[2]]))
    for values, expected in zip(found, _plain_gradients(q, all_k, all_v, grad, allowed), strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_plain_matrix_products_are_the_same_attention(causal: bool, dtype: torch.dtype, tolerance: float) -> None:
    """What devices without a flash kernel compute is what the kernel does, in every type."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(2, 3, 7, 8, dtype=torch.float64, generator=generator).to(dtype) for _ in range(4))
    out, lse = attention._cpu_flash(q, k, v, 0.0, causal, scale=SCALE)
    found_out, found_lse = attention._plain(q, k, v, causal, SCALE)
    assert found_lse.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found_out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_lse, lse, rtol=tolerance, atol=tolerance)
    expected = attention._cpu_flash_backward(grad, q, k, v, out, lse, 0.0, causal, scale=SCALE)
    found = attention._plain_backward(grad, q, k, v, out, lse, causal, SCALE)
    for values, exact in zip(found, expected, strict=True):
        assert values.dtype == dtype
        torch.testing.assert_close(values, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision_is_near(dtype: torch.dtype, tolerance: float) -> None:
    """Every type's outputs and gradients are within its rounding, and the log-sum-exp is float32 at least."""
    _assert_near(CASES["causal"], dtype, tolerance, device="cpu", size=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its kernels have a path of their own")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES)
def test_gpus_compute_the_same(segments: Segments, dtype: torch.dtype, tolerance: float) -> None:
    """Flash attention of GPUs in bf16, and plain products in float32, agree with float64 on a CPU."""
    _assert_near(segments, dtype, tolerance, device="cuda", size=64)


def _assert_near(segments: Segments, dtype: torch.dtype, tolerance: float, *, device: str, size: int) -> None:
    q, k, v, grad = _inputs(segments, dtype, device=device, size=size)
    exact_q, exact_k, exact_v, exact_grad = (x.cpu().double() for x in (q, k, v, grad))
    expected_out, expected_lse = _plain_attention(exact_q, exact_k, exact_v, _allowed(segments))
    out, lse = attend(q, k, v, segments, SCALE)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=tolerance, atol=tolerance)
    expected = _plain_gradients(exact_q, exact_k, exact_v, exact_grad, _allowed(segments))
    found = attend_backward(grad, (q, k, v), out, lse, segments, SCALE)
    for values, exact in zip((out, *found), (expected_out, *expected), strict=True):
        assert values.dtype == dtype
        assert float((values.cpu().double() - exact).abs().max() / exact.abs().max()) < tolerance


def test_neighbours_of_equal_lengths_run_together() -> None:
    """Five sequences of which the second and third are alike make four runs."""
    segments = Segments((0, 2, 5, 8, 10, 11), (0, 2, 5, 8, 10, 11), causal=True)
    runs = [(count, (queries.start, queries.stop)) for count, queries, _ in segments.runs()]
    assert runs == [(1, (0, 2)), (2, (2, 8)), (1, (8, 10)), (1, (10, 11))]
    assert segments.lengths == [(2, 2), (3, 3), (3, 3), (2, 2), (1, 1)]
