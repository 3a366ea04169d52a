from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.policy import attention
from components.policy.attention import PackedLayout, Segments, attend, attend_all, attend_backward
from components.policy.packing import TokenSequence
from tests import tiny

SCALE = 0.3
GROUPS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=4)), min_size=1, max_size=4
)
"""For each group the tokens of its prompt and of each completion."""
CASES = {
    "causal": Segments((0, 3, 4, 9, 14), (0, 3, 4, 9, 14), causal=True),
    "to-other-keys": Segments((0, 4, 8, 11), (0, 2, 9, 10), causal=False),
    "equal-neighbours": Segments((0, 5, 10, 15, 17), (0, 4, 8, 12, 16), causal=False),
    "longer-than-a-block": Segments((0, 5, 705), (0, 5, 705), causal=True),
    "many-keys": Segments((0, 2, 33), (0, 1, 901), causal=False),
}


def _layout(sizes: list[tuple[int, list[int]]]) -> tuple[PackedLayout, Tensor]:
    """The layout of such groups, and which token sees which; a token is 100 * group + 10 * completion + place."""

    def tokens(group: int, completion: int, length: int) -> tuple[int, ...]:
        return tuple(100 * group + 10 * completion + place for place in range(length))

    def sees(query: int, key: int) -> bool:
        if query // 100 != key // 100:
            return False
        same = query // 10 == key // 10
        return key <= query if same else key % 100 // 10 == 0

    sequences = [
        TokenSequence(tokens(group, 0, prompt), tokens(group, number, length))
        for group, (prompt, lengths) in enumerate(sizes)
        for number, length in enumerate(lengths, start=1)
    ]
    (batch,) = tiny.batches(sequences, 10_000)
    row = batch.input_ids_T.tolist()
    return batch.layout, torch.tensor([[sees(query, key) for key in row] for query in row])


def _allowed(segments: Segments) -> Tensor:
    """Which query sees which key, (T, S)."""
    allowed_TS = torch.zeros(segments.query_bounds[-1], segments.key_bounds[-1], dtype=torch.bool)
    for number, (queries, keys) in enumerate(segments.lengths):
        start, first = segments.query_bounds[number], segments.key_bounds[number]
        block = torch.ones(queries, keys, dtype=torch.bool)
        allowed_TS[start : start + queries, first : first + keys] = block.tril() if segments.causal else block
    return allowed_TS


def _masked_softmax(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, allowed_TS: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax with a mask, and its log-sum-exp; neighbouring heads of queries share a head of keys."""
    k_SHD, v_SHD = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], dim=1) for x in (k_SKD, v_SKD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * SCALE
    scores_HTS = scores_HTS.masked_fill(~allowed_TS, -torch.inf)
    return torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v_SHD), scores_HTS.logsumexp(-1).T


def _gradients(qkv: list[Tensor], grad_THD: Tensor, allowed_TS: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    return torch.autograd.grad(_masked_softmax(q, k, v, allowed_TS)[0], (q, k, v), grad_THD)


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@settings(max_examples=40)
@given(GROUPS, st.sampled_from([1, 2, 3]))
def test_completions_see_their_prompt_and_themselves(sizes: list[tuple[int, list[int]]], repeats: int) -> None:
    """Outputs and gradients are those of one masked softmax, in float64, also where heads of queries share keys."""
    layout, allowed_TT = _layout(sizes)
    length = len(allowed_TT)
    q, k, v, grad = _random((length, 2 * repeats, 4), (length, 2, 4), (length, 2, 4), (length, 2 * repeats, 4))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    out = layout.attend(0, q, k, v, SCALE)
    found = (out, *torch.autograd.grad(out, qkv, grad))
    expected = (_masked_softmax(q, k, v, allowed_TT)[0], *_gradients(qkv, grad, allowed_TT))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _plain_flash(
    q: Tensor, k: Tensor, v: Tensor, _: float, causal: bool, *, attn_mask: Tensor | None = None, scale: float
) -> tuple[Tensor, Tensor]:
    return attention._matmul_attention(q, k, v, causal, scale, attn_mask)


def _plain_flash_backward(*inputs: Any, scale: float) -> attention.QKV:
    grad, q, k, v, out, lse, _, causal = inputs
    return attention._matmul_attention_backward(grad, q, k, v, out, lse, causal, scale)


@pytest.fixture(params=["kernel", "plain"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on CPUs, and as on devices without a flash kernel."""
    if request.param == "plain":
        monkeypatch.setattr(attention, "_cpu_flash", _plain_flash)
        monkeypatch.setattr(attention, "_cpu_flash_backward", _plain_flash_backward)


_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its kernels have a path of their own")

_PRECISIONS = (
    pytest.param("cpu", torch.float64, 1e-12, id="cpu-float64"),
    pytest.param("cpu", torch.float32, 1e-5, id="cpu-float32"),
    pytest.param("cpu", torch.bfloat16, 2e-2, id="cpu-bfloat16"),
    pytest.param("cuda", torch.float32, 1e-3, id="cuda-float32", marks=_GPU),
    pytest.param("cuda", torch.bfloat16, 2e-2, id="cuda-bfloat16", marks=_GPU),
)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(("device", "dtype", "tolerance"), _PRECISIONS)
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES)
def test_attention_is_a_softmax(segments: Segments, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output, log-sum-exp and gradients are those of one masked softmax in float64, within the rounding of the type."""
    size = 64 if device == "cuda" else 8
    lengths = (segments.query_bounds[-1], segments.key_bounds[-1], segments.key_bounds[-1], segments.query_bounds[-1])
    q, k, v, grad = (x.to(dtype) for x in _random(*((length, 3, size) for length in lengths)))
    exact = [x.double() for x in (q, k, v)]
    out, lse = attend(q.to(device), k.to(device), v.to(device), segments, SCALE)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    qkv = (q.to(device), k.to(device), v.to(device))
    gradients = attend_backward(grad.to(device), qkv, out, lse, segments, SCALE)
    expected_out, expected_lse = _masked_softmax(exact[0], exact[1], exact[2], _allowed(segments))
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=tolerance, atol=tolerance)
    expected = (expected_out, *_gradients(exact, grad.double(), _allowed(segments)))
    for values, each in zip((out, *gradients), expected, strict=True):
        assert values.dtype == dtype
        assert float((values.cpu().double() - each).abs().max() / each.abs().max()) < tolerance


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("padded", [False, True])
def test_every_query_sees_all_keys_but_padding(padded: bool) -> None:
    """One softmax over the keys of a sequence, with the log of its denominator, by the kernel and by plain products."""
    generator = torch.Generator().manual_seed(1)
    q_BHTD, k_BHSD, v_BHSD = (torch.randn(2, 3, n, 4, dtype=torch.float64, generator=generator) for n in (5, 7, 7))
    mask_BHTS = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    mask_BHTS[1, :, :, 4:] = -torch.inf if padded else 0.0
    scores_BHTS = SCALE * q_BHTD @ k_BHSD.mT + mask_BHTS
    out_BHTD, lse_BHT = attend_all(q_BHTD, k_BHSD, v_BHSD, SCALE, mask_BHTS if padded else None)
    torch.testing.assert_close(out_BHTD, scores_BHTS.softmax(-1) @ v_BHSD, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse_BHT, scores_BHTS.logsumexp(-1), rtol=1e-12, atol=1e-12)
