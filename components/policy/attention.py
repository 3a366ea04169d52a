"""Attention over packed sequences in which the completions of a group share their prompt, which is computed once.

A micro-batch is one row of tokens: the prompts of its groups, their completions, group after group, and last sequences
that share nothing. A completion token sees its prompt and its own completion up to itself: two softmaxes, joined by
their log-sum-exp into one. Models run it through transformers' attention interface.

`attend` and `attend_backward` are one interface over PyTorch's flash attention for CPUs (any float type) and for GPUs
(bfloat16 and float16). What neither takes goes through plain matrix products.

Shape suffixes:
    T  tokens of the row, or queries; S  keys; all sequences end to end
    B  sequences of equal length in a row
    K  heads of keys and values, H  heads of queries, D  size of a head
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from components.shared.errors import PipelineError

_NAME = "grpo_layout"
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_flash = torch.ops.aten._flash_attention_forward
_cuda_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Segments:
    """Which queries see which keys: sequence n of the queries sees sequence n of the keys, and no other."""

    query_bounds: tuple[int, ...]
    """Where each sequence of queries begins, and at last where all end."""
    key_bounds: tuple[int, ...]
    causal: bool
    """Whether a query sees only the keys up to its own place; both sequences are then of one length."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The numbers of queries and keys of each sequence."""
        queries, keys = ([stop - start for start, stop in pairwise(x)] for x in (self.query_bounds, self.key_bounds))
        return list(zip(queries, keys, strict=True))

    def runs(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield neighbours of equal lengths together: how many they are, their queries and their keys."""
        start = 0
        for _, neighbours in groupby(self.lengths):
            stop = start + len(list(neighbours))
            queries, keys = (slice(bounds[start], bounds[stop]) for bounds in (self.query_bounds, self.key_bounds))
            yield stop - start, queries, keys
            start = stop


@dataclass(frozen=True)
class PackedLayout:
    """Where prompts and completions lie in the row."""

    own: Segments
    """Every token with the tokens before it in its prompt, completion or unshared sequence."""
    shared: Segments
    """The completions of each group with the group's prompt; queries count from the first completion."""
    longest: int
    """Tokens of the longest prompt with its completion."""

    @property
    def completions(self) -> slice:
        """The tokens of all completions that share a prompt."""
        first = self.shared.key_bounds[-1]
        return slice(first, first + self.shared.query_bounds[-1])

    @property
    def prompts(self) -> slice:
        """The tokens of all prompts that are shared."""
        return slice(0, self.shared.key_bounds[-1])

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        """Return what each token attends to, (T, H, D)."""
        del layer
        repeats = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k_TKD, v_TKD))
        out_THD: Tensor = _SharedPrefixAttention.apply(q_THD, k_THD, v_THD, self, scale)  # type: ignore[no-untyped-call]
        return out_THD


