"""Attention in which the completions of a group share their prompt: it is computed once, and so is its gradient.

A micro-batch is one row of tokens: the prompts of its groups, then the completions of the first group, of the second,
and so on, and last sequences that share nothing. A completion token sees its prompt and its own completion up to
itself. Both parts are softmaxes of their own, joined by their log-sum-exp into the one softmax they make up.

Models run it through transformers' attention interface, so everything else of theirs stays as it is.

Shape suffixes:
    T  tokens of the row, K  heads of keys and values, H  heads of queries, D  size of a head
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from components.policy.varlen_attention import Segments, attend, attend_backward
from components.shared.errors import PipelineError

_NAME = "grpo_layout"


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


class _SharedPrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        out_THD, lse_TH = attend(q_THD, k_THD, v_THD, layout.own, scale)
        if layout.shared.query_bounds[-1]:
            completions, prompts = layout.completions, layout.prompts
            shared = attend(q_THD[completions], k_THD[prompts], v_THD[prompts], layout.shared, scale)
            _join_softmaxes(out_THD[completions], lse_TH[completions], *shared)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_TH)
        ctx.layout, ctx.scale = layout, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD, lse_TH = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        grads = attend_backward(grad_THD, (q_THD, k_THD, v_THD), out_THD, lse_TH, layout.own, scale)
        if layout.shared.query_bounds[-1]:
            completions, prompts = layout.completions, layout.prompts
            qkv = (q_THD[completions], k_THD[prompts], v_THD[prompts])
            parts = attend_backward(
                grad_THD[completions], qkv, out_THD[completions], lse_TH[completions], layout.shared, scale
            )
            for grad, part, rows in zip(grads, parts, (completions, prompts, prompts), strict=True):
                grad[rows] += part
        return *grads, None, None


def _join_softmaxes(out_THD: Tensor, lse_TH: Tensor, other_out_THD: Tensor, other_lse_TH: Tensor) -> None:
    """Make `out` and `lse` those of the softmax over both sets of keys, in place."""
    joined_TH = torch.logaddexp(lse_TH, other_lse_TH)
    weight_TH1, other_TH1 = ((part - joined_TH).exp()[..., None] for part in (lse_TH, other_lse_TH))
    out_THD.copy_(out_THD * weight_TH1 + other_out_THD * other_TH1)
    lse_TH.copy_(joined_TH)


def attend_by_layout(model: PreTrainedModel) -> PreTrainedModel:
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
    if layout is None:
        raise PipelineError(
            f"{type(module).__name__} does not hand on the layout of the sequences, which training here needs"
        )
    special = attention_mask is not None or others.get("softcap") is not None or others.get("s_aux") is not None
    if special or (_window(module, others) or layout.longest) < layout.longest:
        raise PipelineError(
            f"{type(module).__name__} attends with a soft cap, sinks, a mask of its own or a window shorter than the "
            "sequences, which training here does not follow"
        )
    if v_1KTD.shape[-1] != q_1HTD.shape[-1]:
        raise PipelineError(
            f"{type(module).__name__} has values of another size than its keys (multi-head latent attention), "
            "which training here does not follow"
        )
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    out_THD: Tensor = layout.attend(module.layer_idx, q_THD, k_TKD, v_TKD, scale)
    return out_THD.unsqueeze(0), None


def _window(module: nn.Module, others: Mapping[str, Any]) -> int | None:
    """The tokens that a layer looks back on, None for all; layers that do not hand it on have that of their config."""
    window: int | None = others.get("sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    return window
