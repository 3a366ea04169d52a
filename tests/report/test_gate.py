"""The promotion gate on paired answers counted by hand, and on thousands of simulated runs."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.preflight.config import load_params
from components.report.config import GateConfig
from components.report.findings import Pair, Record, end_of_training, outcomes_of
from components.report.gate import ChampionOutcomes, GateContext, Outcome, decide
from components.report.power import MIN_POWER, enough_problems, power, weakness
from components.shared import statistics
from components.shared.errors import PipelineError
from components.shared.problem import Split
from components.shared.statistics import PairedCounts, paired_gain_bound, paired_gain_interval
from tests.presets import FILES

GATE = GateConfig(target=("words",), max_p_value=0.05, margin=0.1)
NUM_RUNS = 4_000


def outcome(*, both: int = 0, only_sft: int = 0, only_grpo: int = 0, neither: int = 0) -> Outcome:
    """That many problems with each outcome."""
    return Outcome(PairedCounts(both, only_sft, only_grpo, neither))


def gate(**changes: Any) -> GateConfig:
    """The gate with some keys changed."""
    return GateConfig.model_validate({**GATE.model_dump(), **changes})


CLEAR = outcome(both=50, only_sft=5, only_grpo=20, neither=25)


def test_clear_gain_passes_with_its_figures() -> None:
    """Twenty newly right against five newly wrong out of a hundred: 15 points, exact one-sided p 0.0020."""
    verdict = decide({"words": CLEAR}, GATE)
    (part,) = verdict["sources"]
    assert verdict["passed"]
    assert verdict["enforced"]
    assert verdict["reasons"] == []
    assert verdict["gate"] == GATE.model_dump(mode="json")
    assert (part["gain"], part["only_sft_right"], part["only_grpo_right"]) == (0.15, 5, 20)
    assert part["p_value"] == pytest.approx(0.002039, abs=1e-6)
    assert (part["sft"]["correct"], part["grpo"]["correct"], part["grpo"]["total"]) == (55, 70, 100)
    assert part["gain_interval"] == list(paired_gain_interval(CLEAR.counts))
    assert part["lower_bound"] == part["gain_bound"] == paired_gain_bound(CLEAR.counts, 0.05)


@pytest.mark.parametrize(
    ("only_sft", "only_grpo", "min_gain", "passed"),
    [
        (5, 20, 0.05, True),  # at least 6.1 points
        (5, 20, 0.1, False),  # 15 measured, and less than 10 possible
        (0, 5, 0.0, True),  # 1 / 32
        (0, 4, 0.0, False),  # 1 / 16
        (30, 40, 0.0, False),  # ten points that chance explains
        (20, 5, 0.0, False),  # significant, and for the worse
    ],
)
def test_target_needs_a_lower_bound_of_its_gain(only_sft: int, only_grpo: int, min_gain: float, passed: bool) -> None:
    """The measured gain is not enough, and the reason has both figures with what is required."""
    counts = outcome(both=10, only_sft=only_sft, only_grpo=only_grpo, neither=90 - only_sft - only_grpo)
    verdict = decide({"words": counts}, gate(min_gain=min_gain))
    assert verdict["sources"][0]["improved"] is passed
    assert verdict["passed"] is passed
    if not passed:
        assert f"(at least {'+10.0' if min_gain else '0.0'} required)" in verdict["reasons"][0]
        assert "at most 0.05 allowed" in verdict["reasons"][0]


def test_no_source_may_get_worse_by_the_margin() -> None:
    """What counts is the lower bound: with few problems a loss is possible even if none was measured."""
    many = decide({"words": CLEAR, "math": outcome(both=500, only_sft=20, only_grpo=20, neither=460)}, GATE)
    few = decide({"words": CLEAR, "math": outcome(both=5, only_sft=1, only_grpo=1, neither=3)}, GATE)
    assert many["passed"]
    assert many["sources"][1]["lower_bound"] > -0.1
    assert few["sources"][1]["gain"] == 0
    assert few["sources"][1]["lower_bound"] < -0.1
    assert not few["passed"]
    assert few["sources"][0]["passed"]
    assert few["reasons"] == [few["sources"][1]["reason"]]
    assert few["reasons"][0].startswith("math: ")
    # Pooled it might pass, here the loss is named.
    loss = outcome(both=250, only_sft=40, only_grpo=15, neither=195)
    (reason,) = decide({"words": CLEAR, "math": loss}, gate(target=("words", "math"), margin=0.02))["reasons"]
    assert reason.startswith("math: lost 5.0 points, ")
    assert reason.endswith("a loss beyond the margin of 2.0 points is not excluded")


def test_one_improved_target_suffices_at_the_level_that_holm_leaves() -> None:
    """The better one of two is tested at half the level, and the other one at the whole of it if that passes."""
    strong, weak = outcome(only_sft=5, only_grpo=20, both=475), outcome(only_sft=8, only_grpo=17, both=475)
    none = outcome(only_sft=10, only_grpo=10, both=480)
    two = gate(target=("a", "b"))
    both, one, neither = (decide({"a": first, "b": weak}, two) for first in (strong, none, weak))
    assert [part["level"] for part in both["sources"]] == [0.025, 0.05]
    assert [part["improved"] for part in both["sources"]] == [True, False]  # p = 0.054
    assert both["passed"]
    assert not one["passed"]  # 0.054 is above 0.025
    assert [part["level"] for part in one["sources"]] == [0.0, 0.025]
    assert len(one["reasons"]) == len(neither["reasons"]) == 2


def test_targets_are_pooled_for_headlines_only() -> None:
    """The pooled figures count each problem once; the verdict has every source."""
    outcomes = {"a": outcome(only_grpo=6, neither=4), "b": outcome(only_sft=1, only_grpo=2, neither=27)}
    verdict = decide(outcomes, gate(target=("a", "b")))
    target = verdict["target"]
    assert (target["gain"], target["sft"]["accuracy"], target["grpo"]["accuracy"]) == (7 / 40, 1 / 40, 8 / 40)
    assert (target["source"], target["sources"]) == ("a + b", ["a", "b"])


def test_gate_without_targets_has_all_sources_as_targets() -> None:
    """In the verdict, which keeps the gate as it was configured, and in the power."""
    outcomes, sizes = {"words": CLEAR, "b": outcome(both=80, only_grpo=5, neither=15)}, {"words": 300, "b": 300}
    implicit, explicit = decide(outcomes, gate(target=())), decide(outcomes, gate(target=("words", "b")))
    assert implicit.pop("gate")["target"] == []
    assert explicit.pop("gate")["target"] == ["words", "b"]
    assert implicit == explicit
    assert weakness(gate(target=()), sizes) == weakness(gate(target=("words", "b")), sizes)
    assert power(gate(target=("words", "b")), sizes) != power(gate(target=("words",)), sizes)


def test_target_without_problems_is_an_error() -> None:
    """A misspelt source must not make the gate pass on nothing."""
    with pytest.raises(PipelineError, match=r'gate\.target: no test problem comes from "word"; .*: words, math'):
        decide({"words": CLEAR, "math": CLEAR}, gate(target=("word",)))


def pair(sft: str, grpo: str, *, sft_finished: bool = True, grpo_finished: bool = True) -> Pair:
    """One problem with the verdicts on the answers of both models."""
    values: dict[str, Any] = {"id": "1", "source": "words", "question": "q", "answer": "1", "sample": 0}
    values |= {"response": "#### 1", "num_tokens": 3, "worked": False}
    first = Record(**values, verdict=sft, finished=sft_finished)
    return Pair(first, Record(**values, verdict=grpo, finished=grpo_finished))


def test_learning_to_finish_is_no_gain_in_reasoning() -> None:
    """Forty answers were truncated and are right now that they end; where both models answered nothing changed."""
    pairs = [pair("wrong", "right", sft_finished=False)] * 40 + [pair("right", "right")] * 50
    pairs += [pair("right", "wrong")] * 5 + [pair("wrong", "right")] * 5
    outcomes = outcomes_of(pairs)
    assert outcomes["words"].truncated == (40, 0)
    assert outcomes["words"].answered == PairedCounts(50, 5, 5, 0)
    verdict = decide(outcomes, GATE)
    assert not verdict["passed"]
    assert "of the 60 problems that both models answered 0.0 points, p = 0.623" in verdict["reasons"][0]
    assert decide(outcomes, gate(formatting_counts=True))["passed"]


def test_unscorable_answer_is_not_right_and_is_counted() -> None:
    """An answer that could not be graded earns nothing, and too many of the policy's miss the gate."""
    pairs = [pair("unscorable", "right"), pair("right", "unscorable")]
    (part,) = (verdict := decide(outcomes_of(pairs), GATE))["sources"]
    assert (part["sft"]["correct"], part["grpo"]["correct"], part["gain"]) == (1, 1, 0.0)
    assert part["unscorable"] == {"sft": 1, "grpo": 1}
    assert part["answered"] is None
    assert any(reason.startswith("words: unscorable answers: 50.0") for reason in verdict["reasons"])


