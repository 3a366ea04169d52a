import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from components.train_grpo.config import (
    AdvantageEstimator,
    Aggregation,
    ClipConfig,
    CorrectionConfig,
    ImportanceMaskConfig,
    KLEstimator,
    LossConfig,
    PolicyLoss,
)
from components.train_grpo.objective import (
    Tokens,
    advantages,
    clipped_high,
    clipped_low,
    has_spread,
    importance_weights,
    is_within_mask,
    kl_to_reference,
    policy_objective,
    policy_ratio,
    token_advantages,
    token_weights,
)

NAN = math.nan
ESTIMATORS: tuple[AdvantageEstimator, ...] = get_args(AdvantageEstimator)
EIGHTHS = st.integers(-800, 800).map(lambda number: number / 8)
"""Rewards that are equal or far apart, and exact in binary."""
ROLLOUTS = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(EIGHTHS | st.just(NAN), min_size=size, max_size=size), min_size=1, max_size=4)
)


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Advantages -----------------------------------------------------------------------------------------------------------


def _advantages(estimator: AdvantageEstimator, *rewards_PK: Sequence[float]) -> list[list[float]]:
    result: list[list[float]] = advantages(torch.tensor(rewards_PK, dtype=torch.float64), estimator).tolist()
    return result


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        ("z_score", 1 / math.sqrt(3), -math.sqrt(3)),
        ("z_score_bessel", 0.5, -1.5),
        ("mean_only", 0.25, -0.75),
        ("leave_one_out", 1 / 3, -1.0),
        ("batch_std", 1 / math.sqrt(3), -math.sqrt(3)),
        ("mean_scaled", 1 / 3, -1.0),
    ],
)
def test_advantages_of_three_right_and_one_wrong_answer(
    estimator: AdvantageEstimator, right: float, wrong: float
) -> None:
    """The worked example: mean 3/4, deviation 0.433 biased and 1/2 unbiased; the others' means are 2/3 and 1."""
    (result,) = _advantages(estimator, [1, 1, 1, 0])
    assert result == pytest.approx([right] * 3 + [wrong], rel=1e-12)


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
@pytest.mark.parametrize(
    "group", [(1, 1, 1), (0, 0, 0), (0.1 + 0.2, 0.3, 0.3), (1e8, 1e8, 1e8), (0.1, 0.1, 0.1), (NAN, 0.1 + 0.2, 0.3)]
)
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


# The ratio to the policy that sampled ---------------------------------------------------------------------------------

# Sequences 2 and 0 of an optimizer step of four, the tokens of each in turn as in a micro-batch.
SEQUENCE_N = torch.tensor([2, 2, 2, 0, 0])
NUM_TOKENS_B = torch.tensor([2, 7, 3, 1])


Level = Literal["token", "sequence"]


def _ratio(logprobs_N: Tensor, old_N: Tensor, level: Level) -> Tensor:
    zero_N = torch.zeros_like(logprobs_N)
    return policy_ratio(Tokens(logprobs_N, old_N, old_N, None, zero_N, zero_N, SEQUENCE_N, NUM_TOKENS_B), level)


def test_ratios_by_hand() -> None:
    """Of tokens 1, 2, 4 and 1/4, 1; of their sequences the geometric means: 8^(1/3) = 2 and (1/4)^(1/2) = 1/2."""
    logprobs_N, old_N = _tensor(1, 2, 4, 0.25, 1).log() - 1, _tensor(1, 1, 1, 1, 1).log() - 1
    assert _ratio(logprobs_N, old_N, "token").tolist() == pytest.approx([1, 2, 4, 0.25, 1], rel=1e-12)
    assert _ratio(logprobs_N, old_N, "sequence").tolist() == pytest.approx([2.0] * 3 + [0.5] * 2, rel=1e-12)


