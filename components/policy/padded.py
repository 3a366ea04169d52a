"""Any causal language model, as its own code computes it: a row per sequence, padded, with the model's own logits.

For models that cannot take several sequences in one row (attention.py): they attend by rules of their own, connect
tokens by a convolution or a recurrence, or cap and rescale their logits. Prompts are computed once per completion, and
padding is computed, too. Rows are padded at their ends, which no token before them sees, so no mask is needed.

Shape suffixes as in packing.py, and
    R  rows, S  tokens of a row, K  places of a row whose logits are computed, V  vocabulary
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.packing import MicroBatch

_MARK = "padded_because"


def padded_because(model: PreTrainedModel) -> str:
    """Return why a model is given padded rows; empty for one that takes packed ones."""
    return getattr(model, _MARK, "")


def use_padded_rows(model: PreTrainedModel, reason: str) -> PreTrainedModel:
    """Have a model be given padded rows from now on; its output layer computes in float32 at least."""
    setattr(model, _MARK, reason)
    layer = model.get_output_embeddings()
    if isinstance(layer, nn.Linear) and layer.weight.dtype in (torch.bfloat16, torch.float16):
        setattr(layer, "forward", MethodType(_in_float32, layer))  # noqa: B010  # a method, to mypy
    return model


def token_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the logits that predict the completion tokens, (N, V), in float32 at least."""
    ids_RS = batch.input_ids_T.view(-1, batch.width)
    row_N, place_N = batch.source_N // batch.width, batch.source_N % batch.width
    kept: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # Logits at these places alone, in every row: a place becomes its number among those that are kept.
        kept["logits_to_keep"], place_N = torch.unique(place_N, return_inverse=True)
    logits_RKV = model(input_ids=ids_RS, use_cache=False, **kept).logits
    logits_NV: Tensor = logits_RKV[row_N, place_N]
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def token_scores(logits_NV: Tensor, target_N: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Return log pi(target) and the entropy of pi in nats, each (N,), for pi = softmax(logits).

    As in `TokenHead`: the entropy is without gradient, and NaN where it is not asked for.
    """
    logprobs_NV = logits_NV.log_softmax(-1)
    logprobs_N = logprobs_NV.gather(1, target_N[:, None]).squeeze(1)
    if not with_entropy:
        return logprobs_N, torch.full_like(logprobs_N, torch.nan)
    logprobs_NV = logprobs_NV.detach()
    return logprobs_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def _in_float32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(hidden.float(), layer.weight.float(), bias)
