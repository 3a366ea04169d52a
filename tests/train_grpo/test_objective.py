import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from components.train_grpo.config import AdvantageEstimator, ClipConfig, CorrectionConfig, KLEstimator, LossConfig
from components.train_grpo.corrections import importance_weights
from components.train_grpo.objective import (
    Tokens,
    advantages,
    beyond_clip,
    has_spread,
    kl_to_reference,
    policy_objective,
    policy_ratio,
    token_advantages,
)

NAN = math.nan
ESTIMATORS: tuple[AdvantageEstimator, ...] = get_args(AdvantageEstimator)
EIGHTHS = st.integers(-800, 800).map(lambda number: number / 8)
"""Rewards that are equal or far apart, and exact in binary."""
ROLLOUTS = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(EIGHTHS | st.just(NAN), min_size=size, max_size=size), min_size=1, max_size=4)
)


def _advantages(estimator: AdvantageEstimator, *rewards_PK: Sequence[float]) -> list[list[float]]:
    result: list[list[float]] = advantages(torch.tensor(rewards_PK, dtype=torch.float64), estimator).tolist()
    return result


_FORMULAS: dict[str, Callable[[float, list[float], list[float]], float]] = {
    "z_score": lambda reward, group, _: (reward - statistics.fmean(group)) / statistics.pstdev(group),
    "z_score_bessel": lambda reward, group, _: (reward - statistics.fmean(group)) / statistics.stdev(group),
    "mean_only": lambda reward, group, _: reward - statistics.fmean(group),
    "leave_one_out": lambda reward, group, _: reward - (sum(group) - reward) / (len(group) - 1),
    "batch_std": lambda reward, group, all_: (reward - statistics.fmean(group)) / statistics.pstdev(all_),
    "mean_scaled": lambda reward, group, _: (
        reward / statistics.fmean(group) - 1 if statistics.fmean(group) > 0 else 0.0
    ),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rewards_PK=ROLLOUTS)