def test_the_gradient_of_a_sequences_ratio_is_spread_over_its_tokens() -> None:
    """Each token's log-probability moves the ratio of its sequence by ratio / |o|, and no other; a token's its own."""
    log_ratio = _tensor(0.3, -0.2, 0.5, -0.4, 0.1).requires_grad_()
    zero_N = torch.zeros_like(log_ratio)
    ratio_N = _ratio(log_ratio, zero_N, "sequence")
    for token in range(5):
        (gradient,) = torch.autograd.grad(ratio_N[token], log_ratio, retain_graph=True)
        same = SEQUENCE_N.eq(SEQUENCE_N[token]).double()
        torch.testing.assert_close(gradient, same * ratio_N[token].detach() / same.sum(), rtol=1e-12, atol=1e-12)
    jacobian = torch.autograd.functional.jacobian(lambda logprobs_N: _ratio(logprobs_N, zero_N, "token"), log_ratio)
    torch.testing.assert_close(jacobian, torch.diag(log_ratio.detach().exp()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", get_args(Level))
def test_a_ratio_is_exactly_one_on_policy_and_never_overflows(level: Level) -> None:
    """Without rounding, in float32 as well; log-ratios of ten thousand stay finite, in the order they had."""
    logprobs = torch.log_softmax(torch.randn(5, generator=torch.manual_seed(1)), 0)
    assert _ratio(logprobs, logprobs, level).tolist() == [1.0] * 5
    result = _ratio(torch.tensor([1e4, 1e4, 1e4, -1e4, -1e4]), torch.zeros(5), level)
    assert bool(result.isfinite().all())
    assert float(result[0]) > 1e6
    assert 0 < float(result[-1]) < 1e-6


# The policy loss ------------------------------------------------------------------------------------------------------

PAPER = ClipConfig(low=0.2, high=0.2)
HIGHER = ClipConfig(low=0.2, high=0.5)
LOWER = ClipConfig(low=0.4, high=0.1)
DUAL = ClipConfig(low=0.2, high=0.3, dual=3.0)
DUAL_WITHIN = ClipConfig(low=0.2, high=2.0, dual=1.5)
CLIPS = [PAPER, HIGHER, LOWER, DUAL, DUAL_WITHIN]


def _surrogate(ratio_N: Tensor, advantages_N: Tensor, clip: ClipConfig) -> Tensor:
    return _objective(torch.zeros_like(ratio_N), ratio_N, advantages_N, LossConfig(clip=clip))


def _objective(logprobs_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, loss: LossConfig) -> Tensor:
    """The policy loss of tokens, each a completion of its own; what sampled them is the policy before the update."""
    zero_N, old_N = torch.zeros_like(ratio_N), logprobs_N.detach() - ratio_N.detach().log()
    number_N = torch.arange(len(ratio_N))
    tokens = Tokens(logprobs_N, old_N, old_N, None, zero_N, advantages_N, number_N, torch.ones_like(number_N))
    return policy_objective(tokens, ratio_N, loss)


@pytest.mark.parametrize(
    ("clip", "ratio", "advantage", "value", "clipped"),
    [
        (PAPER, 1.0, 2.0, 2.0, ""),
        (PAPER, 1.5, 2.0, 2.4, "high"),
        (PAPER, 0.5, 2.0, 1.0, ""),
        (PAPER, 1.0, -2.0, -2.0, ""),
        (PAPER, 1.5, -2.0, -3.0, ""),
        (PAPER, 0.5, -2.0, -1.6, "low"),
        (PAPER, 50.0, -2.0, -100.0, ""),
        (PAPER, 1.5, 0.0, 0.0, ""),
        (HIGHER, 1.4, 2.0, 2.8, ""),
        (HIGHER, 1.6, 2.0, 3.0, "high"),
        (LOWER, 1.2, 2.0, 2.2, "high"),
        (LOWER, 0.5, -2.0, -1.2, "low"),
        (DUAL, 2.9, -2.0, -5.8, ""),
        (DUAL, 3.1, -2.0, -6.0, "low"),
        (DUAL, 50.0, -2.0, -6.0, "low"),
        (DUAL, 50.0, 2.0, 2.6, "high"),
        (DUAL_WITHIN, 1.4, -2.0, -2.8, ""),
        (DUAL_WITHIN, 2.5, -2.0, -3.0, "low"),
        (DUAL_WITHIN, 2.5, 2.0, 5.0, ""),
    ],
)
def test_the_clip_limits_gains_and_with_a_dual_clip_losses(
    clip: ClipConfig, ratio: float, advantage: float, value: float, clipped: str
) -> None:
    """The truth table of the surrogate by hand, and on which side its gradient is stopped."""
    ratio_N, advantages_N = _tensor(ratio), _tensor(advantage)
    assert _surrogate(ratio_N, advantages_N, clip).tolist() == pytest.approx([value], rel=1e-12)
    assert clipped_high(ratio_N, advantages_N, clip).tolist() == [clipped == "high"]
    assert clipped_low(ratio_N, advantages_N, clip).tolist() == [clipped == "low"]


@pytest.mark.parametrize("clip", CLIPS)
def test_the_gradient_of_the_surrogate_is_zero_exactly_where_a_token_is_clipped(clip: ClipConfig) -> None:
    """Over a grid of ratios and advantages it is the advantage itself everywhere else; never both sides at once."""
    ratios = torch.linspace(0.013, 4.0, 400, dtype=torch.float64).tolist()
    pairs = list(itertools.product(ratios, [-2.0, -0.3, 0.3, 2.0]))
    ratio_N = _tensor(*(ratio for ratio, _ in pairs)).requires_grad_()
    advantages_N = _tensor(*(advantage for _, advantage in pairs))
    (gradient_N,) = torch.autograd.grad(_surrogate(ratio_N, advantages_N, clip).sum(), ratio_N)
    high_N, low_N = clipped_high(ratio_N, advantages_N, clip), clipped_low(ratio_N, advantages_N, clip)
    assert gradient_N.tolist() == torch.where(high_N | low_N, 0.0, advantages_N).tolist()
    assert not bool((high_N & low_N).any())
    assert bool(high_N.any())
    assert bool(low_N.any())


@pytest.mark.parametrize("clip", [PAPER, HIGHER, LOWER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bounds_themselves_are_not_clipped(clip: ClipConfig, dtype: torch.dtype) -> None:
    """At a ratio of exactly 1 - low or 1 + high the gradient is still the advantage."""
    ratio_N = torch.tensor([1 - clip.low, 1 + clip.high], dtype=dtype).requires_grad_()
    advantages_N = torch.tensor([-1.0, 1.0], dtype=dtype)
    (gradient_N,) = torch.autograd.grad(_surrogate(ratio_N, advantages_N, clip).sum(), ratio_N)
    assert gradient_N.tolist() == advantages_N.tolist()
    clipped_N = clipped_high(ratio_N, advantages_N, clip) | clipped_low(ratio_N, advantages_N, clip)
    assert clipped_N.tolist() == [False, False]


def _toy_policy() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of five softmaxes, the log-probabilities of a token of each, and advantages of every sign."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.manual_seed(1)).requires_grad_()
    tokens = torch.tensor([0, 3, 6, 2, 2])
    logprobs = torch.log_softmax(logits, dim=1).gather(1, tokens[:, None]).squeeze(1)
    return logits, logprobs, _tensor(0.5, -1.0, 2.0, 0.0, -0.3)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("policy_loss", get_args(PolicyLoss))
def test_on_policy_the_gradient_is_that_of_reinforce(policy_loss: PolicyLoss, clip: ClipConfig) -> None:
    """At ratio one it is A * grad log pi, whatever the loss and the clip; the surrogate's value is A."""
    loss = LossConfig(policy_loss=policy_loss, clip=ClipConfig(low=clip.low, high=clip.high))
    logits, logprobs, advantages = _toy_policy()
    ratio = torch.exp(logprobs - logprobs.detach())
    objective = _objective(logprobs, ratio, advantages, loss)
    (result,) = torch.autograd.grad(objective.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((advantages * logprobs).sum(), logits, retain_graph=True)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert _surrogate(ratio, advantages, clip).tolist() == advantages.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (1.1, 2.0, 1.1), (1.5, 2.0, 1.2), (0.5, 2.0, 0.8), (1.5, -2.0, 1.2), (0.5, -2.0, 0.8)],
)
def test_cispo_weighs_the_log_probability_by_the_clipped_ratio(ratio: float, advantage: float, weight: float) -> None:
    """By hand, MiniMax-M1 equations 4 and 5: value w * A * log pi, gradient w * A, also beyond the clip."""
    logprobs_N = _tensor(-0.7).requires_grad_()
    old_N = _tensor(-0.7) - math.log(ratio)
    ratio_N, loss = (logprobs_N - old_N).exp(), LossConfig(policy_loss="cispo", clip=PAPER)
    objective_N = _objective(logprobs_N, ratio_N, _tensor(advantage), loss)
    assert objective_N.tolist() == pytest.approx([weight * advantage * -0.7], rel=1e-12)
    (gradient_N,) = torch.autograd.grad(objective_N.sum(), logprobs_N)
    assert gradient_N.tolist() == pytest.approx([weight * advantage], rel=1e-12)


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.5, 2.0, 1.0), (0.5, 2.0, 1.0), (1.5, -2.0, 1.05)])
def test_sapo_fades_as_the_ratio_leaves_one(ratio: float, advantage: float, tau: float) -> None:
    """Its equation 6 by hand: 4 p (1 - p) is what is left of the gradient of ratio * A, p the sigmoid."""
    ratio_N, logprobs_N = _tensor(ratio).requires_grad_(), _tensor(-0.7)
    objective_N = _objective(logprobs_N, ratio_N, _tensor(advantage), LossConfig(policy_loss="sapo"))
    share = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert objective_N.tolist() == pytest.approx([4 / tau * share * advantage], rel=1e-12)
    (gradient_N,) = torch.autograd.grad(objective_N.sum(), ratio_N)
    assert gradient_N.tolist() == pytest.approx([4 * share * (1 - share) * advantage], rel=1e-12)


