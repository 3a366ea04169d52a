"""Padded rows: any causal language model as its own code computes it, with one sequence per row and its own logits.

For models that cannot compute several sequences in one row (attention.py): they attend by their own rules, mix tokens
by a convolution or a recurrence, or cap and rescale their logits. Prompts are computed once per completion, and padding
is computed too. Padding is at the end of rows, where no earlier token attends to it, so no mask is needed.

Shape suffixes as in packing.py, and
    R  rows, S  tokens of a row, K  positions of a row whose logits are computed, V  vocabulary
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.packing import MicroBatch

_REASON_ATTRIBUTE = "padded_because"


def padded_because(model: PreTrainedModel) -> str:
    """Return why a model needs padded rows; empty if it can use packed rows."""
    return getattr(model, _REASON_ATTRIBUTE, "")


def use_padded_rows(model: PreTrainedModel, reason: str) -> PreTrainedModel:
    """Mark a model as one that needs padded rows, and make its output layer compute in float32 at least."""
    setattr(model, _REASON_ATTRIBUTE, reason)
    layer = model.get_output_embeddings()
    if isinstance(layer, nn.Linear) and layer.weight.dtype in (torch.bfloat16, torch.float16):

        def float32_forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
            bias = None if layer.bias is None else layer.bias.float()
            return nn.functional.linear(hidden.float(), layer.weight.float(), bias)

        setattr(layer, "forward", MethodType(float32_forward, layer))  # noqa: B010  # a method, to mypy
    return model


def token_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the logits that predict the completion tokens, (N, V), in float32 at least."""
    ids_RS = batch.input_ids_T.view(-1, batch.width)
    row_N, place_N = batch.source_N // batch.width, batch.source_N % batch.width
    options: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # The model then returns logits of every row at these positions alone, in ascending order.
        options["logits_to_keep"], place_N = torch.unique(place_N, return_inverse=True)
    logits_RKV = model(input_ids=ids_RS, use_cache=False, **options).logits
    logits_NV: Tensor = logits_RKV[row_N, place_N]
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def token_scores(logits_NV: Tensor, target_N: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Return log pi(target) and the entropy of pi = softmax(logits) in nats, each (N,), as `TokenHead` does."""
    logprobs_NV = logits_NV.log_softmax(-1)
    logprobs_N = logprobs_NV.gather(1, target_N[:, None]).squeeze(1)
    if not with_entropy:
        return logprobs_N, torch.full_like(logprobs_N, torch.nan)
    logprobs_NV = logprobs_NV.detach()
    return logprobs_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1)