def test_every_estimator_is_its_formula(estimator: AdvantageEstimator, rewards_PK: list[list[float]]) -> None:
    """For rewards of any kind, with some missing, it equals the standard library's statistics reward by reward."""
    everything = [reward for group in rewards_PK for reward in group if not math.isnan(reward)]
    for rewards, result in zip(rewards_PK, _advantages(estimator, *rewards_PK), strict=True):
        group = [reward for reward in rewards if not math.isnan(reward)]
        for reward, advantage in zip(rewards, result, strict=True):
            if math.isnan(reward) or len(set(group)) == 1:
                assert advantage == 0.0
            else:
                assert advantage == pytest.approx(_FORMULAS[estimator](reward, group, everything), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("group", [(0, 0, 0), (0.1 + 0.2, 0.3, 0.3), (1e8, 1e8, 1e8), (NAN, 0.1 + 0.2, 0.3)])
def test_a_zero_variance_group_has_advantage_exactly_zero(
    estimator: AdvantageEstimator, group: tuple[float, ...]
) -> None:
    """All right, all wrong, or different only by rounding: not even noise, whatever the other groups are."""
    assert _advantages(estimator, group) == [[0.0, 0.0, 0.0]]
    assert _advantages(estimator, group, (1, 0, 0))[0] == [0.0, 0.0, 0.0]


def test_spread_is_decided_by_the_rewards_themselves() -> None:
    """Differences below a millionth are rounding; missing rewards are no difference, nor is nothing at all."""
    groups = [[1, 1 + 5e-7, 1], [1, 1 + 2e-6, 1], [0, 1, NAN], [1, NAN, 1], [-1, NAN, -1], [NAN] * 3, [NAN, 1, NAN]]
    result = has_spread(torch.tensor(groups, dtype=torch.float64))
    assert result.tolist() == [False, True, True, False, False, False, False]


@given(data=st.data())
def test_token_advantages_are_the_double_loop_over_tokens_and_steps(data: st.DataObject) -> None:
    """Section 4.1.3, token by token and step by step, for any groups, completions and steps."""
    lengths = st.lists(st.integers(1, 8), min_size=2, max_size=2)
    num_tokens_PG = data.draw(st.lists(lengths, min_size=1, max_size=3))
    ends_PG = [
        [sorted(data.draw(st.sets(st.integers(1, length), min_size=1))) for length in num_tokens_G]
        for num_tokens_G in num_tokens_PG
    ]
    num_steps = max(sum(map(len, ends_G)) for ends_G in ends_PG)
    advantages_PK = [data.draw(st.lists(EIGHTHS, min_size=num_steps, max_size=num_steps)) for _ in ends_PG]
    expected = []
    for advantages_K, ends_G, num_tokens_G in zip(advantages_PK, ends_PG, num_tokens_PG, strict=True):
        values = iter(advantages_K)
        for ends, num_tokens in zip(ends_G, num_tokens_G, strict=True):
            steps = [(end, next(values)) for end in ends]
            expected += [sum(value for end, value in steps if end - 1 >= token) for token in range(num_tokens)]
    result = token_advantages(torch.tensor(advantages_PK, dtype=torch.float64), ends_PG, num_tokens_PG)
    assert result.tolist() == expected


# Sequences 2 and 0 of an optimizer step of four, the tokens of each in turn as in a micro-batch.
SEQUENCE_N = torch.tensor([2, 2, 2, 0, 0])
NUM_TOKENS_B = torch.tensor([2, 7, 3, 1])


def _tokens(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor | None = None) -> Tokens:
    """Tokens of the sequences above; of more than these, each is a completion by itself."""
    zero_N, number_N = torch.zeros_like(old_N), torch.arange(len(old_N))
    sequence_N, num_tokens_B = (SEQUENCE_N, NUM_TOKENS_B) if len(old_N) == 5 else (number_N, torch.ones_like(number_N))
    advantages_N = zero_N if advantages_N is None else advantages_N
    return Tokens(logprobs_N, old_N, old_N, None, zero_N, advantages_N, sequence_N, num_tokens_B)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_is_exactly_one_on_policy_and_never_overflows(level: Literal["token", "sequence"]) -> None:
    """Without rounding, in float32 as well; log-ratios of ten thousand stay finite, in the order they had."""
    logprobs = torch.log_softmax(torch.randn(5, generator=torch.manual_seed(1)), 0)
    assert policy_ratio(_tokens(logprobs, logprobs), level).tolist() == [1.0] * 5
    result = policy_ratio(_tokens(torch.tensor([1e4, 1e4, 1e4, -1e4, -1e4]), torch.zeros(5)), level)
    assert bool(result.isfinite().all())
    assert float(result[0]) > 1e6
    assert 0 < float(result[-1]) < 1e-6


@pytest.mark.parametrize("clip", [ClipConfig(low=0.2, high=0.2), ClipConfig(low=0.4, high=0.1)])
def test_the_gradient_of_the_surrogate_is_zero_exactly_where_a_token_is_clipped(clip: ClipConfig) -> None:
    """Over a grid of ratios and advantages it is the advantage itself everywhere else; never both sides at once."""
    ratios = torch.linspace(0.013, 4.0, 400, dtype=torch.float64)
    ratio_N, advantages_N = torch.cartesian_prod(ratios, torch.tensor([-2.0, -0.3, 0.3, 2.0], dtype=torch.float64)).T
    tokens = _tokens(ratio_N.log(), torch.zeros_like(ratio_N), advantages_N)
    ratio_N, loss = ratio_N.clone().requires_grad_(), LossConfig(clip=clip)
    (gradient_N,) = torch.autograd.grad(policy_objective(tokens, ratio_N, loss).sum(), ratio_N)
    high_N, low_N = beyond_clip(loss, tokens, ratio_N)
    assert gradient_N.tolist() == torch.where(high_N | low_N, 0.0, advantages_N).tolist()
    assert not bool((high_N & low_N).any())
    assert bool(high_N.any())
    assert bool(low_N.any())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_is_finite_and_has_no_gradient(level: str) -> None:
    """Whatever the distance to the sampler; only the policy under training is differentiated by."""
    old_N = torch.tensor([0, -1e4, -1, 0, 0]).double().requires_grad_()
    values = {"weight": {"level": level, "max": None}, "mask": {"level": "geometric"}}
    for distance in (-1e4, 1e4):
        tokens = replace(_tokens(old_N, old_N), sampler_logprobs_N=old_N.detach() + distance)
        weight_N = importance_weights(tokens, CorrectionConfig.model_validate(values))
        assert weight_N is not None
        assert bool(weight_N.isfinite().all())
        assert not weight_N.requires_grad


def test_a_small_drift_is_not_lost_in_rounding() -> None:
    """In float32, k3 of a log-ratio of a thousandth is x^2 / 2 + x^3 / 6 to three digits."""
    x = torch.tensor([1e-3, -1e-3], dtype=torch.float32)
    k3 = kl_to_reference(torch.zeros_like(x), x, torch.ones_like(x), "k3")
    assert k3.tolist() == pytest.approx([5e-7 + 1e-9 / 6, 5e-7 - 1e-9 / 6], rel=1e-3)


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
@pytest.mark.parametrize("log_ratio", [-1e4, -25.0, 25.0, 1e4])
def test_an_outlier_has_a_finite_penalty_that_pulls_towards_the_reference(
    estimator: KLEstimator, log_ratio: float
) -> None:
    """In float32: a token that the reference finds likelier is made no less likely by k3, and vice versa."""
    logprobs = torch.tensor([-1e4 if log_ratio > 0 else -1.0]).requires_grad_()
    estimate = kl_to_reference(logprobs, logprobs.detach() + log_ratio, torch.ones(1), estimator).sum()
    (gradient,) = torch.autograd.grad(estimate, logprobs)
    assert math.isfinite(estimate.detach())
    assert math.isfinite(gradient)
    if estimator == "k3":
        assert estimate > 0
        assert gradient <= 0 if log_ratio > 0 else gradient > 0