@pytest.mark.parametrize(
    ("limits", "training", "missed"),
    [
        ({}, {}, None),
        ({"max_kl": 0.2}, {"kl": 0.1}, None),
        ({"max_kl": 0.2}, {"kl": 0.3}, "KL from the reference at the end of training: 0.3 (at most 0.2 allowed)"),
        ({"max_kl": 0.2}, {"kl": None}, "KL from the reference at the end of training: not recorded (at most 0.2 "),
        ({"min_entropy": 0.1}, {"entropy": 0.01}, "entropy of the policy at the end of training: 0.01 (at least 0.1 "),
        ({"max_sampler_mismatch": 0.01}, {"sampler_mismatch": 0.02}, "mismatch of sampler and trainer"),
        ({"max_completion_tokens": 100.0}, {"completion_tokens": 101.0}, "mean completion length in tokens"),
    ],
)
def test_an_unhealthy_run_misses_the_gate(
    limits: Mapping[str, float], training: Mapping[str, float | None], missed: str | None
) -> None:
    """However much better the policy answers; what a limit is set for must have been recorded."""
    verdict = decide({"words": CLEAR}, gate(health=limits), GateContext(training))
    assert verdict["passed"] is (missed is None)
    assert [reason.startswith(missed or "") for reason in verdict["reasons"]] == [True] * (missed is not None)


