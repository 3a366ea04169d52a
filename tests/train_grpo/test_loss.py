import itertools

import pytest
import torch
from torch import Tensor

from components.train_grpo.config import ClipConfig
from components.train_grpo.kl import k3
from components.train_grpo.loss import clipped_high, clipped_low, clipped_surrogate

PAPER = ClipConfig(low=0.2, high=0.2)
HIGHER = ClipConfig(low=0.2, high=0.5)
LOWER = ClipConfig(low=0.4, high=0.1)
DUAL = ClipConfig(low=0.2, high=0.3, dual=3.0)
DUAL_WITHIN = ClipConfig(low=0.2, high=2.0, dual=1.5)
CONFIGS = [PAPER, HIGHER, LOWER, DUAL, DUAL_WITHIN]


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("clip", "ratio", "advantage", "value", "stopped"),
    [
        (PAPER, 1.0, 2.0, 2.0, ""),
        (PAPER, 1.1, 2.0, 2.2, ""),
        (PAPER, 1.5, 2.0, 2.4, "high"),
        (PAPER, 0.5, 2.0, 1.0, ""),
        (PAPER, 1.0, -2.0, -2.0, ""),
        (PAPER, 1.5, -2.0, -3.0, ""),
        (PAPER, 0.9, -2.0, -1.8, ""),
        (PAPER, 0.5, -2.0, -1.6, "low"),
        (PAPER, 50.0, -2.0, -100.0, ""),
        (PAPER, 1.5, 0.0, 0.0, ""),
        (PAPER, 0.5, 0.0, 0.0, ""),
        (HIGHER, 1.4, 2.0, 2.8, ""),
        (HIGHER, 1.6, 2.0, 3.0, "high"),
        (HIGHER, 0.7, -2.0, -1.6, "low"),
        (LOWER, 1.2, 2.0, 2.2, "high"),
        (LOWER, 0.7, -2.0, -1.4, ""),
        (LOWER, 0.5, -2.0, -1.2, "low"),
        (DUAL, 2.9, -2.0, -5.8, ""),
        (DUAL, 3.1, -2.0, -6.0, "low"),
        (DUAL, 50.0, -2.0, -6.0, "low"),
        (DUAL, 0.5, -2.0, -1.6, "low"),
        (DUAL, 50.0, 2.0, 2.6, "high"),
        (DUAL, 0.1, 2.0, 0.2, ""),
        (DUAL_WITHIN, 1.4, -2.0, -2.8, ""),
        (DUAL_WITHIN, 2.5, -2.0, -3.0, "low"),
        (DUAL_WITHIN, 2.5, 2.0, 5.0, ""),
    ],
)
def test_the_clip_limits_gains_and_with_a_dual_clip_losses(
    clip: ClipConfig, ratio: float, advantage: float, value: float, stopped: str
) -> None:
    """The truth table of the surrogate by hand, and on which side its gradient is stopped."""
    arguments = (_tensor(ratio), _tensor(advantage), clip)
    assert clipped_surrogate(*arguments).tolist() == pytest.approx([value], rel=1e-12)
    assert clipped_high(*arguments).tolist() == [stopped == "high"]
    assert clipped_low(*arguments).tolist() == [stopped == "low"]


@pytest.mark.parametrize("clip", CONFIGS)
def test_the_gradient_is_zero_exactly_where_a_token_is_said_to_be_clipped(clip: ClipConfig) -> None:
    """Over a grid of ratios and advantages it is the advantage itself everywhere else; never both sides at once."""
    ratios = torch.linspace(0.013, 4.0, 400, dtype=torch.float64).tolist()
    pairs = list(itertools.product(ratios, [-2.0, -0.3, 0.3, 2.0]))
    ratio_N = _tensor(*(ratio for ratio, _ in pairs)).requires_grad_()
    advantages_N = _tensor(*(advantage for _, advantage in pairs))
    (gradient_N,) = torch.autograd.grad(clipped_surrogate(ratio_N, advantages_N, clip).sum(), ratio_N)
    high_N, low_N = clipped_high(ratio_N, advantages_N, clip), clipped_low(ratio_N, advantages_N, clip)
    assert (gradient_N == 0).tolist() == (high_N | low_N).tolist()
    assert gradient_N.tolist() == torch.where(high_N | low_N, 0.0, advantages_N).tolist()
    assert not bool((high_N & low_N).any())
    assert bool(high_N.any())
    assert bool(low_N.any())


