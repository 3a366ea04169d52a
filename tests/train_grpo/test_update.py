import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.policy.engine import PolicyEngine
from components.policy.logprobs import CompletionScorer
from components.policy.sequences import TokenSequence
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.update import update
from tests import tiny
from tests.train_grpo.settings import grpo_config

ADVANTAGES_B = torch.tensor([0.58, 0.58, 0.58, -1.73, 1.0, -1.0])


def _sequences(checkpoint: Checkpoint) -> list[TokenSequence]:
    """Completions of very different lengths."""
    return [checkpoint.example(tiny.PROBLEMS[number]) for number in (0, 4, 9, 1, 3, 12)]


def _drifted(checkpoint: Checkpoint, amount: float) -> CompletionScorer:
    """A frozen copy with other weights: a reference that the policy has moved away from."""
    moved = copy.deepcopy(checkpoint.model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(amount * torch.randn(weight.shape, generator=generator))
    return CompletionScorer(moved, temperature=1.0).requires_grad_(False)


def _objective(config: TrainGRPOConfig, checkpoint: Checkpoint, reference: CompletionScorer) -> Tensor:
    """Equation 3 of the paper at the first update, sequence by sequence and token by token."""
    total = torch.zeros((), dtype=torch.float64)
    sequences = _sequences(checkpoint)
    for sequence, advantage in zip(sequences, ADVANTAGES_B.tolist(), strict=True):
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
        start = len(sequence.prompt_ids)
        policy_TV = torch.log_softmax(checkpoint.model(ids).logits[0].double(), dim=-1)
        reference_TV = torch.log_softmax(reference.model(ids).logits[0].double(), dim=-1)
        of_sequence = torch.zeros((), dtype=torch.float64)
        for t, token in enumerate(sequence.completion_ids):
            logprob, other = policy_TV[start + t - 1, token], reference_TV[start + t - 1, token]
            ratio = torch.exp(logprob - logprob.detach())
            kl = torch.exp(other - logprob) - (other - logprob) - 1
            clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
            of_sequence = of_sequence + torch.minimum(ratio * advantage, clipped * advantage)
            of_sequence = of_sequence - config.kl_coefficient * kl
        total = total + of_sequence / len(sequence.completion_ids)
    return total / len(sequences)


class _Gradients:
    """Takes the place of the engine where the gradient is wanted and no step."""

    def __init__(self, scorer: CompletionScorer) -> None:
        self._scorer = scorer

    def __call__(self, batch: object) -> object:
        return self._scorer(batch)

    def accumulate(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> dict[str, float]:
        return {"learning_rate": learning_rate}


@pytest.mark.parametrize("max_tokens", [1, 70, 100_000])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.5])
def test_the_gradient_is_that_of_the_papers_objective(max_tokens: int, kl_coefficient: float) -> None:
    """For any split into micro-batches it equals the token-by-token objective of equation 3."""
    config = grpo_config(kl_coefficient=kl_coefficient)
    checkpoint = tiny.checkpoint()
    reference = _drifted(checkpoint, 0.02)
    (-_objective(config, checkpoint, reference)).backward()  # type: ignore[no-untyped-call]
    expected = {name: weight.grad.clone() for name, weight in checkpoint.model.named_parameters()}
    checkpoint.model.zero_grad()
    policy: Callable[..., object] = _Gradients(CompletionScorer(checkpoint.model, temperature=1.0))
    update(config, policy, reference, tiny.batches(_sequences(checkpoint), max_tokens), ADVANTAGES_B, 0.0)  # type: ignore[arg-type]
    for name, weight in checkpoint.model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=2e-4, atol=2e-6)


def _engine(checkpoint: Checkpoint) -> PolicyEngine:
    return PolicyEngine(CompletionScorer(checkpoint.model, temperature=1.0), tiny.engine_config())


def test_the_first_update_is_exactly_on_policy() -> None:
    """With the reference equal to the policy, ratio is 1 and KL 0 to the last bit, and nothing is clipped."""
    checkpoint = tiny.checkpoint()
    reference = _drifted(checkpoint, 0.0)
    figures = update(
        grpo_config(), _engine(checkpoint), reference, tiny.batches(_sequences(checkpoint), 100), ADVANTAGES_B, 1e-3
    )
    assert (figures["ratio_min"], figures["ratio_max"], figures["kl"], figures["clip_fraction"]) == (1.0, 1.0, 0.0, 0.0)
    assert math.isfinite(figures["loss"])
    assert figures["gradient_norm"] > 0


def test_later_updates_are_measured_against_the_policy_that_sampled() -> None:
    """After one large step the ratios have moved and some are clipped; the sampled log-probabilities stay put."""
    checkpoint = tiny.checkpoint()
    sampled = copy.deepcopy(checkpoint.model)
    batches = tiny.batches(_sequences(checkpoint), 100)
    config = grpo_config(updates_per_rollout=2)
    figures = update(config, _engine(checkpoint), _drifted(checkpoint, 0.0), batches, ADVANTAGES_B, 3e-2)
    # The first of the two updates alone, to know where the second one was measured.
    again = tiny.checkpoint()
    update(grpo_config(), _engine(again), _drifted(again, 0.0), batches, ADVANTAGES_B, 3e-2)
    ratios = [
        torch.exp(
            CompletionScorer(again.model, temperature=1.0)(batch).logprobs_N
            - CompletionScorer(sampled, temperature=1.0)(batch).logprobs_N
        )
        for batch in batches
    ]
    ratio_N = torch.cat(ratios).detach()
    assert figures["ratio_min"] == pytest.approx(float(ratio_N.min()), rel=1e-4)
    assert figures["ratio_max"] == pytest.approx(float(ratio_N.max()), rel=1e-4)
    assert 0 < figures["clip_fraction"] < 1


def test_groups_without_spread_move_the_policy_only_by_kl() -> None:
    """With all advantages zero and no KL term the gradient is exactly zero."""
    checkpoint = tiny.checkpoint()
    batches = tiny.batches(_sequences(checkpoint), 100)
    figures = update(
        grpo_config(kl_coefficient=0.0),
        _engine(checkpoint),
        _drifted(checkpoint, 0.02),
        batches,
        torch.zeros(6),
        1e-3,
    )
    assert figures["gradient_norm"] == 0.0
    assert figures["kl"] > 0