def test_figures_of_training_are_means_of_its_last_tenth() -> None:
    """Steps that recorded nothing do not count."""
    steps = [{"kl": float(number), "entropy": 1.0, "completion_length_tokens": 10.0} for number in range(30)]
    steps[-1]["entropy"] = None  # type: ignore[assignment]
    figures = end_of_training(steps)
    assert figures == {"kl": 28.0, "entropy": 1.0, "completion_tokens": 10.0, "sampler_mismatch": None}


@pytest.mark.parametrize(
    ("counts", "champion", "passed", "reason"),
    [
        (CLEAR, {}, True, "words: changed by +15.0 points"),
        (outcome(both=50, only_sft=20, only_grpo=20, neither=10), {}, False, "at least \N{MINUS SIGN}5.0 required"),
        (outcome(both=50, only_sft=20, only_grpo=20, neither=10), {"margin": 1.0}, True, "changed by 0.0 points"),
        (outcome(both=490, only_sft=5, only_grpo=5), {"min_gain": 0.0}, False, "gained 0.0 points"),
        (None, {}, True, "not comparable"),
        (None, {"if_incomparable": "miss"}, False, "not comparable"),
        (None, {"if_incomparable": "miss", "min_gain": 0.1}, True, "the same weights"),
    ],
)
def test_policy_must_not_be_worse_than_the_champion(
    counts: Outcome | None, champion: dict[str, Any], passed: bool, reason: str
) -> None:
    """Better than SFT is not enough; whether it has to be better than the champion, too, is for the params to say.

    The champion itself is not worse than itself, on however few problems: there is nothing to estimate.
    """
    is_same = reason == "the same weights"
    current = ChampionOutcomes("m@v0.0.1", {"words": counts} if counts else {}, "" if counts else reason, is_same)
    verdict = decide({"words": CLEAR}, gate(champion=champion), GateContext(champion=current))
    assert verdict["sources"][0]["passed"]
    assert verdict["passed"] is verdict["champion"]["passed"] is passed
    assert verdict["champion"]["comparable"] is (counts is not None)
    assert verdict["champion"]["reason"].startswith("champion m@v0.0.1: ")
    assert reason in verdict["champion"]["reason"]
    assert verdict["reasons"] == ([] if passed else [verdict["champion"]["reason"]])


