"""Attention over packed sequences in which the completions of a group share their prompt, which is computed once.

A micro-batch is one row of tokens: first the prompts of all groups, then their completions group by group, and last the
sequences that share no prompt. A completion token attends to its prompt and to its own completion up to itself: two
softmaxes, which are joined by their log-sum-exp into one. Models call it through transformers' attention interface.

`attend` and `attend_backward` choose PyTorch's flash attention for CPUs (any float type) or for GPUs (bfloat16 and
float16); tensors that the GPU kernel does not support are multiplied as plain matrices.

Shape suffixes:
    T  tokens of the row, or queries; S  keys; all sequences end to end
    B  consecutive sequences of equal length
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

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""
_NAME = "grpo_layout"
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_flash = torch.ops.aten._flash_attention_forward
_cuda_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Segments:
    """Which queries attend to which keys: the queries of segment n attend to the keys of segment n only."""

    query_bounds: tuple[int, ...]
    """The start of each segment of queries, followed by the end of the last one."""
    key_bounds: tuple[int, ...]
    causal: bool
    """Whether a query attends only to keys up to its own position; each segment then has as many keys as queries."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The numbers of queries and of keys of each segment."""
        num_queries = [stop - start for start, stop in pairwise(self.query_bounds)]
        num_keys = [stop - start for start, stop in pairwise(self.key_bounds)]
        return list(zip(num_queries, num_keys, strict=True))

    def equal_length_batches(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each run of segments with equal lengths as one batch: their number, their queries and their keys."""
        start = 0
        for _, batch in groupby(self.lengths):
            stop = start + len(list(batch))
            queries = slice(self.query_bounds[start], self.query_bounds[stop])
            keys = slice(self.key_bounds[start], self.key_bounds[stop])
            yield stop - start, queries, keys
            start = stop


@dataclass(frozen=True)
class PackedLayout:
    """Where prompts and completions are in the row."""

    self_attention: Segments
    """Attention within each prompt, each completion and each sequence that shares no prompt."""
    prompt_attention: Segments
    """Attention of the completions of each group to the group's prompt; query 0 is the first completion token."""
    max_length: int
    """Tokens of the longest prompt with its completion."""

    @property
    def completions(self) -> slice:
        """The tokens of all completions that share a prompt."""
        first = self.prompt_attention.key_bounds[-1]
        return slice(first, first + self.prompt_attention.query_bounds[-1])

    @property
    def prompts(self) -> slice:
        """The tokens of all prompts that are shared."""
        return slice(0, self.prompt_attention.key_bounds[-1])

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        """Return the attention output of each token, (T, H, D)."""
        del layer  # other layouts, such as caches, keep keys and values by layer
        repeats = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k_TKD, v_TKD))
        out_THD: Tensor = _SharedPrefixAttention.apply(q_THD, k_THD, v_THD, self, scale)  # type: ignore[no-untyped-call]
        return out_THD


