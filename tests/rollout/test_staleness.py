import pytest
import torch

from components.rollout.vllm.verification import StaleWeightsError, verify_logprobs

GENERATOR = torch.Generator().manual_seed(3)
NEW_M = -2 * torch.rand(100, dtype=torch.float64, generator=GENERATOR)
STEP_M = 1e-4 * torch.randn(100, dtype=torch.float64, generator=GENERATOR)
NOISE_M = torch.randn(100, dtype=torch.float64, generator=GENERATOR)


def _refuse(sampler_M: torch.Tensor, old_M: torch.Tensor | None = None, *, max_mismatch: float = 0.01) -> None:
    verify_logprobs(sampler_M, NEW_M, old_M, max_mismatch=max_mismatch, name="vLLM at http://x")


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4, 5e-3])
def test_a_sampler_that_has_the_weights_passes(noise: float) -> None:
    """Whatever its rounding, below or far above what a step moves."""
    _refuse(NEW_M + noise * NOISE_M, NEW_M + STEP_M)
    _refuse(NEW_M + noise * NOISE_M)


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_that_happens_to_point_to_the_old_weights_is_no_proof(sign: int) -> None:
    """Rounding fifty times a step lies beyond the old weights one way or the other; only its direction tells it."""
    rounding_M = sign * 5e-3 * NOISE_M
    assert abs(float(rounding_M @ STEP_M)) > float(STEP_M @ STEP_M), "the test wants rounding that reaches that far"
    _refuse(NEW_M + rounding_M, NEW_M + STEP_M)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 5e-5, 1e-4])
def test_the_weights_before_a_small_step_are_found_out(noise: float) -> None:
    """Though they differ by a hundredth of what a sampler may differ, and rounding by as much as the step."""
    with pytest.raises(StaleWeightsError, match="http://x still samples from the weights before the last update"):
        _refuse(NEW_M + STEP_M + noise * NOISE_M, NEW_M + STEP_M)


@pytest.mark.parametrize("difference", [0.02, float("nan"), float("inf")])
def test_other_weights_are_found_out(difference: float) -> None:
    """By their distance, and where it is not a number as well."""
    with pytest.raises(StaleWeightsError, match=r"max_mismatch = 0\.01"):
        _refuse(NEW_M + difference)


def test_a_step_that_moved_nothing_leaves_nothing_to_find() -> None:
    """Old and new are the same then."""
    _refuse(NEW_M + 1e-6 * NOISE_M, NEW_M)
    _refuse(NEW_M, NEW_M)