def test_gmpo_takes_the_geometric_mean_of_bounded_ratios() -> None:
    """Of ratios 2 and 1/2 with bounds 1.25 and 0.8: sqrt(1.25 / 2) for a good completion, sqrt(2 x 0.8) for a bad."""
    old_N, ratio_N = _tensor(-1.0, -1.0, -1.0, -1.0), _tensor(2.0, 0.5, 2.0, 0.5)
    sequence_N, number_B, advantages_N = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]), _tensor(1.0, 1.0, -1.0, -1.0)
    tokens = Tokens(old_N + ratio_N.log(), old_N, old_N, None, old_N, advantages_N, sequence_N, number_B)
    loss = LossConfig(policy_loss="gmpo", clip=ClipConfig(low=0.2, high=0.25))
    good, bad = math.sqrt(1.25 * 0.5), -math.sqrt(2.0 * 0.8)
    assert policy_objective(tokens, ratio_N, loss).tolist() == pytest.approx([good, good, bad, bad], rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "has_gradient"),
    [
        (0.01, 0.05, 1.0, True),  # five times as likely, and no more than 0.04 of all probability
        (0.5, 0.75, 1.0, False),
        (0.5, 0.75, -1.0, True),
        (0.75, 0.5, -1.0, False),
        (0.75, 0.5, 1.0, True),
    ],
)
def test_dppo_bounds_the_change_of_probability(old: float, new: float, advantage: float, has_gradient: bool) -> None:
    """The ratio of a rare token may be large; a common one may not go further than 0.2 in its advantage's direction."""
    logprobs_N = _tensor(math.log(new)).requires_grad_()
    ratio_N = (logprobs_N - math.log(old)).exp()
    objective_N = _objective(logprobs_N, ratio_N, _tensor(advantage), LossConfig(policy_loss="dppo"))
    (gradient_N,) = torch.autograd.grad(objective_N.sum(), logprobs_N)
    assert gradient_N.tolist() == pytest.approx([new / old * advantage if has_gradient else 0.0], rel=1e-12)


