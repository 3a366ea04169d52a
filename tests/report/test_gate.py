"""The promotion gate on paired answers counted by hand, and on thousands of simulated runs."""

from collections.abc import Mapping
from functools import cache
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


def _outcome(*, both: int = 0, only_sft: int = 0, only_grpo: int = 0, neither: int = 0) -> Outcome:
    return Outcome(PairedCounts(both, only_sft, only_grpo, neither))


def _gate(**changes: Any) -> GateConfig:
    return GateConfig.model_validate({**GATE.model_dump(), **changes})


CLEAR = _outcome(both=50, only_sft=5, only_grpo=20, neither=25)


def test_clear_gain_passes_with_its_figures() -> None:
    """Twenty newly right against five newly wrong out of a hundred: 15 points, exact one-sided p 0.0020."""
    verdict = decide({"words": CLEAR}, GATE)
    (part,) = verdict["sources"]
    assert (verdict["passed"], verdict["enforced"], verdict["reasons"]) == (True, True, [])
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
        (20, 5, 0.0, False),  # significant, and for the worse
    ],
)
def test_target_needs_a_lower_bound_of_its_gain(only_sft: int, only_grpo: int, min_gain: float, passed: bool) -> None:
    """The measured gain is not enough, and the reason has both figures with what is required."""
    counts = _outcome(both=10, only_sft=only_sft, only_grpo=only_grpo, neither=90 - only_sft - only_grpo)
    verdict = decide({"words": counts}, _gate(min_gain=min_gain))
    assert verdict["sources"][0]["improved"] is passed
    assert verdict["passed"] is passed
    if not passed:
        assert f"(must be at least {'+10.0' if min_gain else '0.0'}" in verdict["reasons"][0]
        assert "must be at most 0.05" in verdict["reasons"][0]


def test_no_source_may_get_worse_by_the_margin() -> None:
    """What counts is the lower bound: with few problems a loss is possible even if none was measured."""
    many = decide({"words": CLEAR, "math": _outcome(both=500, only_sft=20, only_grpo=20, neither=460)}, GATE)
    few = decide({"words": CLEAR, "math": _outcome(both=5, only_sft=1, only_grpo=1, neither=3)}, GATE)
    assert many["passed"]
    assert few["sources"][1]["gain"] == 0
    assert few["sources"][1]["lower_bound"] < -0.1 < many["sources"][1]["lower_bound"]
    assert [part["passed"] for part in few["sources"]] == [True, False]
    assert few["reasons"] == [few["sources"][1]["reason"]]
    # Pooled it might pass, here the loss is named.
    loss = _outcome(both=250, only_sft=40, only_grpo=15, neither=195)
    (reason,) = decide({"words": CLEAR, "math": loss}, _gate(target=("words", "math"), margin=0.02))["reasons"]
    assert reason.startswith("math: \N{MINUS SIGN}5.0 points against SFT, ")
    assert "(must be at least 0.0; below \N{MINUS SIGN}2.0 a loss beyond the margin is not ruled out), p = " in reason


def test_one_improved_target_suffices_at_the_level_that_holm_leaves() -> None:
    """The better one of two is tested at half the level, and the other one at the whole of it if that passes."""
    strong, weak = _outcome(only_sft=5, only_grpo=20, both=475), _outcome(only_sft=8, only_grpo=17, both=475)
    none = _outcome(only_sft=10, only_grpo=10, both=480)
    two = _gate(target=("a", "b"))
    both, one, neither = (decide({"a": first, "b": weak}, two) for first in (strong, none, weak))
    assert [part["level"] for part in both["sources"]] == [0.025, 0.05]
    assert [part["improved"] for part in both["sources"]] == [True, False]  # p = 0.054
    assert both["passed"]
    assert not one["passed"]  # 0.054 is above 0.025
    assert [part["level"] for part in one["sources"]] == [0.0, 0.025]
    assert len(one["reasons"]) == len(neither["reasons"]) == 2
    assert "not tested, since another target failed with a smaller p-value" in one["reasons"][0]


def test_targets_are_pooled_for_headlines_only() -> None:
    """The pooled figures count each problem once; the verdict has every source."""
    outcomes = {"a": _outcome(only_grpo=6, neither=4), "b": _outcome(only_sft=1, only_grpo=2, neither=27)}
    target = decide(outcomes, _gate(target=("a", "b")))["target"]
    assert (target["gain"], target["sft"]["accuracy"], target["grpo"]["accuracy"]) == (7 / 40, 1 / 40, 8 / 40)
    assert (target["source"], target["sources"]) == ("a + b", ["a", "b"])


