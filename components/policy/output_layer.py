"""The output layer of a model, which is applied to one chunk of tokens at a time.

The N x V logits, the largest tensor of a training by far, never exist at once, neither forward nor backward.

Shape suffixes as in packing.py, and
    C  tokens of a chunk, D  hidden size, V  vocabulary
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from components.policy.products import onednn_product

_CHUNK_ELEMENTS = 8_388_608
"""Logits of a chunk on CPUs, 32 MiB: enough tokens for fast matrix products."""
_CUDA_CHUNK_ELEMENTS = 134_217_728
"""Logits of a chunk on GPUs, half a GiB. Each chunk reads the weight and, if it is trained, updates its whole gradient,
which is gigabytes of memory traffic: so there are few chunks, of many tokens."""
_MIN_CHUNK_TOKENS = 64
"""Minimum tokens of a chunk, for large vocabularies: each chunk reads the whole weight."""


@dataclass(frozen=True)
class TokenLogprobs:
    """What a model computes for each completion token."""

    logprobs_N: Tensor
    """Natural log of the probability of the token, at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the model's distribution at the token, without gradient; NaN from a model without
    `with_entropy`."""


TokenLoss = Callable[[TokenLogprobs, slice], Tensor]
"""Returns the summed loss of the tokens in a slice of the N, given their scores; differentiable by `logprobs_N`."""


@dataclass
class TeacherTerm:
    """A term of the loss that draws the model to a frozen one: sum over tokens of weight * KL(pi || pi_teacher)."""

    teacher_logits: Callable[[slice], Tensor]
    """Returns the teacher's logits / temperature of the tokens in a slice of the N, (C, V)."""
    weight_N: Tensor
    kl_N: Tensor | None = None
    """KL(pi || pi_teacher) of each token in nats, once the loss is computed."""


