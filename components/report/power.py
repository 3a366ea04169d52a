"""The power of the promotion gate: how likely a policy passes that is as good as expected, before anything is trained.

Exact: of n problems of a source the numbers that GRPO gains and loses are multinomial, and for each number of changed
ones the gate passes above a number of gained ones. Sources are independent. Health and the champion are left out.
"""

from collections.abc import Callable, Mapping

import numpy as np

from components.report.config import GateConfig
from components.report.formatting import points
from components.report.gate import Outcome, claim_of, claim_p, is_not_worse, with_targets
from components.shared.page import percent
from components.shared.statistics import PairedCounts

MIN_POWER = 0.8
_STANDARD_DEVIATIONS = 6
"""Range of the number of changed answers around its mean; less likely numbers are left out."""
_MAX_PROBLEMS = 200_000


def weakness(gate: GateConfig, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with a gate on so many problems of each source; None where its power suffices."""
    gate = with_targets(gate, sizes)
    gained, lost, accuracy = gate.expected_gain, gate.expected_lost_fraction, gate.expected_sft_accuracy
    if gained <= gate.min_gain:
        return (
            f"report.gate: cannot be passed: expected_gain is {points(gained)} points, and min_gain asks for a lower "
            f"bound of {points(gate.min_gain)}; lower min_gain, or expect more"
        )
    if lost > accuracy or lost + gained > 1 - accuracy:
        return (
            f"report.gate: cannot be passed: with expected_sft_accuracy {percent(accuracy)} a policy cannot lose "
            f"{percent(lost)} of the answers (expected_lost_fraction) and gain {points(gained)} points "
            "(expected_gain); correct the assumptions, or take harder test problems"
        )
    probability = power(gate, sizes)
    if probability >= MIN_POWER:
        return None
    needed = enough_problems(gate, sizes)
    enough = " and ".join(f"{size:,} test problems in `{source}`" for source, size in needed.items())
    remedy = f"{enough} would be enough" if enough else "no number of test problems would do"
    return (
        f"report.gate: a policy that gains {points(gained)} points (expected_gain) would pass with a probability of "
        f"{percent(probability, 0)} only, {percent(MIN_POWER, 0)} is required; {remedy}; or change margin, min_gain, "
        "max_p_value or the assumptions"
    )


def power(gate: GateConfig, sizes: Mapping[str, int]) -> float:
    """Return the probability that a policy passes which is as `gate.expected_*` say.

    It gains the expected points on every target, and on every other source as many answers as it loses.
    """
    claim = claim_of(gate)
    level = claim.level / len(claim.target)  # the best target has to pass Holm's first level
    all_pass, none_better = 1.0, 1.0
    for source, size in sizes.items():
        passed = _probability(size, gate, source, lambda each: is_not_worse(each, claim))
        all_pass *= passed
        if source not in claim.target:
            none_better *= passed
        else:
            none_better *= passed - _probability(
                size, gate, source, lambda each: is_not_worse(each, claim) and claim_p(Outcome(each), claim) <= level
            )
    return all_pass - none_better


def enough_problems(gate: GateConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes times the smallest factor above 1, within 2 %, whose power suffices; nothing where none does."""

    def scaled(factor: float) -> dict[str, int]:
        return {source: max(1, round(factor * size)) for source, size in sizes.items()}

    low, high = 1.0, 2.0
    while power(gate, scaled(high)) < MIN_POWER:
        low, high = high, 2 * high
        if max(scaled(high).values()) > _MAX_PROBLEMS:
            return {}
    while high - low > 0.02 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if power(gate, scaled(middle)) >= MIN_POWER else (middle, high)
    return scaled(high)


def _probability(size: int, gate: GateConfig, source: str, passes: Callable[[PairedCounts], bool]) -> float:
    """The probability that the counts of a source pass a condition that more gained answers can only help."""
    from scipy.special import bdtr, bdtrc

    lost = gate.expected_lost_fraction
    gained = lost + (gate.expected_gain if source in gate.target else 0.0)
    changed = lost + gained
    spread = _STANDARD_DEVIATIONS * (size * changed * (1 - changed)) ** 0.5
    numbers = np.arange(max(0, int(size * changed - spread)), min(size, int(size * changed + spread) + 1) + 1)
    required = np.array([_fewest_gained(int(number), size, passes) for number in numbers])
    weights = bdtr(numbers, size, changed) - np.where(numbers > 0, bdtr(np.maximum(numbers - 1, 0), size, changed), 0)
    share = gained / changed if changed else 0.0
    tails = np.where(required > 0, bdtrc(np.maximum(required - 1, 0), np.maximum(numbers, 1), share), 1.0)
    return float((weights * np.where(required > numbers, 0.0, tails)).sum())


def _fewest_gained(changed: int, size: int, passes: Callable[[PairedCounts], bool]) -> int:
    """The fewest gained answers among so many changed ones that pass; one more than there are if none do."""
    low, high = 0, changed + 1
    while low < high:
        middle = (low + high) // 2
        if passes(PairedCounts(0, changed - middle, middle, size - changed)):
            high = middle
        else:
            low = middle + 1
    return low
