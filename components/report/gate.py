"""The promotion gate: is GRPO better than the SFT model it started from, and worse nowhere?

Both models answer the same problems greedily, so the comparison is paired, and counts of its four outcomes are all that
the gate reads. All tests are one-sided at the level `max_p_value`:

- Better on at least one target: the exact McNemar test, and a lower bound of the gain at `min_gain` or above. That is
  one claim out of several, so Holm's correction applies over the targets.
- Worse on no source, targets included: a lower bound of the change at minus the margin or above. All of these must
  hold, so a correction would only cost power: the probability that all pass is at most that of the one that is false
  (an intersection-union test; Berger, Technometrics 24, 1982, p. 295).
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from components.report.config import GateConfig, HealthConfig
from components.report.formatting import points, probability
from components.shared.errors import PipelineError
from components.shared.page import percent
from components.shared.problem import Split
from components.shared.statistics import (
    PairedCounts,
    holm_levels,
    mcnemar_p,
    paired_gain_bound,
    paired_gain_interval,
    paired_gain_p,
    score,
)

Verdict = dict[str, Any]
TRAINING_FIGURES = (
    ("sampler_mismatch", "sampler_mismatch", "mismatch of sampler and trainer", "max"),
    ("entropy", "entropy", "entropy of the policy", "min"),
    ("kl", "kl", "KL from the reference", "max"),
    ("completion_tokens", "completion_length_tokens", "mean completion length in tokens", "max"),
)
"""Figures of training that the gate may limit: the key, the column of GRPO's steps, the name, and the kind of limit."""


@dataclass(frozen=True)
class Outcome:
    """How two models answered the test problems of one source."""

    counts: PairedCounts
    answered: PairedCounts | None = None
    """Problems that both answered with finished and scorable text; None if all are."""
    flexible: PairedCounts | None = None
    """All problems under flexible extraction; None where it was not recorded. Shown, and no condition."""
    truncated: tuple[int, int] = (0, 0)
    """Answers of each model that reached the token limit."""
    unscorable: tuple[int, int] = (0, 0)
    """Answers of each model that the grader could not score."""


@dataclass(frozen=True)
class Claim:
    """Requirements on a model compared with another one on the same problems."""

    target: tuple[str, ...]
    min_gain: float | None
    """None where it need not be better, only not worse."""
    margin: float
    level: float
    formatting_counts: bool = False


@dataclass(frozen=True)
class ChampionOutcomes:
    """The current champion, and how it answered the same problems."""

    tag: str
    outcomes: Mapping[str, Outcome]
    """Nothing where it cannot be compared."""
    remark: str = ""
    """Why it cannot or need not be compared."""
    is_same: bool = False
    """Whether it has the very weights that are judged."""


@dataclass(frozen=True)
class GateContext:
    """Input of the gate besides the answers of SFT and GRPO."""

    training: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of the end of training that `gate.health` may limit, None for what was not measured."""
    champion: ChampionOutcomes | None = None
    split: Split = Split.TEST
    test_set: str = ""
    """Digest of the problems."""
    looks: int = 0
    """Other policies that were judged on these problems before."""


def decide(outcomes: Mapping[str, Outcome], gate: GateConfig, context: GateContext = GateContext()) -> Verdict:
    """Return the verdict on the outcomes of SFT and GRPO by source."""
    configured, gate = gate, with_targets(gate, outcomes)
    unknown = [source for source in gate.target if source not in outcomes]
    if unknown:
        raise PipelineError(
            f'report.gate.target: no test problem comes from "{unknown[0]}"; '
            f"sources with test problems: {', '.join(outcomes)}"
        )
    sources = compare(outcomes, claim_of(gate), first="sft")
    conditions = health(outcomes, gate.health, context.training)
    looks = None
    if context.split == Split.TEST:
        number = context.looks + 1
        chance = 1 - (1 - gate.max_p_value) ** number
        looks = {"test_set": context.test_set, "number": number, "false_promotion": chance}
    else:  # problems that tuning may use any number of times decide nothing
        conditions.append(_condition("split of the problems", str(context.split), str(Split.TEST), False))
    champion = against(context.champion, gate) if context.champion else None
    parts = (*sources, *conditions, *([champion] if champion else []))
    missed = [part["reason"] for part in parts if not part["passed"]]
    pooled = PairedCounts(*map(sum, zip(*(astuple(outcomes[source].counts) for source in gate.target), strict=True)))
    return {
        "passed": not missed,
        "enforced": gate.enforce,
        "reasons": missed,
        "gate": configured.model_dump(mode="json"),
        # The figures of all targets together, for headlines: nothing is decided on them.
        "target": {"source": " + ".join(gate.target), "sources": list(gate.target), **_figures(pooled, "sft")},
        "sources": sources,
        "health": conditions,
        "champion": champion,
        "looks": looks,
        "power": {"passable": _passable(outcomes, gate)},
    }


def with_targets(gate: GateConfig, sources: Iterable[str]) -> GateConfig:
    """Return a gate that names its targets: all sources where it names none."""
    return gate if gate.target else gate.model_copy(update={"target": tuple(sources)})


def claim_of(gate: GateConfig) -> Claim:
    """Return the gate's requirements on the policy compared with SFT."""
    return Claim(gate.target, gate.min_gain, gate.margin, gate.max_p_value, gate.formatting_counts)