def use_packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model take a `layout` that says what each token attends to; it then refuses to run without one.

    A layout has the method `attend(layer, q, k, v, scale)` for one row of tokens.
    """
    AttentionInterface.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)
    return model


def _attention(
    module: nn.Module,
    q_1HTD: Tensor,
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if layout is None:
        raise PipelineError(f"{name} does not forward the layout of packed sequences to attention")
    # Layers that do not pass their window on have that of their config; None for all tokens.
    window = others.get("sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    special = attention_mask is not None or others.get("softcap") is not None or others.get("s_aux") is not None
    if special or (window or layout.longest) < layout.longest or v_1KTD.shape[-1] != q_1HTD.shape[-1]:
        raise PipelineError(
            f"{name} attends with a soft cap, sinks, a mask of its own, a window shorter than the sequences, or values "
            "of another size than its keys (multi-head latent attention)"
        )
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    out_THD: Tensor = layout.attend(module.layer_idx, q_THD, k_TKD, v_TKD, scale)
    return out_THD.unsqueeze(0), None


class _SharedPrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        out_THD, lse_TH = attend(q_THD, k_THD, v_THD, layout.own, scale)
        completions, prompts = layout.completions, layout.prompts
        if layout.shared.query_bounds[-1]:
            shared = attend(q_THD[completions], k_THD[prompts], v_THD[prompts], layout.shared, scale)
            join_softmaxes(out_THD[completions], lse_TH[completions], *shared)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_TH)
        ctx.layout, ctx.scale = layout, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD, lse_TH = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        grads = attend_backward(grad_THD, (q_THD, k_THD, v_THD), out_THD, lse_TH, layout.own, scale)
        completions, prompts = layout.completions, layout.prompts
        if layout.shared.query_bounds[-1]:
            grad, out, lse = (x[completions] for x in (grad_THD, out_THD, lse_TH))
            qkv = (q_THD[completions], k_THD[prompts], v_THD[prompts])
            parts = attend_backward(grad, qkv, out, lse, layout.shared, scale)
            for total, part, rows in zip(grads, parts, (completions, prompts, prompts), strict=True):
                total[rows] += part
        return *grads, None, None


def join_softmaxes(out_THD: Tensor, lse_TH: Tensor, other_out_THD: Tensor, other_lse_TH: Tensor) -> None:
    """Make `out` and `lse` those of the softmax over both sets of keys, in place."""
    share_TH1 = torch.sigmoid(other_lse_TH - lse_TH)[..., None]
    if out_THD.dtype == share_TH1.dtype:
        out_THD.lerp_(other_out_THD, share_TH1)
    else:  # rounded to half precision once
        out_THD.copy_(torch.lerp(out_THD.to(share_TH1), other_out_THD.to(share_TH1), share_TH1))
    lse_TH.copy_(torch.logaddexp(lse_TH, other_lse_TH))


def attend(q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k') v per sequence, (T, H, D), and the log of the softmax's denominator, (T, H)."""
    if _fits_cuda_flash(q_THD):
        arguments = _cuda_bounds(segments, q_THD.device)
        out_THD, lse_HT, *_ = _cuda_flash(q_THD, k_SHD, v_SHD, *arguments, 0.0, segments.causal, False, scale=scale)
        return out_THD, lse_HT.T
    out_THD = torch.empty_like(q_THD)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
    for count, queries, keys in segments.runs():
        q_BHTD, k_BHSD, v_BHSD = (_split(x, count) for x in (q_THD[queries], k_SHD[keys], v_SHD[keys]))
        if q_THD.is_cuda:
            out_BHTD, lse_BHT = _plain(q_BHTD, k_BHSD, v_BHSD, segments.causal, scale)
        else:
            out_BHTD, lse_BHT = _cpu_flash(q_BHTD, k_BHSD, v_BHSD, 0.0, segments.causal, scale=scale)
        out_THD[queries] = _join(out_BHTD)
        lse_TH[queries] = lse_BHT.transpose(1, 2).flatten(0, 1)
    return out_THD, lse_TH