def test_looks_at_the_test_problems_add_up() -> None:
    """If eight policies are no better, one passes at 5 % in up to a third of the cases; dev costs nothing."""
    looks = decide({"words": CLEAR}, GATE, GateContext(test_set="ab", num_earlier_policies=7))["looks"]
    assert looks == {"test_set": "ab", "number": 8, "false_promotion": pytest.approx(1 - 0.95**8)}
    on_dev = decide({"words": CLEAR}, GATE, GateContext(split=Split.DEV))
    assert on_dev["looks"] is None
    assert on_dev["reasons"] == ["split of the problems: dev (test required)"]


def test_gate_that_no_policy_could_have_passed_says_so() -> None:
    """SFT solved 97 of 100: three more are not enough."""
    full, room = outcome(both=97, only_grpo=3), outcome(both=90, only_grpo=10)
    assert not decide({"words": full}, GATE)["power"]["passable"]
    assert decide({"words": room}, GATE)["power"]["passable"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_presets_ask_for_evidence_and_refuse_contaminated_data(path: Path) -> None:
    """Chance explains a promotion in one case of twenty at most, losses are small, copies of test problems go."""
    params = load_params(path)
    gate, contamination = params.report.gate, params.prepare_data.contamination
    assert 0 < gate.max_p_value <= 0.05
    assert 0 <= gate.min_gain <= 0.2
    assert 0 < gate.margin <= (0.05 if gate.enforce else 0.1)
    assert 0 < contamination.max_overlap <= 0.5
    assert 8 <= contamination.ngram_words <= 13


def test_only_presets_that_promote_nothing_go_without_the_gate() -> None:
    """A gate that is not enforced is for trying out, under a name that nobody takes for a release."""
    registered = {path.stem: load_params(path) for path in FILES}
    unenforced = {name for name, params in registered.items() if not params.report.gate.enforce}
    assert unenforced == {"smoke", "gsm8k-math"}
    names = [params.register.name for params in registered.values()]
    assert sorted(names) == sorted(set(names))


# Simulated runs -------------------------------------------------------------------------------------------------------


def promoted(config: GateConfig, seed: int = 0, **sources: tuple[int, float, float]) -> float:
    """Return the fraction of simulated runs that pass.

    Of each source its number of problems, and the probabilities of each of them to be gained and to be lost.
    """
    rng = np.random.default_rng(seed)
    drawn = {
        name: rng.multinomial(total, (gained, lost, 1 - gained - lost), NUM_RUNS).tolist()
        for name, (total, gained, lost) in sources.items()
    }

    @cache
    def passes(runs: tuple[tuple[int, int, int], ...]) -> bool:
        outcomes = {
            name: outcome(only_grpo=gained, only_sft=lost, neither=rest)
            for name, (gained, lost, rest) in zip(drawn, runs, strict=True)
        }
        return bool(decide(outcomes, config)["passed"])

    runs = zip(*([tuple(each) for each in numbers] for numbers in drawn.values()), strict=True)
    with pytest.MonkeyPatch.context() as patch:  # figures that nothing is decided on take most of the time
        patch.setattr("components.report.gate.paired_gain_bound", lambda *_: 0.0)
        patch.setattr("components.report.gate.paired_gain_interval", lambda *_: (0.0, 0.0))
        return sum(passes(run) for run in runs) / NUM_RUNS


TOLERANCE = 3 * (0.05 * 0.95 / NUM_RUNS) ** 0.5
"""Three standard errors of a rate of 5 % over the simulated runs."""


@pytest.fixture(autouse=True)
def _memoised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated runs of one size have few different counts."""
    for name in ("mcnemar_p", "paired_gain_p"):
        monkeypatch.setattr(f"components.report.gate.{name}", cache(getattr(statistics, name)))


@pytest.mark.parametrize(
    ("num_problems", "changed", "max_p_value"),
    [(60, 0.02, 0.05), (60, 0.3, 0.05), (200, 0.1, 0.01), (600, 0.002, 0.05), (1319, 0.5, 0.05)],
)
def test_policy_that_is_not_better_is_promoted_at_most_as_often_as_stated(
    num_problems: int, changed: float, max_p_value: float
) -> None:
    """With few and with many answers that change, as near a ceiling or a floor."""
    config = gate(max_p_value=max_p_value, margin=0.5)
    rate = promoted(config, words=(num_problems, changed / 2, changed / 2))
    assert rate <= max_p_value + TOLERANCE
    if num_problems * changed > 50 and max_p_value == 0.05:
        assert rate > 0.02  # nor is the test so cautious that it has no power


def test_policy_that_gains_just_the_minimum_is_promoted_at_most_as_often_as_stated() -> None:
    """A measured gain of `min_gain` would pass in half of the runs; a lower bound there passes in one of twenty."""
    for num_problems, lost in ((200, 0.0), (1319, 0.02)):
        rate = promoted(gate(min_gain=0.05), words=(num_problems, lost + 0.05, lost))
        assert 0 < rate <= 0.05 + TOLERANCE


def test_several_targets_are_promoted_no_more_often_than_one() -> None:
    """One of three targets suffices, and Holm's correction pays for that."""
    config = gate(target=("a", "b", "c"), margin=0.5)
    assert promoted(config, a=(300, 0.05, 0.05), b=(300, 0.1, 0.1), c=(100, 0.2, 0.2)) <= 0.05 + TOLERANCE


def test_source_that_is_worse_by_the_margin_is_overlooked_at_most_as_often_as_stated() -> None:
    """However much a target gains; and a loss of five points beside a gain of five is promoted hardly ever."""
    config = gate(margin=0.02)
    assert promoted(config, words=(300, 0.3, 0.01), other=(1319, 0.03, 0.05)) <= 0.05 + TOLERANCE
    both = gate(target=("gsm8k", "math"), margin=0.02)
    assert promoted(both, gsm8k=(1319, 0.1, 0.05), math=(500, 0.05, 0.1)) <= 0.001


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (gate(margin=0.02), {"words": 500}),
        (gate(margin=0.02, expected_lost_fraction=0.0), {"words": 300}),  # every answer that changes is gained
        (gate(margin=0.02, min_gain=0.02, max_p_value=0.01, expected_gain=0.08), {"words": 1000}),
        (gate(margin=0.02), {"words": 1319, "other": 1000}),
        (gate(margin=0.1, target=("words", "math")), {"words": 200, "math": 200}),  # Holm's first level decides
    ],
)
def test_power_is_the_rate_at_which_simulated_policies_pass(config: GateConfig, sizes: dict[str, int]) -> None:
    """With the gate itself, for one source and several, as exactly as so many runs can tell."""
    lost, gained = config.expected_lost_fraction, config.expected_lost_fraction + config.expected_gain
    sources = {name: (size, gained if name in config.target else lost, lost) for name, size in sizes.items()}
    rate = promoted(config, 0, **sources)
    assert power(config, sizes) == pytest.approx(rate, abs=3 * max(rate * (1 - rate) / NUM_RUNS, 1e-6) ** 0.5)


