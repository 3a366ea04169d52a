import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.train_grpo.advantages import advantages, has_spread
from components.train_grpo.config import AdvantageEstimator

NAN = math.nan
ESTIMATORS = list(AdvantageEstimator)
SCALED = [AdvantageEstimator.Z_SCORE, AdvantageEstimator.Z_SCORE_BESSEL, AdvantageEstimator.BATCH_STD]
EIGHTHS = st.integers(-800, 800).map(lambda number: number / 8)
"""Rewards that are equal or far apart, and exact in binary."""
ROLLOUTS = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(EIGHTHS | st.just(NAN), min_size=size, max_size=size), min_size=1, max_size=4)
)


def _advantages(estimator: str, *rewards_PK: Sequence[float]) -> list[list[float]]:
    found: list[list[float]] = advantages(
        torch.tensor(rewards_PK, dtype=torch.float64), AdvantageEstimator(estimator)
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        ("z_score", 1 / math.sqrt(3), -math.sqrt(3)),
        ("z_score_bessel", 0.5, -1.5),
        ("mean_only", 0.25, -0.75),
        ("leave_one_out", 1 / 3, -1.0),
        ("batch_std", 1 / math.sqrt(3), -math.sqrt(3)),
    ],
)
def test_three_right_and_one_wrong(estimator: str, right: float, wrong: float) -> None:
    """The worked example: mean 3/4, deviation 0.433 biased and 1/2 unbiased; the others' means are 2/3 and 1."""
    (found,) = _advantages(estimator, [1, 1, 1, 0])
    assert found == pytest.approx([right] * 3 + [wrong], rel=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_one_right_among_many_stands_out_by_the_root_of_the_others(size: int) -> None:
    """A single success in G has advantage sqrt(G - 1) with the biased deviation and (G - 1) / sqrt(G) without."""
    group = [1.0] + [0.0] * (size - 1)
    assert _advantages("z_score", group)[0][0] == pytest.approx(math.sqrt(size - 1), rel=1e-12)
    assert _advantages("z_score_bessel", group)[0][0] == pytest.approx((size - 1) / math.sqrt(size), rel=1e-12)


def test_batch_std_divides_by_the_deviation_of_the_whole_rollout() -> None:
    """Four of eight are right: all groups are divided by 1/2, and one without spread counts in it as well."""
    assert _advantages("batch_std", [1, 1, 1, 0], [1, 0, 0, 0]) == [[0.5, 0.5, 0.5, -1.5], [1.5, -0.5, -0.5, -0.5]]
    deviation = math.sqrt(15) / 8  # of three ones among eight
    first, second = _advantages("batch_std", [1, 1, 1, 0], [0, 0, 0, 0])
    assert first == pytest.approx([0.25 / deviation] * 3 + [-0.75 / deviation], rel=1e-12)
    assert second == [0.0] * 4


_PLAIN: dict[str, Callable[[float, list[float], list[float]], float]] = {
    "z_score": lambda reward, group, _: (reward - statistics.fmean(group)) / statistics.pstdev(group),
    "z_score_bessel": lambda reward, group, _: (reward - statistics.fmean(group)) / statistics.stdev(group),
    "mean_only": lambda reward, group, _: reward - statistics.fmean(group),
    "leave_one_out": lambda reward, group, _: reward - (sum(group) - reward) / (len(group) - 1),
    "batch_std": lambda reward, group, all_: (reward - statistics.fmean(group)) / statistics.pstdev(all_),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None)
@given(rewards_PK=ROLLOUTS)
def test_every_estimator_is_its_formula(estimator: AdvantageEstimator, rewards_PK: list[list[float]]) -> None:
    """For rewards of any kind, with some missing, it equals the standard library's statistics reward by reward."""
    everything = [reward for group in rewards_PK for reward in group if not math.isnan(reward)]
    for rewards, found in zip(rewards_PK, _advantages(estimator, *rewards_PK), strict=True):
        group = [reward for reward in rewards if not math.isnan(reward)]
        for reward, advantage in zip(rewards, found, strict=True):
            if math.isnan(reward) or len(set(group)) == 1:
                assert advantage == 0.0
            else:
                assert advantage == pytest.approx(_PLAIN[estimator](reward, group, everything), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(group=st.lists(EIGHTHS | st.just(NAN), min_size=2, max_size=16))
def test_bessels_correction_shrinks_by_the_root_of_n_minus_one_over_n(group: list[float]) -> None:
    """The two deviations differ by one factor, in which only scored rewards are counted."""
    num_scored = sum(not math.isnan(reward) for reward in group)
    factor = math.sqrt((num_scored - 1) / num_scored) if num_scored else 0.0
    biased, unbiased = (_advantages(estimator, group)[0] for estimator in ("z_score", "z_score_bessel"))
    assert unbiased == pytest.approx([factor * advantage for advantage in biased], rel=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "group", [(1, 1, 1), (0, 0, 0), (0.1 + 0.2, 0.3, 0.3), (1e8, 1e8, 1e8), (0.1, 0.1, 0.1), (NAN, 0.1 + 0.2, 0.3)]
)
def test_a_group_without_spread_has_advantage_exactly_zero(
    estimator: AdvantageEstimator, group: tuple[float, ...]
) -> None:
    """All right, all wrong, or different only by rounding: nothing to learn, not even noise, whatever stands beside."""
    assert _advantages(estimator, group) == [[0.0, 0.0, 0.0]]
    assert _advantages(estimator, group, (1, 0, 0))[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_could_not_be_scored_is_left_out(estimator: AdvantageEstimator) -> None:
    """NaN counts in no statistic, its own advantage is zero, and one reward alone has nothing to be compared with."""
    with_missing, without = ([1.0, NAN, 1.0, 1.0, 0.0, NAN], [1.0, 1.0, 1.0, 0.0])
    (found,), (expected,) = _advantages(estimator, with_missing), _advantages(estimator, without)
    assert found == [expected[0], 0.0, expected[1], expected[2], expected[3], 0.0]
    assert _advantages(estimator, [NAN, 1, NAN]) == [[0.0] * 3]
    assert _advantages(estimator, [NAN] * 3) == [[0.0] * 3]
    assert _advantages(estimator, [NAN] * 4, without)[1] == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None)
@given(rewards_PK=ROLLOUTS, shift=EIGHTHS)
def test_shifting_the_rewards_changes_nothing(
    estimator: AdvantageEstimator, rewards_PK: list[list[float]], shift: float
) -> None:
    """Advantages are relative: 0 and 1 teach the same as 4 and 5."""
    moved = [[reward + shift for reward in rewards] for rewards in rewards_PK]
    for found, expected in zip(_advantages(estimator, *moved), _advantages(estimator, *rewards_PK), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None)
@given(rewards_PK=ROLLOUTS, scale=st.floats(0.5, 10))
def test_scaling_the_rewards_scales_what_is_not_divided_by_a_deviation(
    estimator: AdvantageEstimator, rewards_PK: list[list[float]], scale: float
) -> None:
    """Estimators that divide by a deviation do not see the scale; the others are proportional to it."""
    factor = 1.0 if estimator in SCALED else scale
    scaled = [[reward * scale for reward in rewards] for rewards in rewards_PK]
    for found, expected in zip(_advantages(estimator, *scaled), _advantages(estimator, *rewards_PK), strict=True):
        assert found == pytest.approx([factor * advantage for advantage in expected], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None)
@given(rewards_PK=ROLLOUTS)
def test_the_advantages_of_a_group_sum_to_zero(estimator: AdvantageEstimator, rewards_PK: list[list[float]]) -> None:
    """What one completion gains its siblings lose."""
    for found in _advantages(estimator, *rewards_PK):
        assert sum(found) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None)
@given(data=st.data(), rewards_PK=ROLLOUTS)
def test_the_order_of_the_completions_does_not_matter(
    estimator: AdvantageEstimator, data: st.DataObject, rewards_PK: list[list[float]]
) -> None:
    """Completions and prompts in another order have the same advantages in that order."""
    columns = data.draw(st.permutations(range(len(rewards_PK[0]))))
    rows = data.draw(st.permutations(range(len(rewards_PK))))
    permuted = _advantages(estimator, *([rewards_PK[row][column] for column in columns] for row in rows))
    expected = _advantages(estimator, *rewards_PK)
    for row, found in zip(rows, permuted, strict=True):
        assert found == pytest.approx([expected[row][column] for column in columns], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", [each for each in ESTIMATORS if each is not AdvantageEstimator.BATCH_STD])
def test_groups_do_not_see_each_other(estimator: AdvantageEstimator) -> None:
    """Each row is normalised by itself, unless the deviation is meant to be that of the rollout."""
    both = _advantages(estimator, [1, 0, 0, 0], [50, -50, 7, 7])
    assert both == [*_advantages(estimator, [1, 0, 0, 0]), *_advantages(estimator, [50, -50, 7, 7])]


def test_spread_is_decided_by_the_rewards_themselves() -> None:
    """Differences below a millionth are rounding; missing rewards are no difference, nor is nothing at all."""
    groups = [[1, 1 + 5e-7, 1], [1, 1 + 2e-6, 1], [0, 1, NAN], [1, NAN, 1], [-1, NAN, -1], [NAN] * 3, [NAN, 1, NAN]]
    found = has_spread(torch.tensor(groups, dtype=torch.float64))
    assert found.tolist() == [False, True, True, False, False, False, False]
