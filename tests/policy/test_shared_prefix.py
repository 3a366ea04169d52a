import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.policy.attention import PackedLayout, use_packed_attention
from components.policy.packing import TokenSequence
from components.shared.errors import PipelineError
from tests import tiny
from tests.policy import plain

SCALE = 0.4
groups = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=4)), min_size=1, max_size=4
)
"""For each group the tokens of its prompt and of each completion."""


def _layout(sizes: list[tuple[int, list[int]]]) -> tuple[PackedLayout, Tensor]:
    """The layout of such groups, and which token sees which, told from the tokens themselves."""
    sequences = [
        # A token is its group, its completion (0 for the prompt) and its place there, so it says what it may see.
        TokenSequence(tuple(100 * group + place for place in range(prompt)), _completion(group, number, length))
        for group, (prompt, lengths) in enumerate(sizes)
        for number, length in enumerate(lengths, start=1)
    ]
    (batch,) = tiny.batches(sequences, 10_000)
    rows = [_read(token) for token in batch.input_ids_T.tolist()]
    allowed = [[_sees(query, key) for key in rows] for query in rows]
    return batch.layout, torch.tensor(allowed)


def _completion(group: int, number: int, length: int) -> tuple[int, ...]:
    return tuple(100 * group + 10 * number + place for place in range(length))


def _read(token: int) -> tuple[int, int, int]:
    """Group, completion and place of a token."""
    return token // 100, token % 100 // 10, token % 10


def _sees(query: tuple[int, int, int], key: tuple[int, int, int]) -> bool:
    if query[0] != key[0]:
        return False
    return key[2] <= query[2] if query[1] == key[1] else key[1] == 0


def _plain_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, allowed_TT: Tensor) -> Tensor:
    """One softmax with a mask; neighbouring heads of queries share a head of keys."""
    k_THD, v_THD = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], dim=1) for x in (k_TKD, v_TKD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_THD) * SCALE
    weights_HTS = scores_HTS.masked_fill(~allowed_TT, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_THD)


@given(groups, st.sampled_from([1, 2, 3]))
def test_completions_see_their_prompt_and_themselves(sizes: list[tuple[int, list[int]]], repeats: int) -> None:
    """Outputs and gradients are those of one masked softmax, in float64, also where heads of queries share keys."""
    layout, allowed_TT = _layout(sizes)
    generator = torch.Generator().manual_seed(1)
    shapes = [(len(allowed_TT), heads, 4) for heads in (2 * repeats, 2, 2)]
    qkv = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    q_THD, k_TKD, v_TKD = qkv
    out_THD = layout.attend(0, q_THD, k_TKD, v_TKD, SCALE)
    expected_THD = _plain_attention(q_THD, k_TKD, v_TKD, allowed_TT)
    torch.testing.assert_close(out_THD, expected_THD, rtol=1e-12, atol=1e-12)
    weights_THD = torch.randn(out_THD.shape, dtype=torch.float64, generator=generator)
    found, expected = (torch.autograd.grad(each, qkv, weights_THD) for each in (out_THD, expected_THD))
    for values, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(values, exact, rtol=1e-12, atol=1e-12)


def test_a_prompt_and_a_completion_by_hand() -> None:
    """A completion token that scores log 2 on its prompt and log 6 on itself takes a quarter of the prompt's value."""
    sequences = [TokenSequence((1,), (2,)), TokenSequence((1,), (3,))]
    (batch,) = tiny.batches(sequences, 10)
    q = torch.ones(3, 1, 1, dtype=torch.float64)
    k = torch.tensor([math.log(2), math.log(6), math.log(14)], dtype=torch.float64).view(3, 1, 1)
    v = torch.tensor([8.0, 16.0, 24.0], dtype=torch.float64).view(3, 1, 1)
    out = batch.layout.attend(0, q, k, v, 1.0)
    assert out.flatten().tolist() == pytest.approx([8, 8 * 2 / 8 + 16 * 6 / 8, 8 * 2 / 16 + 24 * 14 / 16])


def test_scores_a_thousand_apart_are_joined_without_overflow() -> None:
    """Where the prompt or the completion has all the weight, the joined softmax is exactly that part's."""
    (batch,) = tiny.batches([TokenSequence((1,), (2,)), TokenSequence((1,), (3,))], 10)
    q = torch.ones(3, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 1000.0, -1000.0], dtype=torch.float64).view(3, 1, 1)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(3, 1, 1)
    assert batch.layout.attend(0, q, k, v, 1.0).flatten().tolist() == [1.0, 2.0, 1.0]


class _Pairs(TorchDispatchMode):
    """Counts the pairs of queries and keys that reach the attention kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash" in str(func) and "backward" not in str(func):
            self.pairs += args[0].shape[0] * args[0].shape[2] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


def test_attention_over_the_prompt_is_computed_once() -> None:
    """The kernel is given the prompt's own pairs once, and each completion's with the prompt and with itself."""
    layout, allowed_TT = _layout([(6, [3, 2, 2])])
    q = torch.randn(len(allowed_TT), 1, 4, dtype=torch.float64)
    with _Pairs() as seen:
        layout.attend(0, q, q, q, SCALE)
    assert seen.pairs == 6 * 6 + 3 * 3 + 2 * 2 + 2 * 2 + (3 + 2 + 2) * 6


def test_a_model_that_attends_by_layout_runs_with_one_only() -> None:
    """Without a layout a forward is an error, never plain attention over the whole row."""
    model = use_packed_attention(plain.qwen2())
    with pytest.raises(PipelineError, match="does not pass the layout"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
