import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from components.policy import output_layer
from components.policy.engine import recompute_layers
from components.policy.output_layer import TokenHead, TokenLogprobs
from tests.policy import plain

SEQUENCES = plain.sequences()


@pytest.mark.parametrize(
    ("max_tokens", "temperature", "checkpointing"),
    [(1, 0.7, False), (20, 1.0, True), (40, 2.5, False), (1000, 0.7, True)],
)
def test_packing_changes_no_score_and_no_gradient(max_tokens: int, temperature: float, checkpointing: bool) -> None:
    """In float64, packing with shared prompts changes nothing, for any micro-batches, temperature and recomputation."""
    model = plain.gpt2()
    expected = plain.alone(model, SEQUENCES, temperature=temperature)
    if checkpointing:
        recompute_layers(model)
    actual = plain.packed(model, SEQUENCES, temperature=temperature, max_tokens=max_tokens)
    plain.assert_equal(actual, expected, relative=1e-10)


@pytest.mark.parametrize("max_tokens", [1, 40])
@pytest.mark.parametrize("family", [plain.qwen2, plain.qwen3])
def test_grouped_queries_rotary_positions_and_tying(family: Callable[[], PreTrainedModel], max_tokens: int) -> None:
    """Two Qwens agree to the precision of the float32 that they compute in."""
    model = family()
    actual = plain.packed(model, SEQUENCES, temperature=0.7, max_tokens=max_tokens)
    plain.assert_equal(actual, plain.alone(model, SEQUENCES, temperature=0.7), relative=5e-6)


NUM_TOKENS, HIDDEN_SIZE, VOCABULARY_SIZE = 11, 6, 13


def _layer(*, bias: bool, hidden_size: int = HIDDEN_SIZE, vocabulary_size: int = VOCABULARY_SIZE) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(hidden_size, vocabulary_size, bias=bias, dtype=torch.float64)


