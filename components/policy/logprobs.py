"""Log-probabilities of completion tokens under a model, and the entropy of the distributions they were sampled from.

The output layer is applied to a chunk of tokens at a time, so that the N x V logits never exist at once.

Shape suffixes as in packing.py, and
    C  tokens of a chunk, D  hidden size, V  vocabulary
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.attention import use_packed_attention
from components.policy.packing import MicroBatch

_CHUNK_ELEMENTS = 4_194_304
"""Logits that exist at once on CPUs: enough for the full rate of the matrix product, few enough for the cache."""
_CUDA_CHUNK_ELEMENTS = 134_217_728
"""The same on GPUs: half a GiB. Each chunk reads the weight and, where it is trained, updates its whole gradient, so a
chunk of few tokens would move gigabytes for next to no arithmetic."""
_MIN_CHUNK_TOKENS = 64
"""Tokens of a chunk even if they have more logits: each chunk reads the whole weight, which is then larger."""


@dataclass(frozen=True)
class TokenLogprobs:
    """What a model computes for each completion token."""

    logprobs_N: Tensor
    """Natural log of the probability of the token, at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the distribution the token was sampled from; NaN from a model made without it."""


class LogprobModel(nn.Module):
    """A language model with its `TokenHead`: the module that is trained, so that sharding sees one forward."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, with_entropy: bool = True) -> None:
        super().__init__()
        self.model = use_packed_attention(model)
        self.head = TokenHead(model.get_output_embeddings(), temperature=temperature, with_entropy=with_entropy)

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the log-probabilities of the N completion tokens of `batch`."""
        hidden_1TD = self.model.get_decoder()(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            layout=batch.layout,
            use_cache=False,
        ).last_hidden_state
        return TokenLogprobs(*self.head(hidden_1TD[0, batch.source_N], batch.target_N))


@torch.no_grad()
def completion_logprobs(
    model: Callable[[MicroBatch], TokenLogprobs], batches: Sequence[MicroBatch], num_tokens: int
) -> Tensor:
    """Return the log-probability of each of M = `num_tokens` completion tokens; NaN for those not in `batches`."""
    logprobs_M = torch.full((num_tokens,), torch.nan, dtype=torch.float64, device=batches[0].target_N.device)
    for batch in batches:
        logprobs_M[batch.token_N] = model(batch).logprobs_N.double()
    return logprobs_M


def use_float32_logits(output_layer: nn.Linear) -> None:
    """Make the layer itself return logits in float32 at least, so that a sampler computes the logits of the trainer."""

    def forward(layer: nn.Linear, hidden_CD: Tensor) -> Tensor:
        return _logits(hidden_CD, layer.weight, layer.bias, temperature=1.0)

    setattr(output_layer, "forward", MethodType(forward, output_layer))  # noqa: B010  # a method, to mypy


class TokenHead(nn.Module):
    """The output layer of a model, followed by log-softmax, for given tokens only.

    The layer's weight is a parameter of this module too, so that ZeRO 3 gathers it when this module runs.
    """

    def __init__(self, output_layer: nn.Linear, *, temperature: float, with_entropy: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = output_layer.weight, output_layer.bias
        self.temperature, self.with_entropy = temperature, with_entropy

    def forward(self, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return log pi(target) and the entropy of pi in nats, each (N,), for pi = softmax(logits / temperature).

        Both are differentiable. They are computed in float32 at least: a bfloat16 softmax is where samplers and
        trainers disagree most. The entropy is a pass over the logits of its own: without it, it is NaN.
        """
        arguments = (hidden_ND, self.weight, self.bias, target_N, self.temperature, self.with_entropy)
        scores: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
        return scores


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes the logits of a chunk at a time, and once more in the backward pass.

    Chunks share their memory: a large tensor is new pages of memory each time, which take as long as its arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N, entropy_N, lse_N = hidden_ND.new_full((3, len(target_N)), torch.nan, dtype=dtype)
        chunks = _chunks(len(target_N), len(weight_VD), weight_VD.device.type)
        logits, weights = (_buffer(chunks, weight_VD, dtype) for _ in range(2))
        for rows in chunks:
            logits_CV = _logits(hidden_ND[rows], weight_VD, bias_V, temperature, logits)
            highest_C1 = logits_CV.amax(-1, keepdim=True)
            weights_CV = torch.sub(logits_CV, highest_C1, out=weights[: len(logits_CV)]).exp_()
            total_C = weights_CV.sum(-1)
            lse_N[rows] = highest_C1.squeeze(1) + total_C.log()
            logprobs_N[rows] = logits_CV.gather(1, target_N[rows, None]).squeeze(1) - lse_N[rows]
            if with_entropy:
                entropy_N[rows] = lse_N[rows] - weights_CV.mul_(logits_CV).sum(-1) / total_C
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, lse_N, entropy_N = ctx.saved_tensors
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(lse_N)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Accumulated over chunks in float32 at least. With adapters the weight is frozen and has no gradient.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=lse_N.dtype) if ctx.needs_input_grad[1] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=lse_N.dtype)
        chunks = _chunks(len(target_N), len(weight_VD), weight_VD.device.type)
        logits = _buffer(chunks, weight_VD, lse_N.dtype)
        for rows in chunks:
            # log pi, turned into the gradient of the logits in place:
            # dlog pi(target)/dlogit_v = [v = target] - pi_v;  dH/dlogit_v = -pi_v (log pi_v + H)
            grad_CV = _logits(hidden_ND[rows], weight_VD, bias_V, ctx.temperature, logits).sub_(lse_N[rows, None])
            if grad_entropy_N is None:
                grad_CV.exp_().mul_(-grad_logprobs_N[rows, None])
            else:
                inner_CV = grad_CV + entropy_N[rows, None]
                inner_CV.mul_(grad_entropy_N[rows, None]).add_(grad_logprobs_N[rows, None])
                grad_CV.exp_().mul_(inner_CV).neg_()
            grad_CV.scatter_add_(1, target_N[rows, None], grad_logprobs_N[rows, None])
            if ctx.temperature != 1:
                grad_CV.div_(ctx.temperature)
            grad_hidden_ND[rows] = _product(grad_CV, weight_VD)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            if grad_weight_VD is not None and hidden_ND.dtype == grad_CV.dtype:
                grad_weight_VD.addmm_(grad_CV.T, hidden_ND[rows])
            elif grad_weight_VD is not None:
                grad_weight_VD += _product(grad_CV.T, hidden_ND[rows])
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None


