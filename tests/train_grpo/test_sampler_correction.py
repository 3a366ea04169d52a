import math

import pytest
import torch
from torch import Tensor

from components.shared.errors import PipelineError
from components.train_grpo.sampler_correction import (
    SamplerMismatchError,
    importance_weights,
    mismatch,
    refuse_mismatch,
)


def _logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


OLD, SAMPLER = _logs(0.5, 0.2, 0.9, 0.1), _logs(0.25, 0.4, 0.9, 0.01)


def test_the_weights_are_those_of_the_trainer_over_the_sampler_up_to_the_bound() -> None:
    """By hand: 0.5 / 0.25, 0.2 / 0.4, one, and ten of which three are left."""
    assert importance_weights(OLD, SAMPLER, maximum=3).tolist() == pytest.approx([2, 0.5, 1, 3], rel=1e-12)
    assert importance_weights(OLD, SAMPLER, maximum=1).tolist() == pytest.approx([1, 0.5, 1, 1], rel=1e-12)


def test_an_impossible_token_weighs_the_bound() -> None:
    """A sampler that says it was all but impossible overflows nothing."""
    assert importance_weights(torch.zeros(1), torch.full((1,), -1e4), maximum=2).tolist() == [2.0]


def test_the_weighted_mean_over_the_samplers_draws_is_that_over_the_trainers() -> None:
    """Without reaching the bound, sum pi_sampler * weight * f equals sum pi_old * f over all outcomes."""
    generator = torch.manual_seed(5)
    old, sampler = (torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(0) for _ in range(2))
    values = torch.randn(6, dtype=torch.float64, generator=generator)
    weighted = (sampler.exp() * importance_weights(old, sampler, maximum=1e6) * values).sum()
    torch.testing.assert_close(weighted, (old.exp() * values).sum(), rtol=1e-12, atol=1e-12)


def test_the_mismatch_is_the_distance_of_the_log_probabilities() -> None:
    """In nats per token, whichever is larger."""
    assert mismatch(OLD, SAMPLER).tolist() == pytest.approx([math.log(2), math.log(2), 0, math.log(10)], rel=1e-12)


@pytest.mark.parametrize("mean", [0.0011, 5.0, math.inf, math.nan])
def test_a_sampler_that_draws_from_something_else_stops_the_run(mean: float) -> None:
    """A mismatch above the bound is an error that names the key, and so is one that is not a number."""
    with pytest.raises(SamplerMismatchError, match=r"sampler\.max_mismatch = 0\.001"):
        refuse_mismatch(mean, maximum=0.001)
    assert issubclass(SamplerMismatchError, PipelineError)


@pytest.mark.parametrize("mean", [0.0, 0.001])
def test_a_mismatch_up_to_the_bound_goes_on(mean: float) -> None:
    """The bound itself is still accepted."""
    refuse_mismatch(mean, maximum=0.001)
