"""Intervals and tests against published numbers, and the properties that a gate relies on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from components.shared.statistics import mcnemar_exact_p, mean_interval, paired_difference_interval, wilson_interval


@settings(deadline=None)
@given(st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_interval_contains_the_estimate(counts: tuple[int, int]) -> None:
    """It never leaves [0, 1], never excludes the observed proportion, and is scipy's for whole numbers."""
    correct, total = counts
    low, high = wilson_interval(correct, total)
    scipys = binomtest(correct, total).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
    assert 0 <= low <= correct / total <= high <= 1
    assert high > low


def test_wilson_interval_refuses_impossible_counts() -> None:
    """More right than there are problems is an error instead of a number."""
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(3, 2)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [(0, 5, 2 / 32), (1, 7, 2 * (1 + 8) / 2**8), (4, 4, 1.0), (0, 0, 1.0), (6, 16, 0.0524788)],
)
def test_mcnemar_is_a_binomial_test_of_discordant_problems(only_first: int, only_second: int, p_value: float) -> None:
    """Two-sided binomial tail, summed by hand; the last is 6 against 16 of Cavo et al. (2012)."""
    assert mcnemar_exact_p(only_first, only_second) == pytest.approx(p_value, abs=1e-6)
    assert mcnemar_exact_p(only_second, only_first) == pytest.approx(p_value, abs=1e-6)


@pytest.mark.parametrize(
    ("both", "only_first", "only_second", "neither", "published"),
    [
        # Fagerland, Lydersen, Laake: Statistical Analysis of Contingency Tables (2017), chapter 8, sign turned.
        (59, 6, 16, 80, (0.0046, 0.1186)),
        # Altman et al.: Statistics with Confidence (2000), p. 52, with its sign turned; three decimals there.
        (14, 5, 0, 22, (-0.226, -0.011)),
    ],
)
def test_paired_interval_has_the_published_limits(
    both: int, only_first: int, only_second: int, neither: int, published: tuple[float, float]
) -> None:
    """Newcombe's method 10, with a correlation that the continuity correction leaves positive."""
    interval = paired_difference_interval(both=both, only_first=only_first, only_second=only_second, neither=neither)
    assert interval == pytest.approx(published, abs=6e-4)


def test_paired_interval_without_correlation_is_square_and_add() -> None:
    """Worked by hand: 5 of 10 against 5 of 10 right, independent, so each limit is sqrt(2) Wilson half-widths away."""
    low, high = wilson_interval(5, 10)
    interval = paired_difference_interval(both=2, only_first=3, only_second=3, neither=2)
    # The determinant 2 * 2 - 3 * 3 = -5 over sqrt(5 ** 4) is a correlation of -0.2: wider than independent answers.
    spread = (2 * (1 + 0.2)) ** 0.5 * (high - low) / 2
    assert interval == pytest.approx((-spread, spread))


COUNTS = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


@settings(deadline=None)
@given(COUNTS)
def test_swapping_the_models_mirrors_the_paired_interval(counts: tuple[int, int, int, int]) -> None:
    """Swapping the models mirrors the interval, which holds the observed difference and stays in [-1, 1]."""
    both, first, second, neither = counts
    low, high = paired_difference_interval(both=both, only_first=first, only_second=second, neither=neither)
    mirrored = paired_difference_interval(both=both, only_first=second, only_second=first, neither=neither)
    assert (-high, -low) == pytest.approx(mirrored, abs=1e-12)
    assert -1 - 1e-9 <= low <= (second - first) / sum(counts) + 1e-12
    assert (second - first) / sum(counts) - 1e-12 <= high <= 1 + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=200))
def test_one_sample_per_problem_gives_wilson(answers: list[int]) -> None:
    """With nothing to cluster the interval of means is the interval of the proportion."""
    assert mean_interval(answers) == pytest.approx(wilson_interval(sum(answers), len(answers)), abs=1e-9)


def test_samples_of_one_problem_count_less_than_problems() -> None:
    """Four samples that always agree are one answer; four that differ like coins are nearly four."""
    agreeing, mixed = mean_interval([0.0, 1.0] * 10), mean_interval([0.25, 0.75] * 10)
    assert agreeing == pytest.approx(wilson_interval(10, 20))
    assert mixed == pytest.approx(wilson_interval(40, 80))


def test_equal_means_have_an_interval_too() -> None:
    """All problems always right is not certainty: each problem counts as one answer."""
    assert mean_interval([1.0] * 20) == pytest.approx(wilson_interval(20, 20))
    assert mean_interval([0.5] * 20) == pytest.approx(wilson_interval(10, 20))
