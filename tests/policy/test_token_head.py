import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.policy import logprobs
from components.policy.logprobs import TokenHead, use_float32_logits

NUM_TOKENS, HIDDEN_SIZE, VOCABULARY_SIZE = 11, 6, 13


def _layer(*, bias: bool, hidden_size: int = HIDDEN_SIZE, vocabulary_size: int = VOCABULARY_SIZE) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(hidden_size, vocabulary_size, bias=bias, dtype=torch.float64)


def _given(num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """Random hidden states and target tokens."""
    generator = torch.Generator().manual_seed(2)
    hidden_ND = 3 * torch.randn(num_tokens, HIDDEN_SIZE, dtype=torch.float64, generator=generator)
    return hidden_ND.requires_grad_(), torch.randint(VOCABULARY_SIZE, (num_tokens,), generator=generator)


def _plainly(layer: nn.Linear, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same from all logits at once."""
    logprobs_NV = (layer(hidden_ND) / temperature).log_softmax(-1)
    return logprobs_NV.gather(1, target_N[:, None]).squeeze(1), -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def _gradients(outputs: tuple[Tensor, Tensor], chosen: str, wanted: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs, or of one of them."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2, len(outputs[0]), dtype=torch.float64, generator=generator)
    losses = {name: (w * x).sum() for name, w, x in zip(("logprobs", "entropy"), weights, outputs, strict=True)}
    loss = losses["logprobs"] + losses["entropy"] if chosen == "both" else losses[chosen]
    return list(torch.autograd.grad(loss, wanted))


@pytest.mark.parametrize("chosen", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("rows_at_once", [0.5, 1, 3, 5, 11, 100])
@pytest.mark.parametrize(("bias", "temperature"), [(False, 1.0), (True, 0.6)])
def test_it_is_a_softmax_over_all_logits(
    monkeypatch: pytest.MonkeyPatch, bias: bool, temperature: float, rows_at_once: float, chosen: str
) -> None:
    """Log-probabilities, entropies and all gradients equal those of full logits, wherever chunks begin and end."""
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", int(rows_at_once * VOCABULARY_SIZE))
    monkeypatch.setattr(logprobs, "_MIN_CHUNK_TOKENS", 1)
    layer, (hidden_ND, target_N) = _layer(bias=bias), _given()
    wanted = [hidden_ND, *layer.parameters()]
    expected = _plainly(layer, hidden_ND, target_N, temperature)
    found = TokenHead(layer, temperature=temperature)(hidden_ND, target_N)
    for values, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(values, exact, rtol=1e-12, atol=1e-12)
    for values, exact in zip(_gradients(found, chosen, wanted), _gradients(expected, chosen, wanted), strict=True):
        torch.testing.assert_close(values, exact, rtol=1e-12, atol=1e-12)


def test_two_tokens_by_hand() -> None:
    """Logits 0 and log 3 at temperature 1: probabilities 1/4 and 3/4, and their entropy."""
    layer = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    layer.weight.data = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    hidden_ND = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    logprobs_N, entropy_N = TokenHead(layer, temperature=1.0)(hidden_ND, torch.tensor([0, 1]))
    assert logprobs_N.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    assert entropy_N.tolist() == pytest.approx([math.log(4) - 3 / 4 * math.log(3)] * 2)
    logprobs_N.sum().backward()
    # d log pi(v) / d logit_w = [v = w] - pi(w): for both targets together 1 - 2/4 and 1 - 6/4.
    assert layer.weight.grad is not None
    assert layer.weight.grad.flatten().tolist() == pytest.approx([0.5, -0.5])


def test_a_weight_that_is_also_the_embedding_gets_both_gradients() -> None:
    """With tied weights the gradient is the sum of what the input and the output ask for."""
    layer, (_, target_N) = _layer(bias=False), _given()
    ids_N = target_N.flip(0)
    tied = layer.weight
    found = TokenHead(layer, temperature=0.6)(nn.functional.embedding(ids_N, tied), target_N)
    expected = _plainly(layer, nn.functional.embedding(ids_N, tied), target_N, 0.6)
    for values, exact in zip(_gradients(found, "both", [tied]), _gradients(expected, "both", [tied]), strict=True):
        torch.testing.assert_close(values, exact, rtol=1e-12, atol=1e-12)


def test_no_tokens_have_no_scores() -> None:
    """Of no token there are no log-probabilities, and the gradient is zero."""
    layer, (hidden_ND, target_N) = _layer(bias=True), _given(0)
    logprobs_N, entropy_N = TokenHead(layer, temperature=1.0)(hidden_ND, target_N)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    (logprobs_N.sum() + entropy_N.sum()).backward()
    assert layer.weight.grad is not None
    assert float(layer.weight.grad.abs().sum()) == 0.0


def test_tokens_of_hardly_any_chance_stay_finite() -> None:
    """Logits that differ by a thousand underflow no log-probability, and the entropy and gradients stay finite."""
    layer = nn.Linear(1, 3, bias=False, dtype=torch.float64)
    layer.weight.data = torch.tensor([[0.0], [1000.0], [-500.0]], dtype=torch.float64)
    hidden_ND = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    logprobs_N, entropy_N = TokenHead(layer, temperature=1.0)(hidden_ND, torch.tensor([0, 1, 2]))
    assert logprobs_N.tolist() == pytest.approx([-1000.0, 0.0, -1500.0])
    assert entropy_N.tolist() == pytest.approx([0.0, 0.0, 0.0])
    (logprobs_N.sum() + entropy_N.sum()).backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)
def test_bf16_weights_are_summed_in_float32(device: str) -> None:
    """With bf16 inputs the scores are those of the same numbers in float64, to the precision of float32."""
    layer = _layer(bias=True, vocabulary_size=64).to(device, torch.bfloat16)
    hidden_ND, target_N = _given()
    hidden_ND = hidden_ND.detach().to(device, torch.bfloat16).requires_grad_()
    target_N = target_N.to(device)
    exact_layer = _layer(bias=True, vocabulary_size=64)
    exact_layer.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    exact_ND = hidden_ND.detach().double().cpu().requires_grad_()
    found = TokenHead(layer, temperature=0.6)(hidden_ND, target_N)
    expected = _plainly(exact_layer, exact_ND, target_N.cpu(), 0.6)
    for values, exact in zip(found, expected, strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    (found[0].sum() + found[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for given, exact in zip((hidden_ND, *layer.parameters()), (exact_ND, *exact_layer.parameters()), strict=True):
        assert given.grad is not None
        assert exact.grad is not None
        assert given.grad.dtype == torch.bfloat16
        error = (given.grad.cpu().double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert float(error) < 0.01


def test_the_gradient_of_bf16_weights_is_summed_over_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand chunks of one token that all pull the same way: in bf16 the sum would stand still after some 256."""
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "_MIN_CHUNK_TOKENS", 1)
    layer = nn.Linear(1, 2, bias=True, dtype=torch.bfloat16)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    num_tokens = 1024
    hidden_ND = torch.ones(num_tokens, 1, dtype=torch.bfloat16)
    logprobs_N, _ = TokenHead(layer, temperature=1.0)(hidden_ND, torch.zeros(num_tokens, dtype=torch.long))
    logprobs_N.sum().backward()
    # With equal logits each token adds [v = 0] - 1/2.
    for parameter in (layer.weight, layer.bias):
        assert parameter.grad is not None
        assert parameter.grad.flatten().tolist() == [num_tokens / 2, -num_tokens / 2]


class _LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("chosen", ["logprobs", "both"])
def test_the_logits_of_all_tokens_are_never_there_at_once(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """Forward and backward hold no tensor larger than a chunk, the weight or the hidden states."""
    chunk, num_tokens, hidden_size, vocabulary_size = 40_000, 1500, 20, 3000
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(logprobs, "_MIN_CHUNK_TOKENS", 1)
    layer = _layer(bias=True, hidden_size=hidden_size, vocabulary_size=vocabulary_size)
    hidden_ND = torch.randn(num_tokens, hidden_size, dtype=torch.float64, requires_grad=True)
    target_N = torch.randint(vocabulary_size, (num_tokens,))
    with _LargestTensor() as seen:
        found = TokenHead(layer, temperature=0.6)(hidden_ND, target_N)
        _gradients(found, chosen, [hidden_ND, *layer.parameters()])
    largest = max(chunk, vocabulary_size * hidden_size, num_tokens * hidden_size)
    assert chunk < seen.elements <= largest < num_tokens * vocabulary_size / 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_layer_made_precise_says_what_the_head_scores(dtype: torch.dtype) -> None:
    """A layer of any type returns the very logits that the head scores, in float32 at least."""
    layer, (hidden_ND, target_N) = _layer(bias=True).to(dtype), _given()
    hidden_ND = hidden_ND.detach().to(dtype)
    scored_N, _ = TokenHead(layer, temperature=1.0)(hidden_ND, target_N)
    use_float32_logits(layer)
    logits_NV = layer(hidden_ND)
    assert logits_NV.dtype == scored_N.dtype == torch.promote_types(dtype, torch.float32)
    said_N = logits_NV.log_softmax(-1).gather(1, target_N[:, None]).squeeze(1)
    torch.testing.assert_close(said_N, scored_N, rtol=1e-6, atol=1e-6)
