"""The promotion gate: does GRPO beat the SFT model it started from, and does nothing else get worse?

Both models answer the same problems greedily, so the comparison is paired. The exact McNemar test decides whether the
target improved; on every other source the lower bound of the paired difference must stay above minus the margin.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from components.report.config import GateConfig
from components.report.formatting import points, probability
from components.shared.errors import PipelineError
from components.shared.statistics import mcnemar_exact_p, paired_difference_interval, score

if TYPE_CHECKING:
    from components.report.findings import Pair

_ROUNDING = 1e-12
"""A gain of exactly the required fraction passes although neither is exact in binary."""


def decide(pairs: Sequence["Pair"], gate: GateConfig) -> dict[str, Any]:
    """Return the verdict on paired answers of SFT and GRPO."""
    sources = list(dict.fromkeys(pair.sft.source for pair in pairs))
    unknown = [source for source in gate.target if source not in sources]
    if unknown:
        raise PipelineError(
            f'report.gate.target: no test problem comes from "{unknown[0]}"; '
            f"sources with test problems: {', '.join(sources)}"
        )
    target = _judge_target([pair for pair in pairs if pair.sft.source in gate.target], gate)
    others = [
        _judge_other(source, [pair for pair in pairs if pair.sft.source == source], gate)
        for source in sources
        if source not in gate.target
    ]
    return {
        "passed": all(part["passed"] for part in (target, *others)),
        "enforced": gate.enforce,
        "target": target,
        "others": others,
        "reasons": [part["reason"] for part in (target, *others) if not part["passed"]],
    }


def _judge_target(pairs: Sequence["Pair"], gate: GateConfig) -> dict[str, Any]:
    name, compared = " + ".join(gate.target), _compare(pairs)
    gain, p_value = compared["gain"], mcnemar_exact_p(compared["only_sft_right"], compared["only_grpo_right"])
    gain_passed = gain >= gate.min_gain - _ROUNDING and gain > 0
    p_value_passed = p_value <= gate.max_p_value
    return {
        "source": name,
        "sources": list(gate.target),
        **compared,
        "p_value": p_value,
        "min_gain": gate.min_gain,
        "max_p_value": gate.max_p_value,
        "gain_passed": gain_passed,
        "p_value_passed": p_value_passed,
        "passed": gain_passed and p_value_passed,
        "reason": (
            f"{name}: gained {points(gain)} points (at least {points(gate.min_gain)} required), "
            f"p = {probability(p_value)} (at most {gate.max_p_value:g} allowed)"
        ),
    }


def _judge_other(source: str, pairs: Sequence["Pair"], gate: GateConfig) -> dict[str, Any]:
    compared = _compare(pairs)
    lower_bound = compared["gain_interval"][0]
    return {
        "source": source,
        **compared,
        "margin": gate.margin,
        "lower_bound": lower_bound,
        "passed": lower_bound >= -gate.margin - _ROUNDING,
        "reason": (
            f"{source}: changed by {points(compared['gain'])} points, lower 95 % bound {points(lower_bound)} "
            f"(at least {points(-gate.margin)} required)"
        ),
    }


def _compare(pairs: Sequence["Pair"]) -> dict[str, Any]:
    outcomes = Counter(pair.right for pair in pairs)
    both, only_sft, only_grpo = outcomes[True, True], outcomes[True, False], outcomes[False, True]
    interval = paired_difference_interval(
        both=both, only_first=only_sft, only_second=only_grpo, neither=outcomes[False, False]
    )
    return {
        "sft": score(both + only_sft, len(pairs)),
        "grpo": score(both + only_grpo, len(pairs)),
        "gain": (only_grpo - only_sft) / len(pairs),
        "gain_interval": list(interval),
        "only_sft_right": only_sft,
        "only_grpo_right": only_grpo,
        "unscorable": {
            "sft": sum(pair.sft.verdict == "unscorable" for pair in pairs),
            "grpo": sum(pair.grpo.verdict == "unscorable" for pair in pairs),
        },
    }