def test_cispo_without_a_lower_bound() -> None:
    """As MiniMax-M1 ran it: with `low` 1 the clip bounds the weight from above alone."""
    ratio_N, advantages_N, logprobs_N = _tensor(1e-3), _tensor(2.0), _tensor(-0.7)
    loss = LossConfig(policy_loss="cispo", clip=ClipConfig(low=1.0, high=0.2))
    objective_N = _objective(logprobs_N, ratio_N, advantages_N, loss)
    assert objective_N.tolist() == pytest.approx([1e-3 * 2 * -0.7], rel=1e-12)


# The correction for a sampler that is not the policy before the update ------------------------------------------------

ICEPOP = {"weight": {"max": None}, "mask": {"level": "token", "low": 0.4, "high": 5.0}}
TO_SAMPLER = (0.5, 4, 1, 8, 1 / 16)
"""pi_old / pi_sampler of tokens: of their completions the products are 2 and 1/2, the geometric means 1.26 and 0.71."""


def _corrected(correction: Mapping[str, Any], old_N: Tensor, sampler_N: Tensor) -> Tensor | None:
    zero_N = torch.zeros_like(old_N)
    tokens = Tokens(zero_N, old_N, sampler_N, None, zero_N, zero_N, SEQUENCE_N, NUM_TOKENS_B)
    return importance_weights(tokens, CorrectionConfig.model_validate(correction))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"weight": {"level": "token", "max": 2}}, [0.5, 2, 1, 2, 1 / 16]),
        ({"weight": {"level": "sequence", "max": 4}}, [2, 2, 2, 0.5, 0.5]),
        ({"weight": {"level": "sequence", "max": 1.5}}, [1.5, 1.5, 1.5, 0.5, 0.5]),
        (ICEPOP, [0.5, 4, 1, 0, 0]),
        ({"mask": ICEPOP["mask"]}, [1, 1, 1, 0, 0]),
        ({"weight": {"level": "sequence", "max": None}, "mask": ICEPOP["mask"]}, [2, 2, 2, 0, 0]),
        ({"weight": {"max": 4}, "mask": {"level": "geometric"}}, [0.5, 4, 1, 4, 1 / 16]),  # masks before the update
        ({"mask": {"level": "sequence"}}, None),
        ({}, None),
    ],
)
def test_importance_weights_by_hand(correction: Mapping[str, Any], expected: list[float] | None) -> None:
    """Of tokens or of the products over completions, lowered to a bound, zero where a token is masked."""
    sampler_N = _tensor(-1, -2, -3, -1, -9)
    weight_N = _corrected(correction, sampler_N + _tensor(*TO_SAMPLER).log(), sampler_N)
    assert expected == (None if weight_N is None else pytest.approx(weight_N.tolist(), rel=1e-12))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({"level": "sequence", "low": 0.4, "high": 1.9}, [False, True]),
        ({"level": "sequence", "low": 0.6, "high": 2.1}, [True, False]),
        ({"level": "geometric", "low": 0.6, "high": 1.2}, [False, True]),
        ({"level": "geometric", "low": 0.8, "high": 1.3}, [True, False]),
        ({"level": "sequence", "low": 0.0, "high": 1.9}, [False, True]),
    ],
)
def test_completions_within_the_mask_by_hand(mask: Mapping[str, Any], expected: list[bool]) -> None:
    """The product of the ratios, or their geometric mean, is within the bounds; single tokens may be outside."""
    sampler_M = torch.zeros(5, dtype=torch.float64)
    old_M = _tensor(*TO_SAMPLER).log()
    within_B = is_within_mask(old_M, sampler_M, [3, 2], ImportanceMaskConfig.model_validate(mask))
    assert within_B.tolist() == expected


