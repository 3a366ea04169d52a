import math

import pytest
import torch

from components.train_grpo.loss import clipped_surrogate, is_clipped, kl_to_reference, sequence_mean_weights


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_clip_limits_gains_and_never_losses() -> None:
    """By hand, epsilon 0.2: min(ratio * A, clip(ratio) * A)."""
    ratio, advantages = _tensor(1.0, 1.5, 0.5, 1.5, 0.5), _tensor(2.0, 2.0, 2.0, -2.0, -2.0)
    assert clipped_surrogate(ratio, advantages, clip_range=0.2).tolist() == pytest.approx([2.0, 2.4, 1.0, -3.0, -1.6])


def test_a_token_is_clipped_only_where_its_gradient_stops() -> None:
    """The tokens said to be clipped are those whose surrogate does not move with the ratio."""
    ratio = _tensor(1.0, 1.5, 0.5, 1.5, 0.5, 1.1).requires_grad_()
    advantages = _tensor(2.0, 2.0, 2.0, -2.0, -2.0, 2.0)
    (gradient,) = torch.autograd.grad(clipped_surrogate(ratio, advantages, clip_range=0.2).sum(), ratio)
    assert is_clipped(ratio, advantages, clip_range=0.2).tolist() == (gradient == 0).tolist()
    assert is_clipped(ratio, advantages, clip_range=0.2).tolist() == [False, True, False, False, True, False]


def test_the_on_policy_gradient_is_the_advantage_times_that_of_the_log_probability() -> None:
    """At ratio one the clipped surrogate is REINFORCE with the advantage as its weight."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.manual_seed(1)).requires_grad_()
    tokens, advantages = torch.tensor([0, 3, 6, 2, 2]), _tensor(0.5, -1.0, 2.0, 0.0, -0.3)
    logprobs = torch.log_softmax(logits, dim=1).gather(1, tokens[:, None]).squeeze(1)
    surrogate = clipped_surrogate(torch.exp(logprobs - logprobs.detach()), advantages, clip_range=0.2)
    (found,) = torch.autograd.grad(surrogate.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((advantages * logprobs).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_kl_by_hand() -> None:
    """Pi = 1/4 and pi_ref = 1/2 give 2 - log 2 - 1; equal probabilities give exactly zero."""
    logprobs, reference = _tensor(math.log(0.25), -3.0), _tensor(math.log(0.5), -3.0)
    assert kl_to_reference(logprobs, reference).tolist() == pytest.approx([1 - math.log(2), 0.0])
    assert kl_to_reference(logprobs, reference)[1] == 0.0


def test_kl_is_never_negative_and_its_mean_is_the_divergence() -> None:
    """Summed over a whole vocabulary under pi, the estimator is KL(pi || pi_ref) exactly."""
    generator = torch.manual_seed(2)
    logprobs, reference = (
        torch.log_softmax(2 * torch.randn(50, dtype=torch.float64, generator=generator), dim=0) for _ in range(2)
    )
    estimates = kl_to_reference(logprobs, reference)
    assert bool((estimates >= 0).all())
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    assert float((logprobs.exp() * estimates).sum()) == pytest.approx(float(exact), rel=1e-12)


def test_the_gradient_of_kl_is_the_papers_coefficient() -> None:
    """d/dlogpi of the estimator is 1 - pi_ref / pi: as a penalty it adds beta * (pi_ref / pi - 1) to the weight."""
    logprobs = _tensor(-1.0, -2.0, -0.5).requires_grad_()
    reference = _tensor(-1.5, -1.0, -0.5)
    (gradient,) = torch.autograd.grad(kl_to_reference(logprobs, reference).sum(), logprobs)
    torch.testing.assert_close(gradient, 1 - torch.exp(reference - logprobs.detach()), rtol=1e-12, atol=1e-12)


def test_weights_make_the_mean_of_the_sequences_means() -> None:
    """Short and long completions count alike: 1/B * sum over sequences of 1/|o| * sum over tokens."""
    weights = sequence_mean_weights(_tensor(1, 4))
    assert weights.tolist() == [0.5, 0.125]
    losses = [[3.0], [1.0, 2.0, 3.0, 6.0]]
    total = sum(float(weight) * sum(tokens) for weight, tokens in zip(weights, losses, strict=True))
    assert total == pytest.approx((3.0 + 3.0) / 2)