def test_enough_problems_are_enough_and_hardly_more() -> None:
    """A tenth fewer are not, and the message names them."""
    config = gate(margin=0.02, target=("gsm8k",))
    sizes = {"gsm8k": 100, "math": 200}
    enough = enough_problems(config, sizes)
    assert power(config, enough) >= MIN_POWER
    assert power(config, {source: int(0.9 * size) for source, size in enough.items()}) < MIN_POWER
    message = weakness(config, sizes)
    assert message is not None
    assert f"{enough['gsm8k']:,} test problems in `gsm8k` and {enough['math']:,} test problems in `math`" in message
    assert weakness(config, enough) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_gain": 0.05}, "cannot be passed: expected_gain is +5.0 points, and min_gain asks"),
        ({"expected_sft_accuracy": 0.97}, "cannot be passed: with expected_sft_accuracy 97.0"),
        ({"expected_sft_accuracy": 0.02}, "cannot be passed: with expected_sft_accuracy 2.0"),
        ({"margin": 0.0, "target": ("b",)}, "no number of test problems would do"),
    ],
)
def test_gate_that_cannot_be_passed_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """Near a ceiling, at a gain below the minimum, and without any margin for a source that stays as it is."""
    monkeypatch.setattr("components.report.power._MAX_PROBLEMS", 20_000)
    assert message in str(weakness(gate(**changes), {"words": 300, "b": 300}))
