"""Intervals and tests against published numbers, and the properties that a gate relies on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom, binomtest, norm

from components.shared.statistics import (
    PairedCounts,
    holm_levels,
    mcnemar_p,
    mean_interval,
    paired_gain_bound,
    paired_gain_interval,
    paired_gain_p,
    wilson_interval,
)


@given(st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_interval_contains_the_estimate(counts: tuple[int, int]) -> None:
    """It never leaves [0, 1], never excludes the observed proportion, and is scipy's for whole numbers."""
    correct, total = counts
    low, high = wilson_interval(correct, total)
    scipys = binomtest(correct, total).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
    assert 0 <= low <= correct / total <= high <= 1
    assert high > low


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [(0, 5, 1 / 32), (1, 7, (1 + 8) / 2**8), (4, 4, 163 / 256), (7, 1, 255 / 256), (0, 0, 1.0), (6, 16, 0.0262394)],
)
def test_mcnemar_is_a_binomial_tail_of_discordant_problems(only_first: int, only_second: int, p_value: float) -> None:
    """One-sided, summed by hand; problems on which the models agree make no difference."""
    assert mcnemar_p(PairedCounts(3, only_first, only_second, 5)) == pytest.approx(p_value, abs=1e-6)
    assert mcnemar_p(PairedCounts(0, only_first, only_second, 0)) == pytest.approx(p_value, abs=1e-6)


COUNTS = st.tuples(*[st.integers(0, 60)] * 4).filter(any).map(lambda counts: PairedCounts(*counts))


@given(COUNTS, st.floats(-0.9, 0.9))
def test_paired_p_value_is_the_score_test_under_the_likeliest_discordance(counts: PairedCounts, gain: float) -> None:
    """The closed form is the maximum that a search over all fractions of discordant problems finds."""
    first, second, total = counts.only_first, counts.only_second, counts.total
    low, high = max(0.0, -gain), (1 - gain) / 2

    def minus_log_likelihood(fraction: float) -> float:
        terms = ((first, fraction), (second, fraction + gain), (total - first - second, 1 - 2 * fraction - gain))
        return -sum(number * math.log(max(each, 1e-300)) for number, each in terms if number)

    found = minimize_scalar(minus_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-9}).x
    variance = total * (2 * found + gain * (1 - gain))
    expected = norm.sf((second - first - 1 - total * gain) / math.sqrt(max(variance, 1e-12)))
    if gain > 0:  # where all discordant problems are gained their number is binomial
        expected = max(expected, binom.sf(second - first - 1, total, gain))
    assert paired_gain_p(counts, gain) == pytest.approx(expected, abs=2e-3)


@given(COUNTS, st.sampled_from([0.01, 0.05, 0.1]))
def test_bound_and_p_value_say_the_same(counts: PairedCounts, level: float) -> None:
    """Every gain below the bound is rejected, none above it; swapping the models mirrors the interval."""
    bound = paired_gain_bound(counts, level)
    assert -1 <= bound <= counts.gain
    for distance in (1e-4, 0.01, 0.2):
        if bound - distance > -1:
            assert paired_gain_p(counts, bound - distance) <= level
        if bound + distance < 1:
            assert paired_gain_p(counts, bound + distance) >= level
    low, high = paired_gain_interval(counts)
    assert low <= counts.gain <= high
    swapped = PairedCounts(counts.both, counts.only_second, counts.only_first, counts.neither)
    assert paired_gain_interval(swapped) == pytest.approx((-high, -low), abs=1e-9)


def test_holm_divides_the_level_by_the_hypotheses_that_are_left() -> None:
    """The smallest p-value meets the strictest level; after one that is too large nothing is tested."""
    assert holm_levels({"a": 0.03, "b": 0.01, "c": 0.04}, 0.06) == {"b": 0.02, "a": 0.03, "c": 0.06}
    assert holm_levels({"a": 0.04, "b": 0.01, "c": 0.05}, 0.06) == {"b": 0.02, "a": 0.03, "c": 0.0}
    assert holm_levels({"a": 0.04}, 0.05) == {"a": 0.05}


@pytest.mark.parametrize(
    ("means", "correct", "total"),
    [
        ([0.0, 1.0, 1.0], 2, 3),  # one sample of each problem, or samples that always agree
        ([0.25, 0.75] * 10, 40, 80),  # four samples that differ like coins are nearly four answers
        ([1.0] * 20, 20, 20),  # all problems always right is not certainty: each counts as one answer
        ([0.5] * 20, 10, 20),
    ],
)
def test_samples_of_one_problem_count_less_than_problems(means: list[float], correct: int, total: int) -> None:
    """The interval of means is that of a proportion of an effective number of answers."""
    assert mean_interval(means) == pytest.approx(wilson_interval(correct, total))
