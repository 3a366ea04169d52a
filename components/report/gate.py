"""The promotion gate: does GRPO beat the SFT model it started from, and does nothing else get worse?

Both models answer the same problems greedily, so the comparison is paired. The exact McNemar test asks whether the
target improved; on every other source the lower bound of the paired difference must stay above minus the margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.report import wording
from components.report.config import GateConfig
from components.report.evaluation import Pair
from components.shared.errors import PipelineError
from components.shared.statistics import mcnemar_exact_p, paired_difference_interval, score

_ROUNDING = 1e-12
"""A gain of exactly the asked fraction passes although neither is exact in binary."""


@dataclass(frozen=True)
class Counts:
    """On how many problems both models are right, only one of them, or neither."""

    both: int
    only_sft: int
    only_grpo: int
    neither: int

    @property
    def total(self) -> int:
        """All problems."""
        return self.both + self.only_sft + self.only_grpo + self.neither

    @property
    def gain(self) -> float:
        """Accuracy of GRPO minus that of SFT."""
        return (self.only_grpo - self.only_sft) / self.total


def decide(pairs: Sequence[Pair], gate: GateConfig) -> dict[str, Any]:
    """Return the verdict on paired answers of SFT (first) and GRPO (second)."""
    sources = list(dict.fromkeys(pair.source for pair in pairs))
    unknown = [source for source in gate.target if source not in sources]
    if unknown:
        raise PipelineError(
            f"report.gate.target: no test problem is from `{unknown[0]}`; there are {', '.join(sources)}"
        )
    target = _judge_target([pair for pair in pairs if pair.source in gate.target], gate)
    others = [
        _judge_other(source, [pair for pair in pairs if pair.source == source], gate)
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


def count(pairs: Sequence[Pair]) -> Counts:
    """Return how the two models' right answers overlap."""
    outcomes = [pair.right for pair in pairs]
    return Counts(
        both=outcomes.count((True, True)),
        only_sft=outcomes.count((True, False)),
        only_grpo=outcomes.count((False, True)),
        neither=outcomes.count((False, False)),
    )


def _judge_target(pairs: Sequence[Pair], gate: GateConfig) -> dict[str, Any]:
    counts = count(pairs)
    p_value = mcnemar_exact_p(counts.only_sft, counts.only_grpo)
    enough = counts.gain >= gate.min_gain - _ROUNDING and counts.gain > 0
    certain = p_value <= gate.max_p_value
    name = " + ".join(gate.target)
    reason = (
        f"{name}: {wording.points(counts.gain)} points gained where {wording.points(gate.min_gain)} are asked; "
        f"p = {wording.probability(p_value)} where at most {gate.max_p_value:g} is allowed"
    )
    return {
        "source": name,
        "sources": list(gate.target),
        **_compared(pairs, counts),
        "p_value": p_value,
        "min_gain": gate.min_gain,
        "max_p_value": gate.max_p_value,
        "gain_passed": enough,
        "p_value_passed": certain,
        "passed": enough and certain,
        "reason": reason,
    }


def _judge_other(source: str, pairs: Sequence[Pair], gate: GateConfig) -> dict[str, Any]:
    compared = _compared(pairs, count(pairs))
    lower_bound = compared["gain_interval"][0]
    passed = lower_bound >= -gate.margin - _ROUNDING
    reason = (
        f"{source}: the 95 % interval of the change reaches down to {wording.points(lower_bound)} points "
        f"where {wording.points(-gate.margin)} are allowed"
    )
    return {
        "source": source,
        **compared,
        "margin": gate.margin,
        "lower_bound": lower_bound,
        "passed": passed,
        "reason": reason,
    }


def _compared(pairs: Sequence[Pair], counts: Counts) -> dict[str, Any]:
    interval = paired_difference_interval(
        both=counts.both, only_first=counts.only_sft, only_second=counts.only_grpo, neither=counts.neither
    )
    return {
        "sft": score(counts.both + counts.only_sft, counts.total),
        "grpo": score(counts.both + counts.only_grpo, counts.total),
        "gain": counts.gain,
        "gain_interval": list(interval),
        "only_sft_right": counts.only_sft,
        "only_grpo_right": counts.only_grpo,
        "unscorable": {
            "sft": sum(pair.first.verdict == "unscorable" for pair in pairs),
            "grpo": sum(pair.second.verdict == "unscorable" for pair in pairs),
        },
    }
