"""The power of the promotion gate: the probability that a policy as good as expected passes, before it is trained.

Exact: the numbers of answers that GRPO gains and loses on a source are multinomial, and for each number of changed
answers the gate passes from some number of gained ones on. Sources are independent. Health and champion are ignored.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from components.report.config import GateConfig
from components.report.formatting import points
from components.report.gate import Outcome, gain_p, is_not_worse, with_targets
from components.shared.page import percent
from components.shared.statistics import PairedCounts

MIN_POWER = 0.8
_STANDARD_DEVIATIONS = 6
"""Numbers of changed answers farther from their mean than this are ignored."""
_MAX_PROBLEMS = 200_000
"""Largest number of problems of a source that is proposed."""


def weakness(gate: GateConfig, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with a gate for test sets of these sizes by source; None if its power suffices."""
    gate = with_targets(gate, sizes)
    gain, lost, accuracy = gate.expected_gain, gate.expected_lost_fraction, gate.expected_sft_accuracy
    if gain <= gate.min_gain:
        return (
            f"report.gate: cannot be passed: expected_gain is {points(gain)} points, and min_gain asks for a lower "
            f"bound of {points(gate.min_gain)}; lower min_gain, or expect more"
        )
    if lost > accuracy or lost + gain > 1 - accuracy:
        return (
            f"report.gate: cannot be passed: with expected_sft_accuracy {percent(accuracy)} a policy cannot lose "
            f"{percent(lost)} of the answers (expected_lost_fraction) and gain {points(gain)} points "
            "(expected_gain); correct the assumptions, or take harder test problems"
        )
    probability = power(gate, sizes)
    if probability >= MIN_POWER:
        return None
    needed = enough_problems(gate, sizes).items()
    enough = " and ".join(f"{size:,} test problems in `{source}`" for source, size in needed)
    remedy = f"{enough} would be enough" if enough else "no number of test problems would do"
    return (
        f"report.gate: a policy that gains {points(gain)} points (expected_gain) would pass with a probability of "
        f"{percent(probability, 0)} only, {percent(MIN_POWER, 0)} is required; {remedy}; or change margin, min_gain, "
        "max_p_value or the assumptions"
    )


def power(gate: GateConfig, sizes: Mapping[str, int]) -> float:
    """Return the probability that a policy as described by `gate.expected_*` passes.

    It gains the expected points on every target, and on every other source as many answers as it loses.
    """
    level = gate.max_p_value / len(gate.target)  # the best target has to pass Holm's first level

    def better(counts: PairedCounts) -> bool:
        return is_not_worse(counts, gate) and gain_p(Outcome(counts), gate) <= level

    # P(passes) = P(worse on no source) - P(worse on no source, better on no target)
    none_worse, none_worse_none_better = 1.0, 1.0
    for source, size in sizes.items():
        p_not_worse = _probability(size, gate, source, partial(is_not_worse, gate=gate))
        p_better = _probability(size, gate, source, better) if source in gate.target else 0.0
        none_worse *= p_not_worse
        none_worse_none_better *= p_not_worse - p_better
    return none_worse - none_worse_none_better


def enough_problems(gate: GateConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes times the smallest factor above 1, within 2 %, whose power suffices; empty if none does."""

    def scaled(factor: float) -> dict[str, int]:
        return {source: max(1, round(factor * size)) for source, size in sizes.items()}

    low, high = 1.0, 2.0
    while power(gate, scaled(high)) < MIN_POWER:
        low, high = high, 2 * high
        if max(scaled(high).values()) > _MAX_PROBLEMS:
            return {}
    while high - low > 0.02 * low:
        middle = (low + high) / 2
        if power(gate, scaled(middle)) >= MIN_POWER:
            high = middle
        else:
            low = middle
    return scaled(high)


def _probability(size: int, gate: GateConfig, source: str, passes: Callable[[PairedCounts], bool]) -> float:
    """Return the probability that the counts of a source pass; counts that pass still do with more gained answers."""
    from scipy.special import bdtrc  # bdtrc(k, n, p): probability of more than k successes in n trials

    lost = gate.expected_lost_fraction
    gained = lost + (gate.expected_gain if source in gate.target else 0.0)
    changed = lost + gained
    mean, spread = size * changed, _STANDARD_DEVIATIONS * (size * changed * (1 - changed)) ** 0.5
    num_changed = np.arange(max(0, int(mean - spread)), min(size, int(mean + spread) + 1) + 1)
    required_gained = np.array([_fewest_gained(int(number), size, passes) for number in num_changed])
    gained_share = gained / changed if changed else 0.0
    probabilities = bdtrc(num_changed - 1, size, changed) - bdtrc(num_changed, size, changed)
    return float((probabilities * bdtrc(required_gained - 1, num_changed, gained_share)).sum())


def _fewest_gained(changed: int, size: int, passes: Callable[[PairedCounts], bool]) -> int:
    """Return the fewest gained answers among `changed` ones that pass; `changed + 1` if no number passes."""

    def passes_with(gained: int) -> bool:
        return passes(PairedCounts(0, changed - gained, gained, size - changed))

    return bisect_left(range(changed + 1), True, key=passes_with)