def _chunks(num_tokens: int, vocabulary_size: int, device_type: str) -> list[slice]:
    """Split the tokens into equal parts: of as many logits as suit the device, or of `_MIN_CHUNK_TOKENS` tokens."""
    elements = _CUDA_CHUNK_ELEMENTS if device_type == "cuda" else _CHUNK_ELEMENTS
    count = max(1, math.ceil(num_tokens / max(_MIN_CHUNK_TOKENS, elements // vocabulary_size)))
    size = max(1, math.ceil(num_tokens / count))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _buffer(chunks: Sequence[slice], weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for the logits of the largest chunk."""
    longest = max((rows.stop - rows.start for rows in chunks), default=0)
    return weight_VD.new_empty(longest, len(weight_VD), dtype=dtype)


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, buffer: Tensor | None = None
) -> Tensor:
    """Return the logits over the temperature, in float32 at least: in the first rows of a buffer, if there is one."""
    logits_CV = _product(hidden_CD, weight_VD.T, None if buffer is None else buffer[: len(hidden_CD)])
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV.div_(temperature) if temperature != 1 else logits_CV


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the matrix product in float32 at least, whatever the types of the factors."""
    if right.is_cuda and right.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    dtype = torch.promote_types(right.dtype, torch.float32)
    return torch.matmul(left.to(dtype), right.to(dtype), out=out)