def test_samples_weighted_by_completion_have_the_mean_of_the_policy_itself() -> None:
    """Over all completions of two tokens, with unbounded weights: importance sampling has no bias."""
    sampler_V, old_V = (torch.log_softmax(_logits(seed), -1) for seed in (1, 2))
    worth_VV = torch.randn(len(old_V), len(old_V), dtype=torch.float64, generator=torch.manual_seed(3))
    correction = CorrectionConfig.model_validate({"weight": {"level": "sequence", "max": 1e6}})
    mean = 0.0
    for first, second in itertools.product(range(len(old_V)), repeat=2):
        ids = torch.tensor([first, second])
        zero_N, both_N, number_B = torch.zeros(2).double(), torch.zeros(2, dtype=torch.long), torch.tensor([2])
        tokens = Tokens(zero_N, old_V[ids], sampler_V[ids], None, zero_N, zero_N, both_N, number_B)
        weight_N = importance_weights(tokens, correction)
        assert weight_N is not None
        assert weight_N[0] == weight_N[1]
        mean += float(sampler_V[ids].sum().exp() * weight_N[0] * worth_VV[first, second])
    expected = old_V.exp() @ worth_VV @ old_V.exp()
    assert mean == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_is_finite_and_has_no_gradient(level: str) -> None:
    """Whatever the distance to the sampler; only the policy under training is differentiated by."""
    old_N = _tensor(0, -1e4, -1, 0, 0).requires_grad_()
    for sampler_N in (old_N.detach() - 1e4, old_N.detach() + 1e4):
        correction = {"weight": {"level": level, "max": None}, "mask": {"level": "geometric"}}
        weight_N = _corrected(correction, old_N, sampler_N)
        assert weight_N is not None
        assert bool(weight_N.isfinite().all())
        assert not weight_N.requires_grad