def _inputs(num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """Random hidden states and target tokens."""
    generator = torch.Generator().manual_seed(2)
    hidden_ND = 3 * torch.randn(num_tokens, HIDDEN_SIZE, dtype=torch.float64, generator=generator)
    return hidden_ND.requires_grad_(), torch.randint(VOCABULARY_SIZE, (num_tokens,), generator=generator)


def _full_softmax(layer: nn.Linear, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same as the head, from all logits at once."""
    logprobs_NV = (layer(hidden_ND) / temperature).log_softmax(-1)
    return logprobs_NV.gather(1, target_N[:, None]).squeeze(1), -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def _gradients(logprobs_N: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum."""
    weights_N = torch.randn(len(logprobs_N), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return list(torch.autograd.grad((weights_N * logprobs_N).sum(), inputs))


@pytest.mark.parametrize("chunk_tokens", [0.5, 3, 11])
@pytest.mark.parametrize(("bias", "temperature"), [(False, 1.0), (True, 0.6)])
def test_the_head_is_a_softmax_over_all_logits(
    monkeypatch: pytest.MonkeyPatch, bias: bool, temperature: float, chunk_tokens: float
) -> None:
    """Log-probabilities, their gradients and entropies equal those of full logits, wherever chunks begin and end."""
    monkeypatch.setattr(output_layer, "_CHUNK_ELEMENTS", int(chunk_tokens * VOCABULARY_SIZE))
    monkeypatch.setattr(output_layer, "_MIN_CHUNK_TOKENS", 1)
    layer, (hidden_ND, target_N) = _layer(bias=bias), _inputs()
    inputs = [hidden_ND, *layer.parameters()]
    expected = _full_softmax(layer, hidden_ND, target_N, temperature)
    actual = TokenHead(layer, temperature=temperature)(hidden_ND, target_N)
    logprobs_N, entropy_N = TokenHead(layer, temperature=temperature, with_entropy=False)(hidden_ND, target_N)
    assert torch.equal(logprobs_N, actual[0])
    assert bool(entropy_N.isnan().all())
    gradients, exact_gradients = (_gradients(each[0], inputs) for each in (actual, expected))
    torch.testing.assert_close([*actual, *gradients], [*expected, *exact_gradients], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize(("bias", "temperature", "factor"), [(False, 1.0, 1.0), (True, 0.6, 3.0)])
def test_the_gradient_of_a_loss_of_tokens_is_that_of_their_scores(
    monkeypatch: pytest.MonkeyPatch, bias: bool, temperature: float, factor: float, chunk_tokens: int
) -> None:
    """A loss that is not linear, computed chunk by chunk, and multiplied before its backward pass."""
    monkeypatch.setattr(output_layer, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(output_layer, "_MIN_CHUNK_TOKENS", chunk_tokens)
    layer, (hidden_ND, target_N) = _layer(bias=bias), _inputs()
    weights_N = torch.arange(1.0, NUM_TOKENS + 1, dtype=torch.float64)

    def token_loss(scores: TokenLogprobs, rows: slice) -> Tensor:
        return (weights_N[rows] * (scores.logprobs_N.exp() - scores.logprobs_N)).sum()

    inputs = [hidden_ND, *layer.parameters()]
    expected = token_loss(TokenLogprobs(*_full_softmax(layer, hidden_ND, target_N, temperature)), slice(None))
    actual = TokenHead(layer, temperature=temperature)(hidden_ND, target_N, token_loss)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients, exact_gradients = (torch.autograd.grad(factor * each, inputs) for each in (actual, expected))
    torch.testing.assert_close(gradients, exact_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "rounded products"])
def test_a_loss_of_less_precision_is_that_of_float64(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | str) -> None:
    """Its value, entropies and gradients; also where products round both factors to bfloat16, as on GPUs."""
    if dtype == "rounded products":
        monkeypatch.setattr(output_layer, "_rounds_factors", lambda _: True)
        monkeypatch.setattr(output_layer, "_product", lambda left, right: left.bfloat16().float() @ right.float())
    precision, gradient_precision = (1e-5, 1e-5) if dtype == torch.float32 else (1e-4, 0.02)
    layer, (hidden_ND, target_N) = _layer(bias=True, vocabulary_size=500), _inputs(70)
    target_N = target_N * 20
    stored = torch.float32 if dtype == torch.float32 else torch.bfloat16
    layer, hidden_ND = layer.to(stored), hidden_ND.to(stored)
    exact, exact_ND = copy.deepcopy(layer).double(), hidden_ND.detach().double().requires_grad_()
    entropies: list[Tensor] = []

    def token_loss(scores: TokenLogprobs, rows: slice) -> Tensor:
        entropies.append(scores.entropy_N.detach().double())
        return (scores.logprobs_N.exp() - scores.logprobs_N).sum()

    hidden_ND = hidden_ND.detach().requires_grad_()
    actual = TokenHead(layer, temperature=0.6)(hidden_ND, target_N, token_loss)
    expected = token_loss(TokenLogprobs(*_full_softmax(exact, exact_ND, target_N, 0.6)), slice(None))
    torch.testing.assert_close(actual.double(), expected, rtol=precision, atol=precision)
    torch.testing.assert_close(torch.cat(entropies[:-1]), entropies[-1], rtol=precision, atol=precision)
    gradients = torch.autograd.grad(actual, [hidden_ND, *layer.parameters()])
    exact_gradients = torch.autograd.grad(expected, [exact_ND, *exact.parameters()])
    for values, reference in zip(gradients, exact_gradients, strict=True):
        assert (values.double() - reference).abs().max() < gradient_precision * reference.abs().max()


def test_no_tokens_have_no_scores() -> None:
    """Of no token there are no log-probabilities, and the gradient is zero."""
    layer, (hidden_ND, target_N) = _layer(bias=True), _inputs(0)
    logprobs_N, entropy_N = TokenHead(layer, temperature=1.0)(hidden_ND, target_N)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    logprobs_N.sum().backward()
    assert layer.weight.grad is not None
    assert float(layer.weight.grad.abs().sum()) == 0.0


def test_tokens_of_almost_no_probability_stay_finite() -> None:
    """Logits that differ by a thousand underflow no log-probability, and the entropy and gradients stay finite."""
    layer = nn.Linear(1, 3, bias=False, dtype=torch.float64)
    layer.weight.data = torch.tensor([[0.0], [1000.0], [-500.0]], dtype=torch.float64)
    hidden_ND = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    logprobs_N, entropy_N = TokenHead(layer, temperature=1.0)(hidden_ND, torch.tensor([0, 1, 2]))
    assert logprobs_N.tolist() == pytest.approx([-1000.0, 0.0, -1500.0])
    assert entropy_N.tolist() == pytest.approx([0.0, 0.0, 0.0])
    logprobs_N.sum().backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_GPU)])
def test_scores_of_bf16_are_computed_in_float32(device: str) -> None:
    """With bf16 inputs the scores are those of the same numbers in float64, to the precision of float32."""
    layer, exact_layer = (_layer(bias=True, vocabulary_size=64) for _ in range(2))
    layer = layer.to(device, torch.bfloat16)
    exact_layer.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    hidden_ND, target_N = _inputs()
    hidden_ND = hidden_ND.detach().to(device, torch.bfloat16).requires_grad_()
    exact_ND = hidden_ND.detach().double().cpu().requires_grad_()
    actual = TokenHead(layer, temperature=0.6)(hidden_ND, target_N.to(device))
    expected = _full_softmax(exact_layer, exact_ND, target_N, 0.6)
    for values, exact in zip(actual, expected, strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(actual[0].sum(), (hidden_ND, *layer.parameters()))
    exact_gradients = torch.autograd.grad(expected[0].sum(), (exact_ND, *exact_layer.parameters()))
    for values, exact in zip(gradients, exact_gradients, strict=True):
        assert values.dtype == torch.bfloat16
        assert float((values.cpu().double() - exact).abs().max() / exact.abs().max()) < 0.01


def test_gradients_of_bf16_weights_are_accumulated_over_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand chunks of one token that all pull the same way: in bf16 the sum would stand still after some 256."""
    monkeypatch.setattr(output_layer, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(output_layer, "_MIN_CHUNK_TOKENS", 1)
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
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("which", ["logprobs", "loss"])
def test_the_logits_of_all_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Forward and backward hold no tensor larger than a chunk, the weight or the hidden states."""
    chunk, num_tokens, hidden_size, vocabulary_size = 40_000, 1500, 20, 3000
    monkeypatch.setattr(output_layer, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(output_layer, "_MIN_CHUNK_TOKENS", 1)
    layer = _layer(bias=True, hidden_size=hidden_size, vocabulary_size=vocabulary_size)
    hidden_ND = torch.randn(num_tokens, hidden_size, dtype=torch.float64, requires_grad=True)
    target_N = torch.randint(vocabulary_size, (num_tokens,))
    with _LargestTensor() as largest:
        head = TokenHead(layer, temperature=0.6)
        if which == "loss":
            head(hidden_ND, target_N, lambda scores, _: scores.logprobs_N.sum()).backward()
        else:
            _gradients(head(hidden_ND, target_N)[0], [hidden_ND, *layer.parameters()])
    limit = max(chunk, vocabulary_size * hidden_size, num_tokens * hidden_size)
    assert chunk < largest.elements <= limit < num_tokens * vocabulary_size / 50