def attend_backward(
    grad_THD: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_THD: Tensor,
    lse_TH: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from these keys, given output and log-sum-exp of the softmax over all keys.

    These keys may be only a part of all: the gradients are then those of that part.
    """
    q_THD, k_SHD, v_SHD = qkv
    if _fits_cuda_flash(q_THD):
        arguments = _cuda_bounds(segments, q_THD.device)
        rng, unused = (torch.empty(size, dtype=torch.uint64, device=q_THD.device) for size in (2, 0))
        gradients: tuple[Tensor, Tensor, Tensor] = _cuda_flash_backward(
            grad_THD.contiguous(), *qkv, out_THD, lse_TH.T.contiguous(),
            *arguments, 0.0, segments.causal, rng, unused, scale=scale,
        )  # fmt: skip
        return gradients
    if not q_THD.is_cuda and q_THD.dtype != lse_TH.dtype:
        # torch's backward pass on CPUs takes four to nine times as long in half precision.
        exact = [each.to(lse_TH.dtype) for each in (grad_THD, *qkv, out_THD)]
        parts = attend_backward(exact[0], (exact[1], exact[2], exact[3]), exact[4], lse_TH, segments, scale)
        return parts[0].to(q_THD.dtype), parts[1].to(q_THD.dtype), parts[2].to(q_THD.dtype)
    grads = (torch.empty_like(q_THD), torch.empty_like(k_SHD), torch.empty_like(v_SHD))
    for count, queries, keys in segments.runs():
        rows = (grad_THD[queries], q_THD[queries], k_SHD[keys], v_SHD[keys], out_THD[queries])
        grad, q, k, v, out = (_split(x, count) for x in rows)
        lse_BHT = lse_TH[queries].unflatten(0, (count, -1)).transpose(1, 2)
        if q_THD.is_cuda:
            parts = _plain_backward(grad, q, k, v, out, lse_BHT, segments.causal, scale)
        else:
            parts = _cpu_flash_backward(grad, q, k, v, out, lse_BHT.contiguous(), 0.0, segments.causal, scale=scale)
        for total, part, places in zip(grads, parts, (queries, keys, keys), strict=True):
            total[places] = _join(part)
    return grads


def attend_all(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scale: float, mask_BHTS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k' + mask) v, and the log of the softmax's denominator, (B, H, T)."""
    if q_BHTD.is_cuda:
        return _plain(q_BHTD, k_BHSD, v_BHSD, False, scale, mask_BHTS)
    attended: tuple[Tensor, Tensor] = _cpu_flash(q_BHTD, k_BHSD, v_BHSD, 0.0, False, attn_mask=mask_BHTS, scale=scale)
    return attended


def _split(x_THD: Tensor, count: int) -> Tensor:
    """(count * T, H, D) -> (count, H, T, D), as a view."""
    x_BHTD: Tensor = x_THD.unflatten(0, (count, -1)).transpose(1, 2)
    return x_BHTD


def _join(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _scores(q_BHTD: Tensor, k_BHSD: Tensor, causal: bool, scale: float) -> Tensor:
    scores_BHTS = (q_BHTD @ k_BHSD.mT) * scale
    if causal:
        future_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q_BHTD.device).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(future_TS, -torch.inf)
    return scores_BHTS.to(torch.promote_types(q_BHTD.dtype, torch.float32))


def _plain(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool, scale: float, mask_BHTS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores_BHTS = _scores(q_BHTD, k_BHSD, causal, scale)
    if mask_BHTS is not None:
        scores_BHTS = scores_BHTS + mask_BHTS
    lse_BHT = scores_BHTS.logsumexp(-1)
    return torch.exp(scores_BHTS - lse_BHT[..., None]).to(v_BHSD.dtype) @ v_BHSD, lse_BHT


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights_BHTS = torch.exp(_scores(q, k, causal, scale) - lse[..., None]).to(q.dtype)
    grad_weights_BHTS = grad @ v.mT
    grad_scores_BHTS = weights_BHTS * (grad_weights_BHTS - (grad * out).sum(-1, keepdim=True)) * scale
    return grad_scores_BHTS @ k, grad_scores_BHTS.mT @ q, weights_BHTS.mT @ grad


def _fits_cuda_flash(q_THD: Tensor) -> bool:
    """Tell whether the GPU kernel takes this: half precision, heads of up to 256 by eights, Ampere or later."""
    size = q_THD.shape[-1]
    fits = q_THD.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0
    return q_THD.is_cuda and fits and torch.cuda.get_device_capability(q_THD.device) >= (8, 0)


@lru_cache(maxsize=16)
def _cuda_bounds(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    bounds = (segments.query_bounds, segments.key_bounds)
    cumulative = [torch.tensor(each, dtype=torch.int32, device=device) for each in bounds]
    longest = [max(lengths) for lengths in zip(*segments.lengths, strict=True)]
    return cumulative[0], cumulative[1], longest[0], longest[1]