@pytest.mark.parametrize("clip", [PAPER, HIGHER, LOWER])
def test_the_bounds_themselves_are_not_clipped(clip: ClipConfig) -> None:
    """At a ratio of exactly 1 - low or 1 + high the gradient is still the advantage, in float32 as well."""
    for dtype in (torch.float32, torch.float64):
        ratio_N = torch.tensor([1 - clip.low, 1 + clip.high], dtype=dtype).requires_grad_()
        advantages_N = torch.tensor([-1.0, 1.0], dtype=dtype)
        (gradient_N,) = torch.autograd.grad(clipped_surrogate(ratio_N, advantages_N, clip).sum(), ratio_N)
        assert gradient_N.tolist() == advantages_N.tolist()
        assert clipped_high(ratio_N, advantages_N, clip).tolist() == [False, False]
        assert clipped_low(ratio_N, advantages_N, clip).tolist() == [False, False]


def test_an_advantage_of_zero_teaches_nothing_and_is_not_called_clipped() -> None:
    """Its gradient is zero at every ratio, but not because of the clip."""
    ratio_N = _tensor(0.1, 1.0, 1.3, 9.0).requires_grad_()
    nothing_N = torch.zeros(4, dtype=torch.float64)
    (gradient_N,) = torch.autograd.grad(clipped_surrogate(ratio_N, nothing_N, DUAL).sum(), ratio_N)
    assert gradient_N.tolist() == [0.0] * 4
    assert not bool((clipped_high(ratio_N, nothing_N, DUAL) | clipped_low(ratio_N, nothing_N, DUAL)).any())


def _toy_policy() -> tuple[Tensor, Tensor, Tensor]:
    """The logits of five softmaxes, the log-probabilities of a token of each, and advantages of every sign."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.manual_seed(1)).requires_grad_()
    tokens = torch.tensor([0, 3, 6, 2, 2])
    logprobs = torch.log_softmax(logits, dim=1).gather(1, tokens[:, None]).squeeze(1)
    return logits, logprobs, _tensor(0.5, -1.0, 2.0, 0.0, -0.3)


@pytest.mark.parametrize("clip", CONFIGS)
def test_on_policy_the_surrogate_is_the_advantage_and_its_gradient_that_of_reinforce(clip: ClipConfig) -> None:
    """At ratio one its value is A and its gradient A * grad log pi, whatever the clip."""
    logits, logprobs, advantages = _toy_policy()
    surrogate = clipped_surrogate(torch.exp(logprobs - logprobs.detach()), advantages, clip)
    assert surrogate.tolist() == advantages.tolist()
    (found,) = torch.autograd.grad(surrogate.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((advantages * logprobs).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_coefficient_is_the_papers() -> None:
    """With the k3 penalty each token's grad log pi has the factor A + beta * (pi_ref / pi - 1) (appendix A.1.6)."""
    logits, logprobs, advantages = _toy_policy()
    reference, beta = _tensor(-1.0, -3.0, -0.1, -2.0, -1.5), 0.3
    surrogate = clipped_surrogate(torch.exp(logprobs - logprobs.detach()), advantages, PAPER)
    (found,) = torch.autograd.grad((surrogate - beta * k3(reference - logprobs)).sum(), logits, retain_graph=True)
    coefficient = (advantages + beta * (torch.exp(reference - logprobs) - 1)).detach()
    (expected,) = torch.autograd.grad((coefficient * logprobs).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
