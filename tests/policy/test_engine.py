import math

import pytest
import torch

from components.policy.engine import NonFiniteError, PolicyEngine
from components.policy.logprobs import CompletionScorer
from components.shared.errors import PipelineError
from tests import tiny


def _trained(
    *, steps: int = 3, max_tokens: int = 100, **settings: object
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after some optimizer steps on the same examples, and the gradient norms on the way."""
    checkpoint = tiny.checkpoint()
    engine = PolicyEngine(CompletionScorer(checkpoint.model, temperature=1.0), tiny.engine_config(**settings))
    examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]]
    num_tokens = sum(len(example.completion_ids) for example in examples)
    norms = []
    for _ in range(steps):
        for batch in tiny.batches(examples, max_tokens):
            engine.accumulate(-engine(batch).logprobs_N.sum() / num_tokens)
        norms.append(engine.step(1e-2)["gradient_norm"])
    with engine.whole_weights():
        return {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}, norms


def _plainly_trained(steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same with nothing but torch: one batch, AdamW, clipping."""
    checkpoint = tiny.checkpoint()
    scorer = CompletionScorer(checkpoint.model, temperature=1.0)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    (batch,) = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100_000)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (-scorer(batch).logprobs_N.mean()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)))
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}, norms


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 100_000])
def test_training_equals_plain_torch_for_any_sharding_and_split(zero_stage: int, max_tokens: int) -> None:
    """Weights and gradient norms after three clipped AdamW steps are those of plain torch on one batch."""
    weights, norms = _trained(zero_stage=zero_stage, max_tokens=max_tokens)
    expected_weights, expected_norms = _plainly_trained()
    assert min(expected_norms) > 1.0, "the test wants clipping to act"
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-3, atol=2e-5)


def test_bf16_trains_and_keeps_its_type() -> None:
    """In bf16 the loss falls, and the weights stay bf16."""
    checkpoint = tiny.checkpoint(dtype=torch.bfloat16)
    engine = PolicyEngine(
        CompletionScorer(checkpoint.model, temperature=1.0), tiny.engine_config(precision="bf16", zero_stage=2)
    )
    (batch,) = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100_000)
    losses = []
    for _ in range(8):
        engine.accumulate(-engine(batch).logprobs_N.mean())
        losses.append(engine.step(1e-2)["loss"])
    assert losses[-1] < losses[0] - 1.0
    assert {weight.dtype for weight in checkpoint.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    """One bad micro-batch among good ones raises, and no weight has changed."""
    checkpoint = tiny.checkpoint()
    engine = PolicyEngine(CompletionScorer(checkpoint.model, temperature=1.0), tiny.engine_config())
    before = [weight.detach().clone() for weight in checkpoint.model.parameters()]
    first, second, *_ = tiny.batches([checkpoint.example(problem) for problem in tiny.PROBLEMS[:8]], 100)
    engine.accumulate(-engine(first).logprobs_N.mean())
    engine.accumulate(-engine(second).logprobs_N.mean() * bad)
    with pytest.raises(NonFiniteError, match="stopped before the optimizer step"):
        engine.step(1e-2)
    for weight, kept in zip(checkpoint.model.parameters(), before, strict=True):
        assert torch.equal(weight, kept)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_bf16_sums_micro_batches_without_rounding_them(zero_stage: int) -> None:
    """In bf16 the norm of the summed gradient is within bf16's own precision of that of one batch."""
    norms = []
    for max_tokens in (1, 100_000):
        checkpoint = tiny.checkpoint(dtype=torch.bfloat16)
        engine = PolicyEngine(
            CompletionScorer(checkpoint.model, temperature=1.0),
            tiny.engine_config(precision="bf16", zero_stage=zero_stage),
        )
        examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS]
        num_tokens = sum(len(example.completion_ids) for example in examples)
        for batch in tiny.batches(examples, max_tokens):
            engine.accumulate(-engine(batch).logprobs_N.sum() / num_tokens)
        norms.append(engine.step(1e-3)["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_ends_the_run(zero_stage: int) -> None:
    """A finite loss with an infinite slope (the root of zero) is an error, not a step."""
    checkpoint = tiny.checkpoint()
    engine = PolicyEngine(
        CompletionScorer(checkpoint.model, temperature=1.0), tiny.engine_config(zero_stage=zero_stage)
    )
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[0])], 1000)
    logprobs_N = engine(batch).logprobs_N
    engine.accumulate((logprobs_N - logprobs_N.detach()).clamp(min=0).sum().sqrt())
    with pytest.raises(NonFiniteError, match="norm of the gradient"):
        engine.step(1e-3)


def test_more_processes_than_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process would train on the same data: better an error than a silent waste."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PipelineError, match="WORLD_SIZE is 2"):
        PolicyEngine(CompletionScorer(tiny.checkpoint().model, temperature=1.0), tiny.engine_config())
