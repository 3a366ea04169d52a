"""The promotion gate: is GRPO better than the SFT model it started from, and worse nowhere?

Both models answer the same problems greedily, so the comparison is paired: the gate reads only how many problems both,
one or neither of them got right. All tests are one-sided at the level `max_p_value`:

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

TRAINING_FIGURES = (
    ("sampler_mismatch", "sampler_mismatch", "mismatch of sampler and trainer", "max"),
    ("entropy", "entropy", "entropy of the policy", "min"),
    ("kl", "kl", "KL from the reference", "max"),
    ("completion_tokens", "completion_length_tokens", "mean completion length in tokens", "max"),
)
"""Figures of training that `gate.health` may limit: rest of its key, column of steps.jsonl, name, `max` or `min`."""


@dataclass(frozen=True)
class Outcome:
    """How two models answered the test problems of one source."""

    counts: PairedCounts
    answered: PairedCounts | None = None
    """Problems that both answered with finished and scorable text; None if these are all."""
    flexible: PairedCounts | None = None
    """All problems under flexible extraction, for the report only; None for outcomes that are only assumed."""
    truncated: tuple[int, int] = (0, 0)
    """Answers of each model that reached the token limit."""
    unscorable: tuple[int, int] = (0, 0)
    """Answers of each model that the grader could not score."""


@dataclass(frozen=True)
class ChampionOutcomes:
    """The current champion, and how it answered the same problems."""

    tag: str
    outcomes: Mapping[str, Outcome]
    """By source; empty if it cannot or need not be compared."""
    remark: str = ""
    """Why it cannot or need not be compared."""
    is_same: bool = False
    """Whether it has the weights that are judged."""


@dataclass(frozen=True)
class GateContext:
    """Input of the gate besides the answers of SFT and GRPO."""

    training: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of the end of training that `gate.health` may limit; None if not measured."""
    champion: ChampionOutcomes | None = None
    split: Split = Split.TEST
    test_set: str = ""
    """Digest of the problems."""
    num_earlier_policies: int = 0
    """Number of other policies that were judged on these problems before."""


def decide(outcomes: Mapping[str, Outcome], gate: GateConfig, context: GateContext = GateContext()) -> dict[str, Any]:
    """Return the verdict on the outcomes of SFT and GRPO by source, as in verdict.json."""
    configured, gate = gate, with_targets(gate, outcomes)
    unknown = [source for source in gate.target if source not in outcomes]
    if unknown:
        raise PipelineError(
            f'report.gate.target: no test problem comes from "{unknown[0]}"; '
            f"sources with test problems: {', '.join(outcomes)}"
        )
    sources = compare(outcomes, gate, first="sft")
    conditions = health(outcomes, gate.health, context.training)
    test_set_use = None
    if context.split == Split.TEST:
        number = context.num_earlier_policies + 1
        chance = 1 - (1 - gate.max_p_value) ** number  # that one of them passes although none is better
        test_set_use = {"test_set": context.test_set, "number": number, "false_promotion": chance}
    else:  # tuning may have used these problems any number of times
        conditions.append(_condition("split of the problems", str(context.split), str(Split.TEST), False))
    champion = compare_with_champion(context.champion, gate) if context.champion else None
    parts = [*sources, *conditions, *([champion] if champion else [])]
    missed = [part["reason"] for part in parts if not part["passed"]]
    target_counts = [astuple(outcomes[source].counts) for source in gate.target]
    pooled = PairedCounts(*(sum(numbers) for numbers in zip(*target_counts, strict=True)))
    return {
        "passed": not missed,
        "enforced": gate.enforce,
        "reasons": missed,
        "gate": configured.model_dump(mode="json"),
        # All targets together, for headlines; no condition.
        "target": {"source": " + ".join(gate.target), "sources": list(gate.target), **figures(pooled, "sft", "grpo")},
        "sources": sources,
        "health": conditions,
        "champion": champion,
        "looks": test_set_use,
        "power": {"passable": _passable(outcomes, gate)},
    }


def with_targets(gate: GateConfig, sources: Iterable[str]) -> GateConfig:
    """Return the gate, with all sources as targets if it names none."""
    return gate if gate.target else gate.model_copy(update={"target": tuple(sources)})


