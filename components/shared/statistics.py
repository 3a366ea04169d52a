"""Statistics of right and wrong answers: intervals, and the paired comparison of two models on the same problems.

Score intervals (Wilson's for one model, Tango's for a pair) are used throughout instead of normal ones: they stay
inside their range and keep their coverage near 0 and 1, where small test sets and good models are.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance
from typing import Any

Interval = tuple[float, float]
_TAIL = 0.025
"""Probability beyond each end of an interval."""
_BISECTIONS = 40
"""Bisection steps, which give a bound between -1 and 1 to 1e-12."""


def wilson_interval(correct: float, total: float) -> Interval:
    """Return the 95 % score interval of a proportion (Wilson 1927), without continuity correction.

    Unlike scipy's, it takes fractions: `mean_interval` passes an effective number of problems.
    """
    z_squared = NormalDist().inv_cdf(1 - _TAIL) ** 2
    proportion = correct / total
    center = (proportion + z_squared / (2 * total)) / (1 + z_squared / total)
    spread = math.sqrt(z_squared * (proportion * (1 - proportion) + z_squared / (4 * total)) / total)
    half_width = spread / (1 + z_squared / total)
    # Exact at the ends, where rounding could exclude the estimate itself.
    low = 0.0 if correct == 0 else max(0.0, center - half_width)
    high = 1.0 if correct == total else min(1.0, center + half_width)
    return low, high


def score(correct: int, total: int) -> dict[str, Any]:
    """Return an accuracy with its counts and 95 % interval."""
    interval = list(wilson_interval(correct, total))
    return {"correct": correct, "total": total, "accuracy": correct / total, "interval": interval}


def mean_interval(means: Sequence[float], num_answers: float = math.inf) -> Interval:
    """Return the 95 % interval of the mean over problems of per-problem means in [0, 1].

    Answers to one problem are correlated. So it is Wilson's interval for the effective number of independent answers,
    which follows from the variance between problems; with one answer per problem, it is the number of problems. It is
    at most the number of all answers, `num_answers`, as the variance is unreliable near means of 0 and 1.
    """
    mean = fmean(means)
    variance = pvariance(means, mean)
    effective_total: float = len(means)  # without variance each problem counts as one answer
    if variance > 0:
        effective_total = min(len(means) * mean * (1 - mean) / variance, num_answers)
    correct = min(mean * effective_total, effective_total)  # a mean of 1 can be rounded up
    return wilson_interval(correct, effective_total)


@dataclass(frozen=True)
class PairedCounts:
    """Numbers of problems that both models, only the first, only the second, and neither answered right."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def total(self) -> int:
        """Number of problems."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def gain(self) -> float:
        """Accuracy of the second model minus that of the first; 0 without problems."""
        return (self.only_second - self.only_first) / self.total if self.total else 0.0

    @staticmethod
    def of(pairs: Iterable[tuple[bool, bool]]) -> "PairedCounts":
        """Count pairs of whether the first and the second model are right."""
        counts = Counter(pairs)
        return PairedCounts(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def mcnemar_p(counts: PairedCounts) -> float:
    """Return the one-sided p-value of the exact McNemar test, whose hypothesis is that the second model is not better.

    Only problems that exactly one model answers right count: by the hypothesis, each is the second one's with a
    probability of at most 1/2.
    """
    return _binomial_tail(counts.only_second, counts.only_first + counts.only_second, 0.5)


def paired_gain_p(counts: PairedCounts, gain: float) -> float:
    """Return the one-sided p-value of the hypothesis that the true gain is at most `gain`, a number in (-1, 1).

    Tango's score test for paired proportions (Statistics in Medicine 17, 1998, p. 891), with a continuity correction
    of one problem, which at a gain of 0 is that of McNemar's test. Without the correction, it would reject too often if
    few problems are discordant. It would also do so if nearly all are gained: the exact p-value for the hypothesis that
    no problem is lost is therefore a lower limit.
    """
    total, first, second = counts.total, counts.only_first, counts.only_second
    if not total:
        return 1.0
    # The maximum-likelihood fraction of problems that only the first model answers right, given `gain`.
    linear = (2 * total - second + first) * gain - first - second
    root = math.sqrt(max(0.0, linear**2 + 8 * total * first * gain * (1 - gain)))
    first_fraction = (root - linear) / (4 * total)
    variance = total * (2 * first_fraction + gain * (1 - gain))
    excess = second - first - 1 - total * gain
    if variance <= 0:
        return 1.0
    p_value = math.erfc(excess / math.sqrt(2 * variance)) / 2
    return max(p_value, _binomial_tail(second - first, total, gain)) if gain > 0 else p_value


def _binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Return the probability of at least `successes` in independent trials."""
    from scipy.special import bdtrc

    return float(bdtrc(successes - 1, trials, probability)) if successes > 0 else 1.0


def paired_gain_bound(counts: PairedCounts, level: float) -> float:
    """Return the lower confidence bound of the gain: the largest gain that `paired_gain_p` rejects at this level."""
    low, high = -1.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if paired_gain_p(counts, middle) <= level:
            low = middle
        else:
            high = middle
    return low


def paired_gain_interval(counts: PairedCounts) -> Interval:
    """Return the 95 % interval of the gain: from its lower bound to minus that with the models swapped."""
    swapped = PairedCounts(counts.both, counts.only_second, counts.only_first, counts.neither)
    return paired_gain_bound(counts, _TAIL), -paired_gain_bound(swapped, _TAIL)


def holm_levels(p_values: Mapping[str, float], level: float) -> dict[str, float]:
    """Return the level at which Holm's step-down procedure tests each of several hypotheses, 0 for untested ones.

    The smallest of n p-values is compared with level / n, the next with level / (n - 1) and so on, until one is above
    its level: the others are not tested (Scandinavian Journal of Statistics 6, 1979, p. 65).
    """
    levels = dict.fromkeys(sorted(p_values, key=p_values.__getitem__), 0.0)
    for rank, name in enumerate(levels):
        levels[name] = level / (len(p_values) - rank)
        if p_values[name] > levels[name]:
            break
    return levels