# The KL divergence from the reference ---------------------------------------------------------------------------------


def _logits(seed: int) -> Tensor:
    """Return the logits of a policy over seven outcomes."""
    return torch.randn(7, dtype=torch.float64, generator=torch.manual_seed(seed))


def _kl(x: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimate of tokens whose log-ratio of the reference to the policy is x."""
    return kl_to_reference(torch.zeros_like(x), x, torch.ones_like(x), estimator)


def _divergence(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return KL(p || q), summed over all outcomes."""
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
def test_kl_estimators_by_hand(estimator: KLEstimator, expected: float) -> None:
    """Pi = 1/4, pi_ref = 1/2 and pi / pi_old = 3; where pi is pi_ref, every estimate is exactly zero."""
    logprobs, reference = _tensor(math.log(0.25), -3.0), _tensor(math.log(0.5), -3.0)
    result = kl_to_reference(logprobs, reference, _tensor(3.0, 3.0), estimator)
    assert result.tolist() == [pytest.approx(expected, rel=1e-12), 0.0]


def test_the_mean_of_k1_and_k3_is_the_divergence() -> None:
    """Summed over all outcomes under pi; k2 is close to it for a reference nearby, and k2 and k3 are never negative."""
    logprobs, reference = (_logits(seed).log_softmax(0) for seed in (1, 2))
    exact = float(_divergence(logprobs, reference))
    unbiased: tuple[KLEstimator, ...] = ("k1", "k3")
    for estimator in unbiased:
        assert float((logprobs.exp() * _kl(reference - logprobs, estimator)).sum()) == pytest.approx(exact, rel=1e-12)
    near = (_logits(1) + 0.01 * _logits(2)).log_softmax(0)
    mean = float((logprobs.exp() * _kl(near - logprobs, "k2")).sum())
    assert mean == pytest.approx(float(_divergence(logprobs, near)), rel=0.02)
    assert bool((_kl(reference - logprobs, "k2") >= 0).all())
    assert bool((_kl(reference - logprobs, "k3") >= 0).all())


def _mean_gradient(estimator: KLEstimator, sampling: Tensor | None = None) -> Tensor:
    """Return the mean gradient of an estimate in the logits of pi, over all outcomes under the sampling policy."""
    logits = _logits(1).requires_grad_()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if sampling is None else sampling
    estimates = kl_to_reference(logprobs, _logits(2).log_softmax(0), (logprobs - old).exp(), estimator)
    (gradient,) = torch.autograd.grad((old.exp() * estimates).sum(), logits)
    return gradient


def _gradient_of_divergence(*, reverse: bool = False) -> Tensor:
    """Return that of KL(pi || pi_ref), or with `reverse` of KL(pi_ref || pi), by differentiating the exact sum."""
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
def test_the_mean_gradient_of_each_estimator_is_the_documented_one(estimator: KLEstimator, expected: Tensor) -> None:
    """None for k1, KL(pi || pi_ref) for k2 and the corrected k3, and KL(pi_ref || pi) for k3 itself."""
    torch.testing.assert_close(_mean_gradient(estimator), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(_gradient_of_divergence(), _gradient_of_divergence(reverse=True), rtol=0.1)


def test_the_corrected_k3_is_right_off_policy_too() -> None:
    """Sampled from another policy than the one that is trained, its mean gradient is still that of KL(pi || pi_ref)."""
    sampling = _logits(3).log_softmax(0)
    result = _mean_gradient("k3_corrected", sampling)
    torch.testing.assert_close(result, _gradient_of_divergence(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(_mean_gradient("k2", sampling), _gradient_of_divergence(), rtol=0.1)


def test_a_small_drift_is_not_lost_in_rounding() -> None:
    """In float32, k3 of a log-ratio of a thousandth is x^2 / 2 + x^3 / 6 to three digits."""
    x = torch.tensor([1e-3, -1e-3], dtype=torch.float32)
    assert _kl(x, "k3").tolist() == pytest.approx([5e-7 + 1e-9 / 6, 5e-7 - 1e-9 / 6], rel=1e-3)


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -25.0, 25.0, 100.0, 1e4])
def test_an_outlier_has_a_finite_penalty_that_pulls_towards_the_reference(
    estimator: KLEstimator, log_ratio: float
) -> None:
    """In float32: a token that the reference finds likelier is made no less likely by k2 and k3, and vice versa."""
    logprobs = torch.tensor([-1e4 if log_ratio > 0 else -1.0]).requires_grad_()
    estimate = kl_to_reference(logprobs, logprobs.detach() + log_ratio, torch.ones(1), estimator).sum()
    (gradient,) = torch.autograd.grad(estimate, logprobs)
    assert math.isfinite(estimate.detach())
    assert math.isfinite(gradient)
    if estimator in ("k2", "k3"):
        assert estimate > 0
        assert gradient <= 0 if log_ratio > 0 else gradient > 0


# The aggregation ------------------------------------------------------------------------------------------------------


def _weights(aggregation: Aggregation, *num_tokens: int) -> list[float]:
    size = 1 if len(num_tokens) == 3 else 2
    weights = token_weights(_tensor(*num_tokens), aggregation, group_size=size, max_new_tokens=10)
    return [float(each) for each in weights]


@pytest.mark.parametrize(
    ("aggregation", "expected", "with_masked"),
    [
        ("sequence_mean", [1 / 2, 1 / 8], [1 / 4, 0, 1 / 8]),
        ("token_mean", [1 / 5, 1 / 5], [1 / 6, 0, 1 / 6]),
        ("prompt_mean", [1 / 5, 1 / 5], [1 / 4, 0, 1 / 8]),
        ("constant", [1 / 20, 1 / 20], [1 / 20, 0, 1 / 20]),
    ],
)
def test_token_weights_by_hand(aggregation: Aggregation, expected: list[float], with_masked: list[float]) -> None:
    """One and four tokens of a group, a limit of ten; two, none and four of three: what is masked is not counted."""
    assert _weights(aggregation, 1, 4) == pytest.approx(expected, rel=1e-12)
    assert _weights(aggregation, 2, 0, 4) == pytest.approx(with_masked, rel=1e-12)
    assert _weights(aggregation, 0, 0, 0) == [0.0] * 3