class TokenHead(nn.Module):
    """The output layer of a model, followed by log-softmax, of which only the values of the target tokens are kept.

    The weight of the layer is a parameter of this module too, so that ZeRO 3 gathers it when this module runs.
    """

    def __init__(self, output_layer: nn.Linear, *, temperature: float, with_entropy: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = output_layer.weight, output_layer.bias
        self.temperature, self.with_entropy = temperature, with_entropy

    def forward(
        self,
        hidden_ND: Tensor,
        target_N: Tensor,
        token_loss: TokenLoss | None = None,
        *,
        term: TeacherTerm | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Return log pi(target) and the entropy of pi in nats, each (N,), for pi = softmax(logits / temperature).

        Only the first is differentiable. They are computed in float32 at least: a bfloat16 softmax is where samplers
        and trainers disagree most. The entropy is NaN without `with_entropy`, which takes time.

        With a `token_loss` or a `term`, return the sum of these losses instead.
        """
        arguments = (hidden_ND, self.weight, self.bias, target_N, self.temperature)
        losses: list[_ChunkLoss] = []
        if token_loss is not None:
            losses.append(partial(_token_loss_of_chunk, token_loss, self.with_entropy))
        if term is not None:
            term.kl_N = torch.empty_like(target_N, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
            losses.append(partial(_divergence_of_chunk, term))
        if losses:
            loss: Tensor = _FusedLoss.apply(*arguments, losses)  # type: ignore[no-untyped-call]
            return loss
        scores: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(*arguments, self.with_entropy)  # type: ignore[no-untyped-call]
        return scores

    def logits(self, hidden_ND: Tensor, target_N: Tensor) -> Callable[[slice], Tensor]:
        """Return a function that computes logits / temperature of a slice of the tokens, (C, V)."""
        return _Head(hidden_ND, self.weight, self.bias, target_N, self.temperature).logits


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies, chunk by chunk; the backward pass computes the logits again."""

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
        head = _Head(hidden_ND, weight_VD, bias_V, target_N, temperature)
        logprobs_N, entropy_N, lse_N = hidden_ND.new_empty((3, len(target_N)), dtype=head.dtype)
        for rows in head.chunks:
            logprobs_N[rows], entropy_N[rows], lse_N[rows], _ = head.score(rows, with_entropy=with_entropy)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, lse_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, lse_N = ctx.saved_tensors
        head = _Head(hidden_ND, weight_VD, bias_V, target_N, ctx.temperature)
        gradients = _Gradients(head, with_weight=ctx.needs_input_grad[1])
        for rows in head.chunks:
            probabilities_CV = head.logits(rows).sub_(lse_N[rows, None]).exp_()
            gradients.add(rows, *head.nll_gradients(rows, probabilities_CV), -grad_logprobs_N[rows])
        return *gradients.all, None, None, None


class _FusedLoss(torch.autograd.Function):
    """A loss that is a sum over tokens: the forward pass computes its gradient too, while it has the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        losses: "Sequence[_ChunkLoss]",
    ) -> Tensor:
        head = _Head(hidden_ND, weight_VD, bias_V, target_N, temperature)
        gradients = _Gradients(head, with_weight=ctx.needs_input_grad[1])
        total = hidden_ND.new_zeros((), dtype=head.dtype)
        for rows in head.chunks:
            for compute_loss in losses:
                loss, *gradient = compute_loss(head, rows)
                total += loss
                gradients.add(rows, *gradient)
                del gradient  # before the next logits are computed
        ctx.save_for_backward(*gradients.all)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = float(grad_loss)  # the number of processes: see `Engine.backward`
        gradients = ctx.saved_tensors
        if factor != 1:
            gradients = [None if each is None else each.mul_(factor) for each in gradients]
        return *gradients, None, None, None


_ChunkLoss = Callable[["_Head", slice], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Returns the loss of a chunk's tokens, and its gradient as the three arguments of `_Gradients.add`."""


def _token_loss_of_chunk(
    token_loss: TokenLoss, with_entropy: bool, head: "_Head", rows: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of a chunk and its gradient, which is that of -log pi(target) times a factor for each token."""
    # The entropy follows from the gradient of -log pi(target) without a pass over the logits, unless a GPU rounds it.
    is_entropy_derived = with_entropy and not _rounds_factors(head.weight_VD)
    logprobs_C, entropy_C, _, probabilities_CV = head.score(rows, with_entropy=with_entropy and not is_entropy_derived)
    nll_grad_CV, nll_grad_CD = head.nll_gradients(rows, probabilities_CV)
    if is_entropy_derived:
        entropy_C = head.entropy(rows, logprobs_C, nll_grad_CV, nll_grad_CD)
    scores = TokenLogprobs(logprobs_C.requires_grad_(), entropy_C)
    with torch.enable_grad():
        loss = token_loss(scores, rows)
    (grad_C,) = torch.autograd.grad(loss, scores.logprobs_N)
    return loss.detach(), nll_grad_CV, nll_grad_CD, -grad_C


def _divergence_of_chunk(term: TeacherTerm, head: "_Head", rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the teacher's term for a chunk and its gradient; store the divergence of each token in `term.kl_N`."""
    logprobs_CV = head.logits(rows).log_softmax(-1)
    difference_CV = logprobs_CV - term.teacher_logits(rows).to(head.dtype).log_softmax(-1)
    probabilities_CV = logprobs_CV.exp_()
    kl_C = (probabilities_CV * difference_CV).sum(-1)
    assert term.kl_N is not None
    term.kl_N[rows] = kl_C
    weight_C = term.weight_N[rows].to(head.dtype)
    # dKL/dlogit_v = pi_v (log pi_v / q_v - KL)
    grad_CV = probabilities_CV.mul_(difference_CV.sub_(kl_C[:, None]))
    return (weight_C * kl_C).sum(), grad_CV, _product(grad_CV, head.weight_VD), weight_C


class _Head:
    """An output layer with the hidden states and target tokens of a micro-batch, computed chunk by chunk."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float
    ) -> None:
        self.dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        # Convert once for all chunks: a half-precision product on CPUs would convert the whole weight each time.
        self.weight_VD = weight_VD if weight_VD.is_cuda else weight_VD.to(self.dtype)
        self.hidden_ND, self.bias_V = hidden_ND, bias_V
        self.target_N, self.temperature = target_N, temperature
        self.chunks = _chunks(len(target_N), len(weight_VD), weight_VD.device.type)

    def logits(self, rows: slice) -> Tensor:
        """Return logits / temperature of a chunk, (C, V)."""
        return _logits(self.hidden_ND[rows], self.weight_VD, self.bias_V, self.temperature)

    def score(self, rows: slice, *, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probability, entropy and log-sum-exp of a chunk's tokens, (C,) each, and probabilities, (C, V)."""
        logits_CV = self.logits(rows)
        highest_C = logits_CV.amax(-1)
        target_C = logits_CV.gather(1, self.target_N[rows, None]).squeeze(1)
        # On CPUs the probabilities overwrite the logits, unless the entropy needs them.
        overwrites = not with_entropy and not logits_CV.is_cuda
        probabilities_CV = torch.softmax(logits_CV, -1, out=logits_CV if overwrites else None)
        # lse = logit - log p for every token; the likeliest token has the smallest rounding error.
        lse_C = highest_C - probabilities_CV.amax(-1).log()
        entropy_C = torch.full_like(lse_C, torch.nan)
        if with_entropy:
            entropy_C = lse_C - logits_CV.mul_(probabilities_CV).sum(-1)
        return target_C - lse_C, entropy_C, lse_C, probabilities_CV

    def nll_gradients(self, rows: slice, probabilities_CV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of -log pi(target) by logits, (C, V), and by hidden states, (C, D), at temperature 1.

        The first, pi_v - [v = target], overwrites the probabilities.
        """
        target_C1 = self.target_N[rows, None]
        grad_CV = probabilities_CV.scatter_add_(1, target_C1, probabilities_CV.new_full(target_C1.shape, -1.0))
        return grad_CV, _product(grad_CV, self.weight_VD)

    def entropy(self, rows: slice, logprobs_C: Tensor, nll_grad_CV: Tensor, nll_grad_CD: Tensor) -> Tensor:
        """Return the entropy in nats: -log pi(target) - sum_v (pi_v - [v = target]) logit_v."""
        # The sum over logits W h + b is a sum over hidden states, and one over the bias.
        sum_C = (nll_grad_CD * self.hidden_ND[rows]).sum(-1)
        if self.bias_V is not None:
            sum_C += nll_grad_CV @ self.bias_V.to(self.dtype)
        return -logprobs_C - sum_C / self.temperature


class _Gradients:
    """The gradients of a head, accumulated over chunks in float32 at least; None for a weight that is frozen."""

    def __init__(self, head: _Head, *, with_weight: bool) -> None:
        self._head = head
        self._hidden_ND = torch.zeros_like(head.hidden_ND)
        self._weight_VD = torch.zeros_like(head.weight_VD, dtype=head.dtype) if with_weight else None
        self._bias_V = None if head.bias_V is None else torch.zeros_like(head.bias_V, dtype=head.dtype)

    @property
    def all(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias."""
        return self._hidden_ND, self._weight_VD, self._bias_V

    def add(self, rows: slice, grad_CV: Tensor, grad_CD: Tensor, factor_C: Tensor) -> None:
        """Add the gradients of a chunk, by logits and by hidden states at temperature 1, times a factor per token."""
        head, factor_C = self._head, factor_C / self._head.temperature
        self._hidden_ND[rows] += grad_CD * factor_C[:, None]
        if self._bias_V is not None:
            self._bias_V += factor_C @ grad_CV
        if self._weight_VD is not None:
            hidden_CD = head.hidden_ND[rows]
            scaled_CD = hidden_CD * factor_C[:, None]
            if _rounds_factors(head.weight_VD):  # a fast product of half-precision factors
                self._weight_VD += _product(grad_CV.T, scaled_CD.to(hidden_CD.dtype))
            else:
                self._weight_VD.addmm_(grad_CV.T, scaled_CD)


def _chunks(num_tokens: int, vocabulary_size: int, device_type: str) -> list[slice]:
    """Return chunks of about equal numbers of tokens, as few as the memory for the logits of one chunk allows."""
    max_logits = _CUDA_CHUNK_ELEMENTS if device_type == "cuda" else _CHUNK_ELEMENTS
    max_tokens = max(_MIN_CHUNK_TOKENS, max_logits // vocabulary_size)
    num_chunks = max(1, math.ceil(num_tokens / max_tokens))
    size = max(1, math.ceil(num_tokens / num_chunks))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """Return logits / temperature, (C, V), in float32 at least."""
    logits_CV = _product(hidden_CD, weight_VD.T)
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV.div_(temperature) if temperature != 1 else logits_CV


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product in float32 at least, for factors of any type."""
    if _rounds_factors(right):
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    dtype = torch.promote_types(right.dtype, torch.float32)
    return onednn_product(left.to(dtype), right.to(dtype))


def _rounds_factors(right: Tensor) -> bool:
    """Tell whether `_product` rounds its left factor to the type of `right`: half precision on a GPU, which is fast."""
    return right.is_cuda and right.dtype in (torch.bfloat16, torch.float16)


def use_float32_logits(output_layer: nn.Linear) -> None:
    """Make the layer return logits in float32 at least, so that a sampler computes the same logits as the trainer."""

    def forward(layer: nn.Linear, hidden: Tensor) -> Tensor:  # hidden: (..., D)
        logits_CV = _logits(hidden.flatten(end_dim=-2), layer.weight, layer.bias, temperature=1.0)
        return logits_CV.view(*hidden.shape[:-1], -1)

    setattr(output_layer, "forward", MethodType(forward, output_layer))  # noqa: B010  # a method, to mypy
