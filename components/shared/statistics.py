"""Statistics of right and wrong answers: intervals, and the paired comparison of two models on the same problems.

Wilson's score interval is used throughout instead of the normal one: it stays inside [0, 1] and keeps its coverage near
0 and 1, where small test sets and good models are.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance
from typing import Any

Interval = tuple[float, float]


def wilson_interval(correct: float, total: float, confidence: float = 0.95) -> Interval:
    """Return the score interval of a proportion (Wilson 1927), without continuity correction.

    scipy's takes whole numbers of problems; an effective number of them (see `mean_interval`) may be a fraction.
    """
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"{correct} right of {total} is not a proportion")
    z_squared = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    proportion = correct / total
    center = (proportion + z_squared / (2 * total)) / (1 + z_squared / total)
    spread = math.sqrt(z_squared * (proportion * (1 - proportion) + z_squared / (4 * total)) / total)
    half_width = spread / (1 + z_squared / total)
    # Exact at the ends, where rounding would leave a sliver outside of the estimate itself.
    low = 0.0 if correct == 0 else max(0.0, center - half_width)
    high = 1.0 if correct == total else min(1.0, center + half_width)
    return low, high


def score(correct: int, total: int) -> dict[str, Any]:
    """Return an accuracy with its counts and 95 % interval."""
    interval = list(wilson_interval(correct, total))
    return {"correct": correct, "total": total, "accuracy": correct / total, "interval": interval}


def mean_interval(means: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the interval of the mean over problems of per-problem means in [0, 1].

    Samples of one problem are correlated, so problems are what counts: the variance between them gives the effective
    number of independent answers, and Wilson's interval is taken with that number. One answer per problem gives
    `wilson_interval` itself.
    """
    mean = fmean(means)
    variance = pvariance(means, mean)
    # Without variance each problem counts as one answer.
    effective_total = len(means) * mean * (1 - mean) / variance if variance > 0 else float(len(means))
    return wilson_interval(min(mean * effective_total, effective_total), effective_total, confidence)


def mcnemar_exact_p(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test that two models are equally often right.

    Only problems that exactly one of them gets right count; under the hypothesis each is a fair coin.
    """
    from scipy.stats import binomtest

    if only_first + only_second == 0:
        return 1.0
    return float(binomtest(only_first, only_first + only_second, 0.5).pvalue)


def paired_difference_interval(
    *, both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95
) -> Interval:
    """Return the interval of (accuracy of the second - accuracy of the first) over the same problems.

    Newcombe's square-and-add interval for paired data (Statistics in Medicine 17, 1998, p. 2635, method 10): the
    Wilson limits of the two accuracies, joined with the correlation between the two models' answers.
    """
    total = both + only_first + only_second + neither
    first, second = (both + only_first) / total, (both + only_second) / total
    first_low, first_high = wilson_interval(both + only_first, total, confidence)
    second_low, second_high = wilson_interval(both + only_second, total, confidence)
    # The phi coefficient, with Newcombe's continuity correction where it is positive.
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    determinant: float = both * neither - only_first * only_second
    if determinant > 0:
        determinant = max(determinant - total / 2, 0)
    phi = determinant / math.sqrt(margins) if margins else 0.0

    def joined(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2))

    difference = second - first
    return (
        difference - joined(second - second_low, first_high - first),
        difference + joined(second_high - second, first - first_low),
    )
