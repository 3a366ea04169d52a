"""The promotion gate on paired answers counted by hand."""

from pathlib import Path
from typing import Any, Literal

import pytest

from components.preflight.config import load_params
from components.report.config import GateConfig
from components.report.findings import Pair, Record
from components.report.gate import decide
from components.shared.errors import PipelineError
from components.shared.statistics import paired_difference_interval
from tests.presets import FILES

Outcome = Literal["right", "wrong", "unscorable"]
GATE = GateConfig(target=("words",), min_gain=0.1, max_p_value=0.05, margin=0.1, enforce=True)


def pairs_of(source: str, *, both: int = 0, only_sft: int = 0, only_grpo: int = 0, neither: int = 0) -> list[Pair]:
    """Return that many problems with each outcome."""
    return [
        *[make_pair(source, "right", "right")] * both,
        *[make_pair(source, "right", "wrong")] * only_sft,
        *[make_pair(source, "wrong", "right")] * only_grpo,
        *[make_pair(source, "wrong", "wrong")] * neither,
    ]


def make_pair(source: str, sft: Outcome, grpo: Outcome) -> Pair:
    """One problem with the answers of both models."""
    values: dict[str, Any] = {"id": "1", "source": source, "question": "q", "answer": "1", "sample": 0}
    values |= {"response": "#### 1", "num_tokens": 3, "worked": False}
    return Pair(Record(**values, verdict=sft), Record(**values, verdict=grpo))


def test_clear_gain_passes_with_its_figures() -> None:
    """Twenty newly right against five newly wrong out of a hundred: 15 points, exact p 0.0041."""
    verdict = decide(pairs_of("words", both=50, only_sft=5, only_grpo=20, neither=25), GATE)
    target = verdict["target"]
    assert verdict["passed"]
    assert verdict["enforced"]
    assert verdict["reasons"] == []
    assert (target["gain"], target["only_sft_right"], target["only_grpo_right"]) == (0.15, 5, 20)
    assert target["p_value"] == pytest.approx(0.004077, abs=1e-6)
    assert (target["sft"]["correct"], target["grpo"]["correct"], target["grpo"]["total"]) == (55, 70, 100)
    interval = paired_difference_interval(both=50, only_first=5, only_second=20, neither=25)
    assert target["gain_interval"] == list(interval)


@pytest.mark.parametrize(
    ("only_sft", "only_grpo", "gain_passed", "p_value_passed"),
    [
        (0, 9, False, True),  # nine points, ten are required
        (0, 10, True, True),  # exactly ten
        (30, 40, True, False),  # ten points that chance explains
        (20, 5, False, True),  # significant, and for the worse
        (0, 0, False, False),
    ],
)
def test_target_needs_both_gain_and_significance(
    only_sft: int, only_grpo: int, gain_passed: bool, p_value_passed: bool
) -> None:
    """Either alone misses the gate, and the reason has both figures with what is required."""
    pairs = pairs_of("words", only_sft=only_sft, only_grpo=only_grpo, neither=100 - only_sft - only_grpo)
    verdict = decide(pairs, GATE)
    assert verdict["target"]["gain_passed"] is gain_passed
    assert verdict["target"]["p_value_passed"] is p_value_passed
    assert verdict["passed"] is (gain_passed and p_value_passed)
    if not verdict["passed"]:
        assert "at least +10.0 required" in verdict["reasons"][0]
        assert "at most 0.05 allowed" in verdict["reasons"][0]


@pytest.mark.parametrize(("only_sft", "only_grpo", "passed"), [(0, 0, False), (20, 0, False), (0, 20, True)])
def test_significant_loss_never_passes_however_low_the_thresholds(only_sft: int, only_grpo: int, passed: bool) -> None:
    """With no gain required, a significant difference must still be one for the better."""
    gate = GATE.model_copy(update={"min_gain": 0.0, "max_p_value": 1.0})
    assert decide(pairs_of("words", only_sft=only_sft, only_grpo=only_grpo, neither=9), gate)["passed"] is passed


def test_other_source_must_not_get_worse_than_the_margin() -> None:
    """What counts is the lower bound: with few problems a loss is possible even if none was measured."""
    target = pairs_of("words", both=50, only_sft=5, only_grpo=20, neither=25)
    many = decide(target + pairs_of("math", both=500, only_sft=20, only_grpo=20, neither=460), GATE)
    few = decide(target + pairs_of("math", both=5, only_sft=1, only_grpo=1, neither=3), GATE)
    assert many["passed"]
    assert many["others"][0]["lower_bound"] > -0.1
    assert few["others"][0]["gain"] == 0
    assert few["others"][0]["lower_bound"] < -0.1
    assert not few["passed"]
    assert few["target"]["passed"]
    assert few["reasons"] == [few["others"][0]["reason"]]
    assert few["reasons"][0].startswith("math: ")


def test_target_sources_are_pooled() -> None:
    """Two target sources are one test on all their problems: the larger one counts for more."""
    pairs = pairs_of("a", only_grpo=6, neither=4) + pairs_of("b", only_sft=1, only_grpo=2, neither=27)
    verdict = decide(pairs, GATE.model_copy(update={"target": ("a", "b")}))
    target = verdict["target"]
    assert (target["gain"], target["sft"]["accuracy"], target["grpo"]["accuracy"]) == (7 / 40, 1 / 40, 8 / 40)
    assert target["source"] == "a + b"
    assert verdict["others"] == []


def test_unscorable_answer_is_not_right_and_is_counted() -> None:
    """An answer that could not be graded earns nothing, for SFT as for GRPO."""
    pairs = [make_pair("words", "unscorable", "right"), make_pair("words", "right", "unscorable")]
    target = decide(pairs, GATE)["target"]
    assert (target["sft"]["correct"], target["grpo"]["correct"], target["gain"]) == (1, 1, 0.0)
    assert target["unscorable"] == {"sft": 1, "grpo": 1}


def test_target_without_problems_is_an_error() -> None:
    """A misspelt source must not make the gate pass on nothing."""
    with pytest.raises(PipelineError, match=r'gate\.target: no test problem comes from "word"; .*: words, math'):
        decide(pairs_of("words", both=1) + pairs_of("math", both=1), GATE.model_copy(update={"target": ("word",)}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_presets_ask_for_evidence_and_refuse_contaminated_data(path: Path) -> None:
    """Chance explains a promotion in one case of twenty at most, losses are small, copies of test problems go."""
    params = load_params(path)
    gate, contamination = params.report.gate, params.prepare_data.contamination
    assert 0 < gate.max_p_value <= 0.05
    assert 0 <= gate.min_gain <= 0.2
    assert 0 < gate.margin <= 0.05
    assert 0 < contamination.max_overlap <= 0.5
    assert 8 <= contamination.ngram_words <= 13


def test_only_presets_that_promote_nothing_go_without_the_gate() -> None:
    """A gate that is not enforced is for trying out, under a name that nobody takes for a release."""
    registered = {path.stem: load_params(path) for path in FILES}
    unenforced = {name for name, params in registered.items() if not params.report.gate.enforce}
    assert unenforced == {"smoke", "gsm8k-math"}
    names = [params.register.name for params in registered.values()]
    assert sorted(names) == sorted(set(names))