def compare(
    outcomes: Mapping[str, Outcome], gate: GateConfig, *, first: str, needs_gain: bool = True
) -> list[dict[str, Any]]:
    """Return figures and decision for each source, the targets first; `first` is the key of the other model.

    Without `needs_gain`, the policy only has to be not worse. Empty without outcomes, as of a champion that cannot be
    compared.
    """
    targets = {source: outcomes[source] for source in gate.target if source in outcomes}
    levels: dict[str, float] = {}
    if needs_gain:
        p_values = {source: gain_p(outcome, gate) for source, outcome in targets.items()}
        levels = holm_levels(p_values, gate.max_p_value)
    targets_first = {**targets, **outcomes}
    parts = [_judge(source, outcome, gate, levels.get(source), first) for source, outcome in targets_first.items()]
    # One improved target suffices; if there is none, all targets fail. `improved` is None for other sources.
    any_improved = any(part["improved"] for part in parts)
    for part in parts:
        part["passed"] = part["not_worse"] and (any_improved or part["improved"] is None)
    return parts


def gain_p(outcome: Outcome, gate: GateConfig) -> float:
    """Return the p-value of the claim that the policy is better: the largest one of tests that must all reject."""
    tests = [mcnemar_p(outcome.counts)]
    if gate.min_gain:
        tests.append(paired_gain_p(outcome.counts, gate.min_gain))
    if outcome.answered and not gate.formatting_counts:
        tests.append(mcnemar_p(outcome.answered))
    return max(tests)


def is_not_worse(counts: PairedCounts, gate: GateConfig) -> bool:
    """Return whether a loss of the margin or more is excluded; a margin of 1 means no requirement."""
    return gate.margin >= 1 or paired_gain_p(counts, -gate.margin) <= gate.max_p_value


def _judge(source: str, outcome: Outcome, gate: GateConfig, level: float | None, first: str) -> dict[str, Any]:
    """Return figures and decision for one source; `level` is the level of the test for a gain, None without a test.

    Holm's procedure gives the level 0 to a target that it does not test.
    """
    counts = outcome.counts
    part = {
        "source": source,
        **figures(counts, first, "grpo"),
        "level": level,
        "min_gain": gate.min_gain if level is not None else None,
        "gain_bound": paired_gain_bound(counts, level) if level else None,
        "margin": gate.margin,
        "lower_bound": paired_gain_bound(counts, gate.max_p_value),
        "improved": None if level is None else gain_p(outcome, gate) <= level,
        "not_worse": is_not_worse(counts, gate),
        "truncated": {first: outcome.truncated[0], "grpo": outcome.truncated[1]},
        "unscorable": {first: outcome.unscorable[0], "grpo": outcome.unscorable[1]},
        "answered": _gain(outcome.answered),
        "flexible": _gain(outcome.flexible),
    }
    return {**part, "reason": _reason(part, gate, other="SFT" if first == "sft" else f"the {first}")}


def figures(counts: PairedCounts, first: str, second: str) -> dict[str, Any]:
    """Return the scores of two models, whose keys are `first` and `second`, and the gain of the second one."""
    return {
        first: score(counts.both + counts.only_first, counts.total),
        second: score(counts.both + counts.only_second, counts.total),
        "gain": counts.gain,
        "gain_interval": list(paired_gain_interval(counts)),
        f"only_{first}_right": counts.only_first,
        f"only_{second}_right": counts.only_second,
        "p_value": mcnemar_p(counts),
    }


def _gain(counts: PairedCounts | None) -> dict[str, Any] | None:
    """Return the gain and its p-value on a part of the problems; None without problems."""
    if counts is None or not counts.total:
        return None
    return {"total": counts.total, "gain": counts.gain, "p_value": mcnemar_p(counts)}