def compare(outcomes: Mapping[str, Outcome], claim: Claim, *, first: str) -> list[dict[str, Any]]:
    """Return figures and decision for each source, the targets first; `first` names the model compared with."""
    targets = {source: outcomes[source] for source in claim.target if source in outcomes}
    p_values = {source: claim_p(outcome, claim) for source, outcome in targets.items()}
    levels = holm_levels(p_values, claim.level) if claim.min_gain is not None else {}
    ordered = {**targets, **outcomes}
    parts = [_judge(source, ordered[source], claim, levels.get(source), first) for source in ordered]
    # One target suffices; where none improved, all of them are at fault. `improved` is None where it is not asked for.
    improved = any(part["improved"] for part in parts)
    return [{**part, "passed": part["not_worse"] and (improved or part["improved"] is None)} for part in parts]


def claim_p(outcome: Outcome, claim: Claim) -> float:
    """Return the p-value of the claim to be better: the largest of the tests' p-values, which all must be small."""
    tests = [mcnemar_p(outcome.counts)]
    if claim.min_gain:
        tests.append(paired_gain_p(outcome.counts, claim.min_gain))
    if outcome.answered and not claim.formatting_counts:
        tests.append(mcnemar_p(outcome.answered))
    return max(tests)


def is_not_worse(counts: PairedCounts, claim: Claim) -> bool:
    """Whether a loss of the margin or more is excluded; a margin of 1 excludes nothing and is always met."""
    return claim.margin >= 1 or paired_gain_p(counts, -claim.margin) <= claim.level


def _judge(source: str, outcome: Outcome, claim: Claim, level: float | None, first: str) -> dict[str, Any]:
    """Decide one source; `level` is that of the claim to be better, None without such a claim."""
    counts = outcome.counts
    bound = paired_gain_bound(counts, claim.level)
    part = {
        "source": source,
        **_figures(counts, first),
        "level": level,
        "min_gain": claim.min_gain if level is not None else None,
        "gain_bound": paired_gain_bound(counts, level) if level else None,
        "margin": claim.margin,
        "lower_bound": bound,
        "improved": None if level is None else claim_p(outcome, claim) <= level,
        "not_worse": is_not_worse(counts, claim),
        "truncated": {first: outcome.truncated[0], "grpo": outcome.truncated[1]},
        "unscorable": {first: outcome.unscorable[0], "grpo": outcome.unscorable[1]},
        "answered": _in_short(outcome.answered),
        "flexible": _in_short(outcome.flexible),
    }
    return {**part, "reason": _reason(part, claim)}


def _figures(counts: PairedCounts, first: str) -> dict[str, Any]:
    return {
        first: score(counts.both + counts.only_first, counts.total),
        "grpo": score(counts.both + counts.only_second, counts.total),
        "gain": counts.gain,
        "gain_interval": list(paired_gain_interval(counts)),
        f"only_{first}_right": counts.only_first,
        "only_grpo_right": counts.only_second,
        "p_value": mcnemar_p(counts),
    }