def test_gate_without_targets_has_all_sources_as_targets() -> None:
    """In the verdict, which keeps the gate as it was configured, and in the power."""
    outcomes, sizes = {"words": CLEAR, "b": _outcome(both=80, only_grpo=5, neither=15)}, {"words": 300, "b": 300}
    implicit, explicit = decide(outcomes, _gate(target=())), decide(outcomes, _gate(target=("words", "b")))
    assert implicit.pop("gate")["target"] == []
    assert explicit.pop("gate")["target"] == ["words", "b"]
    assert implicit == explicit
    assert weakness(_gate(target=()), sizes) == weakness(_gate(target=("words", "b")), sizes)
    assert power(_gate(target=("words", "b")), sizes) != power(_gate(target=("words",)), sizes)


def test_target_without_problems_is_an_error() -> None:
    """A misspelt source must not make the gate pass on nothing."""
    with pytest.raises(PipelineError, match=r'gate\.target: no test problem comes from "word"; .*: words, math'):
        decide({"words": CLEAR, "math": CLEAR}, _gate(target=("word",)))


def pair(sft: str, grpo: str, *, sft_finished: bool = True, grpo_finished: bool = True) -> Pair:
    """One problem with the verdicts on the answers of both models."""
    values: dict[str, Any] = {"id": "1", "source": "words", "question": "q", "answer": "1", "sample": 0}
    values |= {"response": "#### 1", "num_tokens": 3, "worked": False, "flexible": {"verdict": "wrong"}}
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
    assert decide(outcomes, _gate(formatting_counts=True))["passed"]


def test_unscorable_answer_is_not_right_and_is_counted() -> None:
    """An answer that could not be graded earns nothing, and too many of the policy's miss the gate."""
    pairs = [pair("unscorable", "right"), pair("right", "unscorable")]
    (part,) = (verdict := decide(outcomes_of(pairs), GATE))["sources"]
    assert (part["sft"]["correct"], part["grpo"]["correct"], part["gain"]) == (1, 1, 0.0)
    assert part["unscorable"] == {"sft": 1, "grpo": 1}
    assert part["answered"] is None
    assert any(reason.startswith("words: unscorable answers of the policy: 50.0") for reason in verdict["reasons"])


@pytest.mark.parametrize(
    ("limits", "training", "missed"),
    [
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
    verdict = decide({"words": CLEAR}, _gate(health=limits), GateContext(training))
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
        (CLEAR, {}, True, "words: +15.0 points against the champion"),
        (_outcome(both=50, only_sft=20, only_grpo=20, neither=10), {}, False, "(must be at least \N{MINUS SIGN}5.0)"),
        (_outcome(both=50, only_sft=20, only_grpo=20, neither=10), {"margin": 1.0}, True, " 0.0 points"),
        (_outcome(both=490, only_sft=5, only_grpo=5), {"min_gain": 0.0}, False, " 0.0 points"),
        (None, {}, True, "not comparable"),
        (None, {"if_incomparable": "miss"}, False, "not comparable"),
        (None, {"if_incomparable": "miss", "min_gain": 0.1}, True, "the same weights"),
    ],
)
def test_policy_compared_to_champion(
    counts: Outcome | None, champion: dict[str, Any], passed: bool, reason: str
) -> None:
    """Better than SFT is not enough; whether it has to be better than the champion, too, is for the params to say.

    The champion itself is not worse than itself, on however few problems: there is nothing to estimate.
    """
    is_same = reason == "the same weights"
    current = ChampionOutcomes("m@v0.0.1", {"words": counts} if counts else {}, "" if counts else reason, is_same)
    verdict = decide({"words": CLEAR}, _gate(champion=champion), GateContext(champion=current))
    assert verdict["sources"][0]["passed"]
    assert verdict["passed"] is verdict["champion"]["passed"] is passed
    assert verdict["champion"]["comparable"] is (counts is not None)
    assert verdict["champion"]["reason"].startswith("champion m@v0.0.1: ")
    assert reason in verdict["champion"]["reason"]
    assert verdict["reasons"] == ([] if passed else [verdict["champion"]["reason"]])


def test_looks_at_the_test_problems_add_up() -> None:
    """If eight policies are no better, one passes at 5 % in up to a third of the cases; dev costs nothing.

    Where SFT solved 97 of 100, three more are not enough: no policy could have passed.
    """
    assert not decide({"words": _outcome(both=97, only_grpo=3)}, GATE)["power"]["passable"]
    assert decide({"words": _outcome(both=90, only_grpo=10)}, GATE)["power"]["passable"]
    looks = decide({"words": CLEAR}, GATE, GateContext(test_set="ab", num_earlier_policies=7))["looks"]
    assert looks == {"test_set": "ab", "number": 8, "false_promotion": pytest.approx(1 - 0.95**8)}
    on_dev = decide({"words": CLEAR}, GATE, GateContext(split=Split.DEV))
    assert on_dev["looks"] is None
    assert on_dev["reasons"] == ["split of the problems: dev (test required)"]