def _reason(part: Mapping[str, Any], gate: GateConfig, other: str) -> str:
    """Return how GRPO compares with the other model on a source, with what is required."""
    level, text = part["level"], f"{part['source']}: {points(part['gain'])} points against {other}, "
    if level is None:  # not a target: only a loss is tested
        return text + _bound(part["lower_bound"], gate.max_p_value, -gate.margin)
    loss = "" if part["not_worse"] else f"; below {points(-gate.margin)} a loss beyond the margin is not ruled out"
    if level == 0:  # Holm's procedure stopped before
        text += "not tested, since another target failed with a smaller p-value"
        if loss:
            text += f"; {_bound(part['lower_bound'], gate.max_p_value, -gate.margin)}"
    else:
        bound = _bound(part["gain_bound"], level, part["min_gain"], loss)
        text += f"{bound}, p = {probability(part['p_value'])} (must be at most {level:.2g})"
    answered = part["answered"]
    # Improved on all problems, but not on those that both models answered.
    if answered and not gate.formatting_counts and part["p_value"] <= level < answered["p_value"]:
        text += (
            f"; of the {answered['total']:,} problems that both models answered {points(answered['gain'])} points, "
            f"p = {probability(answered['p_value'])}"
        )
    return text


def _bound(bound: float, level: float, required: float, note: str = "") -> str:
    return f"{100 * (1 - level):g} % lower confidence bound {points(bound)} (must be at least {points(required)}{note})"


def compare_with_champion(champion: ChampionOutcomes, gate: GateConfig) -> dict[str, Any]:
    """Return figures and decision for a policy compared with the champion."""
    limits = gate.champion
    required = gate.model_copy(update={"min_gain": limits.min_gain or 0.0, "margin": limits.margin})
    needs_gain = limits.min_gain is not None
    sources = compare(champion.outcomes, required, first="champion", needs_gain=needs_gain)
    if sources:
        missed = [part["reason"] for part in sources if not part["passed"]]
        passed = not missed
        reasons = missed or [part["reason"] for part in sources]
    else:
        passed = champion.is_same or limits.if_incomparable == "pass"
        reasons = [champion.remark]
    return {
        "tag": champion.tag,
        "comparable": bool(sources),
        "is_same": champion.is_same,
        "remark": champion.remark,
        "sources": sources,
        "passed": passed,
        "reason": f"champion {champion.tag}: {'; '.join(reasons)}",
    }


def _passable(outcomes: Mapping[str, Outcome], gate: GateConfig) -> bool:
    """Return whether any policy could pass: if SFT leaves too few unsolved, even a perfect one fails."""
    perfect = {}
    for source, outcome in outcomes.items():
        solved_by_sft = outcome.counts.both + outcome.counts.only_first
        perfect[source] = Outcome(PairedCounts(solved_by_sft, 0, outcome.counts.total - solved_by_sft, 0))
    return all(part["passed"] for part in compare(perfect, gate, first="sft"))


def health(
    outcomes: Mapping[str, Outcome], limits: HealthConfig, training: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Return the conditions on the policy's answers to each source and on the end of its training."""
    conditions = []
    for source, outcome in outcomes.items():
        for name, (_, num_answers), limit in (
            ("truncated", outcome.truncated, limits.max_truncated_fraction),
            ("unscorable", outcome.unscorable, limits.max_unscorable_fraction),
        ):
            fraction = num_answers / outcome.counts.total
            condition = f"{source}: {name} answers of the policy"
            conditions.append(_condition(condition, percent(fraction), f"at most {percent(limit)}", fraction <= limit))
    for key, _, name, kind in TRAINING_FIGURES:
        limit, figure = getattr(limits, f"{kind}_{key}"), training.get(key)
        if limit is None:
            continue
        required = f"{'at most' if kind == 'max' else 'at least'} {limit:g}"
        measured = "not recorded" if figure is None else f"{figure:.3g}"
        passed = figure is not None and (figure <= limit if kind == "max" else figure >= limit)
        conditions.append(_condition(f"{name} at the end of training", measured, required, passed))
    return conditions


def _condition(name: str, measured: str, required: str, passed: bool) -> dict[str, Any]:
    """Return a condition as in verdict.json; `required` begins with `at most` if it is an upper limit."""
    reason = f"{name}: {measured} ({required} {'allowed' if required.startswith('at most') else 'required'})"
    return {"name": name, "measured": measured, "required": required, "passed": passed, "reason": reason}
