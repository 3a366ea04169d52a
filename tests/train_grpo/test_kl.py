import math

import pytest
import torch
from torch import Tensor

from components.train_grpo.config import KLEstimator
from components.train_grpo.kl import k1, k2, k3, kl_to_reference

ESTIMATORS = list(KLEstimator)


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _logits(seed: int) -> Tensor:
    """The logits of a policy over seven outcomes."""
    return torch.randn(7, dtype=torch.float64, generator=torch.manual_seed(seed))


def _divergence(logprobs: Tensor, others: Tensor) -> Tensor:
    """KL(p || q), summed over all outcomes."""
    return (logprobs.exp() * (logprobs - others)).sum()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", -math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 1 - math.log(2)),
        ("k3_corrected", 3 - 3 * math.log(2)),
    ],
)
def test_the_estimators_by_hand(estimator: str, expected: float) -> None:
    """Pi = 1/4, pi_ref = 1/2 and pi / pi_old = 3; where pi is pi_ref, every estimate is exactly zero."""
    found = kl_to_reference(
        _tensor(math.log(0.25), -3.0), _tensor(math.log(0.5), -3.0), _tensor(3.0, 3.0), KLEstimator(estimator)
    )
    assert found.tolist() == [pytest.approx(expected, rel=1e-12), 0.0]


def test_the_mean_of_k1_and_k3_is_the_divergence() -> None:
    """Summed over all outcomes under pi; k2 is close to it for a reference nearby, and k2 and k3 are never negative."""
    logprobs, reference = (_logits(seed).log_softmax(0) for seed in (1, 2))
    exact = float(_divergence(logprobs, reference))
    for estimate in (k1, k3):
        assert float((logprobs.exp() * estimate(reference - logprobs)).sum()) == pytest.approx(exact, rel=1e-12)
    near = (_logits(1) + 0.01 * _logits(2)).log_softmax(0)
    assert float((logprobs.exp() * k2(near - logprobs)).sum()) == pytest.approx(
        float(_divergence(logprobs, near)), rel=0.02
    )
    assert all(bool((estimate(reference - logprobs) >= 0).all()) for estimate in (k2, k3))


def _expected_gradient(estimator: KLEstimator, sampling: Tensor | None = None) -> Tensor:
    """The gradient of an estimate in the logits of pi, in the mean over all outcomes under the sampling policy."""
    logits = _logits(1).requires_grad_()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if sampling is None else sampling
    estimates = kl_to_reference(logprobs, _logits(2).log_softmax(0), (logprobs - old).exp(), estimator)
    (gradient,) = torch.autograd.grad((old.exp() * estimates).sum(), logits)
    return gradient


def _gradient_of_divergence(*, reverse: bool = False) -> Tensor:
    """That of KL(pi || pi_ref), or with `reverse` of KL(pi_ref || pi), by differentiating the exact sum."""
    logits, reference = _logits(1).requires_grad_(), _logits(2).log_softmax(0)
    pair = (reference, logits.log_softmax(0)) if reverse else (logits.log_softmax(0), reference)
    (gradient,) = torch.autograd.grad(_divergence(*pair), logits)
    return gradient


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", torch.zeros(7, dtype=torch.float64)),
        ("k2", _gradient_of_divergence()),
        ("k3", _gradient_of_divergence(reverse=True)),
        ("k3_corrected", _gradient_of_divergence()),
    ],
)
def test_the_mean_gradient_of_each_estimator_is_the_one_it_claims(estimator: str, expected: Tensor) -> None:
    """None for k1, KL(pi || pi_ref) for k2 and the corrected k3, and KL(pi_ref || pi) for k3 itself."""
    found = _expected_gradient(KLEstimator(estimator))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(_gradient_of_divergence(), _gradient_of_divergence(reverse=True), rtol=0.1)


def test_the_corrected_k3_is_right_off_policy_too() -> None:
    """Drawn from another policy than the one that is trained, its mean gradient is still that of KL(pi || pi_ref)."""
    sampling = _logits(3).log_softmax(0)
    found = _expected_gradient(KLEstimator.K3_CORRECTED, sampling)
    torch.testing.assert_close(found, _gradient_of_divergence(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(_expected_gradient(KLEstimator.K2, sampling), _gradient_of_divergence(), rtol=0.1)


def test_the_gradient_of_k3_is_the_papers_coefficient() -> None:
    """d/dlogpi of the estimator is 1 - pi_ref / pi: as a penalty it adds beta * (pi_ref / pi - 1) to the weight."""
    logprobs = _tensor(-1.0, -2.0, -0.5).requires_grad_()
    reference = _tensor(-1.5, -1.0, -0.5)
    (gradient,) = torch.autograd.grad(k3(reference - logprobs).sum(), logprobs)
    torch.testing.assert_close(gradient, 1 - torch.exp(reference - logprobs.detach()), rtol=1e-12, atol=1e-12)


def test_a_small_drift_is_not_lost_in_rounding() -> None:
    """In float32, k3 of a log-ratio of a thousandth is x^2 / 2 + x^3 / 6 to three digits."""
    x = torch.tensor([1e-3, -1e-3], dtype=torch.float32)
    assert k3(x).tolist() == pytest.approx([5e-7 + 1e-9 / 6, 5e-7 - 1e-9 / 6], rel=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -25.0, 25.0, 100.0, 1e4])
def test_an_outlier_breaks_no_sum(estimator: KLEstimator, log_ratio: float) -> None:
    """A token that the policy or the reference all but excludes has a finite estimate with a finite gradient."""
    estimate, gradient = _outlier(estimator, log_ratio)
    assert math.isfinite(estimate)
    assert math.isfinite(gradient)


@pytest.mark.parametrize("estimator", [KLEstimator.K2, KLEstimator.K3])
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -25.0, 25.0, 100.0, 1e4])
def test_an_outlier_is_never_pushed_away_from_the_reference(estimator: KLEstimator, log_ratio: float) -> None:
    """A token that the reference finds likelier is made no less likely by the penalty, and the other way round."""
    estimate, gradient = _outlier(estimator, log_ratio)
    assert estimate > 0
    assert gradient <= 0 if log_ratio > 0 else gradient > 0


def _outlier(estimator: KLEstimator, log_ratio: float) -> tuple[float, float]:
    """An estimate and its gradient in the log-probability, in float32."""
    logprobs = torch.tensor([-1e4 if log_ratio > 0 else -1.0]).requires_grad_()
    estimate = kl_to_reference(logprobs, logprobs.detach() + log_ratio, torch.ones(1), estimator).sum()
    (gradient,) = torch.autograd.grad(estimate, logprobs)
    return float(estimate.detach()), float(gradient)