def _in_short(counts: PairedCounts | None) -> dict[str, Any] | None:
    if counts is None or not counts.total:
        return None
    return {"total": counts.total, "gain": counts.gain, "p_value": mcnemar_p(counts)}


def _reason(part: Mapping[str, Any], claim: Claim) -> str:
    """One line with what was measured and what was required."""
    source, changed = part["source"], points(part["gain"])
    if part["level"] is None:
        bound = _bound(part["lower_bound"], claim.level, -claim.margin)
        return f"{source}: changed by {changed} points, {bound}"
    verb = f"{'gained' if part['gain'] >= 0 else 'lost'} {abs(100 * part['gain']):.1f}"
    if part["level"] == 0:
        text = f"{source}: {verb} points, not tested, since another target failed with a smaller p-value"
    else:
        text = (
            f"{source}: {verb} points, {_bound(part['gain_bound'], part['level'], part['min_gain'])}, "
            f"p = {probability(part['p_value'])} (at most {part['level']:.2g} allowed)"
        )
    answered = part["answered"]
    if answered and not claim.formatting_counts and answered["p_value"] > part["level"] >= part["p_value"]:
        text += (
            f"; of the {answered['total']:,} problems that both models answered {points(answered['gain'])} points, "
            f"p = {probability(answered['p_value'])}"
        )
    return text if part["not_worse"] else f"{text}; a loss of {100 * claim.margin:.1f} points is not excluded"


def _bound(bound: float, level: float, required: float) -> str:
    return f"lower {100 * (1 - level):g} % bound {points(bound)} (at least {points(required)} required)"


def against(champion: ChampionOutcomes, gate: GateConfig) -> dict[str, Any]:
    """Return figures and decision for a policy compared with the champion."""
    limits = gate.champion
    claim = Claim(gate.target, limits.min_gain, limits.margin, gate.max_p_value, gate.formatting_counts)
    sources = compare(champion.outcomes, claim, first="champion")
    missed = [part["reason"] for part in sources if not part["passed"]]
    passed = not missed and (bool(sources) or champion.is_same or limits.if_incomparable == "pass")
    reason = "; ".join(missed or [champion.remark or part["reason"] for part in sources] or [champion.remark])
    return {
        "tag": champion.tag,
        "comparable": bool(sources),
        "is_same": champion.is_same,
        "remark": champion.remark,
        "sources": sources,
        "passed": passed,
        "reason": f"champion {champion.tag}: {reason}",
    }


def _passable(outcomes: Mapping[str, Outcome], gate: GateConfig) -> bool:
    """Whether a policy could have passed that solves all problems: not where SFT left too few unsolved."""
    perfect = {}
    for source, outcome in outcomes.items():
        solved = outcome.counts.both + outcome.counts.only_first
        perfect[source] = Outcome(PairedCounts(solved, 0, outcome.counts.total - solved, 0))
    return all(part["passed"] for part in compare(perfect, claim_of(gate), first="sft"))


def health(
    outcomes: Mapping[str, Outcome], limits: HealthConfig, training: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Return each condition on the policy's answers to a source and on the end of its training."""
    conditions = []
    for source, outcome in outcomes.items():
        for name, number, limit in (
            ("truncated", outcome.truncated[1], limits.max_truncated_fraction),
            ("unscorable", outcome.unscorable[1], limits.max_unscorable_fraction),
        ):
            value = number / outcome.counts.total
            required = f"at most {percent(limit)}"
            conditions.append(_condition(f"{source}: {name} answers", percent(value), required, value <= limit))
    for key, _, name, kind in TRAINING_FIGURES:
        limit, figure = getattr(limits, f"{kind}_{key}"), training.get(key)
        if limit is None:
            continue
        passed = figure is not None and (figure <= limit if kind == "max" else figure >= limit)
        measured = "not recorded" if figure is None else f"{figure:.3g}"
        required = f"{'at most' if kind == 'max' else 'at least'} {limit:g}"
        conditions.append(_condition(f"{name} at the end of training", measured, required, passed))
    return conditions


def _condition(name: str, measured: str, required: str, passed: bool) -> dict[str, Any]:
    reason = f"{name}: {measured} ({required} required)"
    return {"name": name, "measured": measured, "required": required, "passed": passed, "reason": reason}