def test_presets_ask_for_evidence_and_refuse_contaminated_data() -> None:
    """Chance explains a promotion in one case of twenty at most, losses are small, copies of test problems go.

    A gate that is not enforced is for trying out, under a name that nobody takes for a release.
    """
    presets = {path.stem: load_params(path) for path in FILES}
    for params in presets.values():
        gate, contamination = params.report.gate, params.prepare_data.contamination
        assert 0 < gate.max_p_value <= 0.05
        assert gate.min_gain <= 0.2
        assert 0 < gate.margin <= (0.05 if gate.enforce else 0.1)
        assert 0 < contamination.max_overlap <= 0.5
        assert 8 <= contamination.ngram_words <= 13
    assert {name for name, params in presets.items() if not params.report.gate.enforce} == {"smoke", "gsm8k-math"}
    assert len({params.register.name for params in presets.values()}) == len(presets)


def promoted(config: GateConfig, sources: Mapping[str, tuple[int, float, float]]) -> float:
    """Return the fraction of simulated runs that pass.

    Of each source its number of problems, and the probabilities of each of them to be gained and to be lost.
    """
    rng = np.random.default_rng(0)
    drawn = {
        name: rng.multinomial(total, (gained, lost, 1 - gained - lost), NUM_RUNS).tolist()
        for name, (total, gained, lost) in sources.items()
    }

    @cache
    def passes(runs: tuple[tuple[int, int, int], ...]) -> bool:
        outcomes = {
            name: Outcome(PairedCounts(0, lost, gained, rest))
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
    ("config", "least", "most", "sources"),
    [
        # No gain: with few and with many answers that change, also near a ceiling or a floor.
        ({"margin": 0.5}, 0, 0.05, {"words": (60, 0.01, 0.01)}),
        ({"margin": 0.5, "max_p_value": 0.01}, 0, 0.01, {"words": (200, 0.05, 0.05)}),
        ({"margin": 0.5}, 0.02, 0.05, {"words": (1319, 0.25, 0.25)}),
        # Just the minimum: a measured gain of `min_gain` would pass in half of the runs, a lower bound seldom.
        ({"min_gain": 0.05}, 0.001, 0.05, {"words": (1319, 0.07, 0.02)}),
        # One of three targets suffices, and Holm's correction pays for that.
        (
            {"target": ("a", "b", "c"), "margin": 0.5},
            *(0, 0.05, {"a": (300, 0.05, 0.05), "b": (300, 0.1, 0.1), "c": (100, 0.2, 0.2)}),
        ),
        # A source is worse by the margin, however much a target gains.
        ({"margin": 0.02}, 0, 0.05, {"words": (300, 0.3, 0.01), "other": (1319, 0.03, 0.05)}),
    ],
)
def test_no_policy_is_promoted_by_chance_more_often_than_stated(
    config: dict[str, Any], least: float, most: float, sources: dict[str, tuple[int, float, float]]
) -> None:
    """Nor is the gate so cautious that it has no power."""
    assert least <= promoted(_gate(**config), sources) <= most + TOLERANCE


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (_gate(margin=0.02, expected_lost_fraction=0.0), {"words": 300}),  # every answer that changes is gained
        (_gate(margin=0.02, min_gain=0.02, max_p_value=0.01, expected_gain=0.08), {"words": 1000}),
        (_gate(margin=0.02), {"words": 1319, "other": 1000}),
        (_gate(margin=0.1, target=("words", "math")), {"words": 200, "math": 200}),  # Holm's first level decides
    ],
)
def test_power_is_the_rate_at_which_simulated_policies_pass(config: GateConfig, sizes: dict[str, int]) -> None:
    """With the gate itself, for one source and several, as exactly as so many runs can tell."""
    lost, gained = config.expected_lost_fraction, config.expected_lost_fraction + config.expected_gain
    sources = {name: (size, gained if name in config.target else lost, lost) for name, size in sizes.items()}
    rate = promoted(config, sources)
    assert power(config, sizes) == pytest.approx(rate, abs=3 * max(rate * (1 - rate) / NUM_RUNS, 1e-6) ** 0.5)


def test_enough_problems_are_enough_and_hardly_more() -> None:
    """A tenth fewer are not, and the message names them."""
    config = _gate(margin=0.02, target=("gsm8k",))
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
def test_impassable_gate_is_named(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    """Near a ceiling, at a gain below the minimum, and without any margin for a source that stays as it is."""
    monkeypatch.setattr("components.report.power._MAX_PROBLEMS", 20_000)
    assert message in str(weakness(_gate(**changes), {"words": 300, "b": 300}))