def use_packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model compute its attention by the `attend` method of the keyword argument `layout`, now required."""
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
    """Compute attention by the layout; transformers' attention interface calls this in every layer."""
    name = type(module).__name__
    if layout is None:
        raise PipelineError(f"{name} does not forward the layout of packed sequences to attention")
    # A layer without this argument has the window of its config; None means no window.
    window = others.get("sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    is_windowed = window and window < layout.max_length
    has_mask_cap_or_sinks = any(x is not None for x in (attention_mask, others.get("softcap"), others.get("s_aux")))
    if is_windowed or has_mask_cap_or_sinks or v_1KTD.shape[-1] != q_1HTD.shape[-1]:
        raise PipelineError(
            f"{name} attends with a soft cap, sinks, a mask of its own, a window shorter than the sequences, or values "
            "of another size than its keys (multi-head latent attention)"
        )
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    out_THD: Tensor = layout.attend(module.layer_idx, q_THD, k_TKD, v_TKD, scale)
    return out_THD.unsqueeze(0), None


class _SharedPrefixAttention(torch.autograd.Function):
    """Self-attention of every token, joined for completion tokens with attention to the prompt that they share."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        out_THD, lse_TH = attend(q_THD, k_THD, v_THD, layout.self_attention, scale)
        completions, prompts = layout.completions, layout.prompts
        if layout.prompt_attention.query_bounds[-1]:  # any completion shares its prompt
            from_prompt = attend(q_THD[completions], k_THD[prompts], v_THD[prompts], layout.prompt_attention, scale)
            join_softmaxes(out_THD[completions], lse_TH[completions], *from_prompt)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_TH)
        ctx.layout, ctx.scale = layout, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD, lse_TH = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        grad_q, grad_k, grad_v = attend_backward(
            grad_THD, (q_THD, k_THD, v_THD), out_THD, lse_TH, layout.self_attention, scale
        )
        completions, prompts = layout.completions, layout.prompts
        if layout.prompt_attention.query_bounds[-1]:  # any completion shares its prompt
            grad, out, lse = (x[completions] for x in (grad_THD, out_THD, lse_TH))
            qkv = (q_THD[completions], k_THD[prompts], v_THD[prompts])
            from_prompt = attend_backward(grad, qkv, out, lse, layout.prompt_attention, scale)
            grad_q[completions] += from_prompt[0]
            grad_k[prompts] += from_prompt[1]
            grad_v[prompts] += from_prompt[2]
        return grad_q, grad_k, grad_v, None, None


def join_softmaxes(out_THD: Tensor, lse_TH: Tensor, other_out_THD: Tensor, other_lse_TH: Tensor) -> None:
    """Change attention over some keys (`out` and `lse`) in place to attention over these and the other keys."""
    weight_TH1 = torch.sigmoid(other_lse_TH - lse_TH)[..., None]  # exp(other_lse) / (exp(lse) + exp(other_lse))
    if out_THD.dtype == weight_TH1.dtype:
        out_THD.lerp_(other_out_THD, weight_TH1)
    else:  # compute in float32 and round to half precision once
        out_THD.copy_(torch.lerp(out_THD.to(weight_TH1), other_out_THD.to(weight_TH1), weight_TH1))
    lse_TH.copy_(torch.logaddexp(lse_TH, other_lse_TH))


def attend(q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k') v of each segment, (T, H, D), and the log of the softmax's denominator, (T, H)."""
    if _fits_cuda_flash(q_THD):
        arguments = _cuda_bounds(segments, q_THD.device)
        out_THD, lse_HT, *_ = _cuda_flash(q_THD, k_SHD, v_SHD, *arguments, 0.0, segments.causal, False, scale=scale)
        return out_THD, lse_HT.T
    out_THD = torch.empty_like(q_THD)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
    for count, queries, keys in segments.equal_length_batches():
        q_BHTD, k_BHSD, v_BHSD = (_split(x, count) for x in (q_THD[queries], k_SHD[keys], v_SHD[keys]))
        if q_THD.is_cuda:
            out_BHTD, lse_BHT = _matmul_attention(q_BHTD, k_BHSD, v_BHSD, segments.causal, scale)
        else:
            out_BHTD, lse_BHT = _cpu_flash(q_BHTD, k_BHSD, v_BHSD, 0.0, segments.causal, scale=scale)
        out_THD[queries] = _join(out_BHTD)
        lse_TH[queries] = lse_BHT.transpose(1, 2).flatten(0, 1)
    return out_THD, lse_TH


def attend_backward(
    grad_THD: Tensor, qkv: QKV, out_THD: Tensor, lse_TH: Tensor, segments: Segments, scale: float
) -> QKV:
    """Return the gradients of q, k and v, given `out` and `lse` of a softmax over these keys, and perhaps over others.

    If there are others, the gradient of q is the part that comes through these keys; the parts add up to the whole.
    """
    q_THD, k_SHD, v_SHD = qkv
    if _fits_cuda_flash(q_THD):
        arguments = _cuda_bounds(segments, q_THD.device)
        # Dropout, which is 0.0, would read this state.
        rng, unused = (torch.empty(size, dtype=torch.uint64, device=q_THD.device) for size in (2, 0))
        gradients: QKV = _cuda_flash_backward(
            grad_THD.contiguous(), *qkv, out_THD, lse_TH.T.contiguous(),
            *arguments, 0.0, segments.causal, rng, unused, scale=scale,
        )  # fmt: skip
        return gradients
    if not q_THD.is_cuda and q_THD.dtype != lse_TH.dtype:
        # torch's backward pass on CPUs takes four to nine times as long in half precision.
        grad, q, k, v, out = (each.to(lse_TH.dtype) for each in (grad_THD, *qkv, out_THD))
        grad_q, grad_k, grad_v = attend_backward(grad, (q, k, v), out, lse_TH, segments, scale)
        return grad_q.to(q_THD.dtype), grad_k.to(q_THD.dtype), grad_v.to(q_THD.dtype)
    grad_q_THD, grad_k_SHD, grad_v_SHD = (torch.empty_like(each) for each in qkv)
    for count, queries, keys in segments.equal_length_batches():
        rows = (grad_THD[queries], q_THD[queries], k_SHD[keys], v_SHD[keys], out_THD[queries])
        grad, q, k, v, out = (_split(x, count) for x in rows)
        lse_BHT = lse_TH[queries].unflatten(0, (count, -1)).transpose(1, 2)
        if q_THD.is_cuda:
            grads = _matmul_attention_backward(grad, q, k, v, out, lse_BHT, segments.causal, scale)
        else:
            grads = _cpu_flash_backward(grad, q, k, v, out, lse_BHT.contiguous(), 0.0, segments.causal, scale=scale)
        grad_q_THD[queries], grad_k_SHD[keys], grad_v_SHD[keys] = (_join(each) for each in grads)
    return grad_q_THD, grad_k_SHD, grad_v_SHD


def attend_all(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scale: float, mask_BHTS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k' + mask) v, (B, H, T, D), and the log of the softmax's denominator, (B, H, T)."""
    if q_BHTD.is_cuda:
        return _matmul_attention(q_BHTD, k_BHSD, v_BHSD, False, scale, mask_BHTS)
    attended: tuple[Tensor, Tensor] = _cpu_flash(q_BHTD, k_BHSD, v_BHSD, 0.0, False, attn_mask=mask_BHTS, scale=scale)
    return attended


def _split(x_THD: Tensor, count: int) -> Tensor:
    """Return `count` sequences of equal length as a batch: (count * T, H, D) -> (count, H, T, D), as a view."""
    x_BHTD: Tensor = x_THD.unflatten(0, (count, -1)).transpose(1, 2)
    return x_BHTD


def _join(x_BHTD: Tensor) -> Tensor:
    """Return the sequences of a batch end to end, (count * T, H, D): the inverse of `_split`."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _scores(q_BHTD: Tensor, k_BHSD: Tensor, causal: bool, scale: float) -> Tensor:
    """Return scale * q k', (B, H, T, S), in float32 at least; -inf for keys after the query if `causal`."""
    scores_BHTS = (q_BHTD @ k_BHSD.mT) * scale
    if causal:
        future_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q_BHTD.device).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(future_TS, -torch.inf)
    return scores_BHTS.to(torch.promote_types(q_BHTD.dtype, torch.float32))


def _matmul_attention(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool, scale: float, mask_BHTS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp as `attend_all` does, by matrix products."""
    scores_BHTS = _scores(q_BHTD, k_BHSD, causal, scale)
    if mask_BHTS is not None:
        scores_BHTS = scores_BHTS + mask_BHTS
    lse_BHT = scores_BHTS.logsumexp(-1)
    return torch.exp(scores_BHTS - lse_BHT[..., None]).to(v_BHSD.dtype) @ v_BHSD, lse_BHT


def _matmul_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> QKV:
    """Return the gradients of q, k and v: dL/dscore = weight * (dL/dweight - sum over D of grad * out)."""
    weights_BHTS = torch.exp(_scores(q, k, causal, scale) - lse[..., None]).to(q.dtype)
    grad_weights_BHTS = grad @ v.mT
    grad_scores_BHTS = weights_BHTS * (grad_weights_BHTS - (grad * out).sum(-1, keepdim=True)) * scale
    return grad_scores_BHTS @ k, grad_scores_BHTS.mT @ q, weights_BHTS.mT @ grad


def _fits_cuda_flash(q_THD: Tensor) -> bool:
    """Tell whether the flash attention of GPUs supports this type, head size and device (Ampere or later)."""
    head_size = q_THD.shape[-1]
    is_supported = q_THD.dtype in (torch.bfloat16, torch.float16) and head_size <= 256 and head_size % 8 == 0
    return q_THD.is_cuda and is_supported and torch.cuda.get_device_capability(q_THD.device) >= (8, 0)


@lru_cache(maxsize=16)  # all layers of a pass have the same bounds, and each copy to the GPU takes time
def _cuda_bounds(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return the bounds of queries and keys on the device, and the most queries and keys of a segment."""
    query_bounds = torch.tensor(segments.query_bounds, dtype=torch.int32, device=device)
    key_bounds = torch.tensor(segments.key_bounds, dtype=torch.int32, device=device)
    num_queries, num_keys = zip(*segments.lengths, strict=True)
    return query_bounds, key_bounds, max(num_queries), max(num_keys)
