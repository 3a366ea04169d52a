"""The promotion gate on paired answers counted by hand."""

from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import load_params
from components.report.config import GateConfig
from components.report.evaluation import Outcome, Pair, Record
from components.report.gate import decide
from components.shared.errors import PipelineError
from components.shared.statistics import paired_difference_interval
from tests.presets import FILES

GATE = GateConfig(target=("words",), min_gain=0.1, max_p_value=0.05, margin=0.1, enforce=True)


def make_pairs(source: str, *, both: int, only_sft: int, only_grpo: int, neither: int) -> list[Pair]:
    """So many problems of each outcome."""
    table: dict[tuple[Outcome, Outcome], int] = {
        ("right", "right"): both,
        ("right", "wrong"): only_sft,
        ("wrong", "right"): only_grpo,
        ("wrong", "wrong"): neither,
    }
    outcomes = [outcome for outcome, number in table.items() for _ in range(number)]
    return [make_pair(source, index, first, second) for index, (first, second) in enumerate(outcomes)]


def make_pair(source: str, index: int, first: Outcome, second: Outcome) -> Pair:
    """One problem as both models answered it."""
    return Pair(*(make_record(f"{source}/{index}", source, outcome) for outcome in (first, second)))


def make_record(identity: str, source: str, outcome: Outcome) -> Record:
    """One greedy answer."""
    values: dict[str, Any] = {"id": identity, "source": source, "verdict": outcome, "question": "q", "answer": "1"}
    return Record(**values, sample=0, response="#### 1", extracted="1", num_tokens=3, worked=False)


def test_a_clear_gain_passes_with_its_numbers() -> None:
    """Twenty put right against five broken out of a hundred: 15 points, exact p 0.0041."""
    verdict = decide(make_pairs("words", both=50, only_sft=5, only_grpo=20, neither=25), GATE)
    target = verdict["target"]
    assert verdict["passed"]
    assert verdict["enforced"]
    assert verdict["reasons"] == []
    assert (target["gain"], target["only_sft_right"], target["only_grpo_right"]) == (0.15, 5, 20)
    assert target["p_value"] == pytest.approx(0.004077, abs=1e-6)
    assert (target["sft"]["correct"], target["grpo"]["correct"], target["grpo"]["total"]) == (55, 70, 100)
    assert target["gain_interval"] == list(
        paired_difference_interval(both=50, only_first=5, only_second=20, neither=25)
    )


@pytest.mark.parametrize(
    ("only_sft", "only_grpo", "gain_passed", "p_value_passed"),
    [
        (0, 9, False, True),  # nine points, ten are asked
        (0, 10, True, True),  # exactly ten
        (30, 40, True, False),  # ten points that chance explains
        (20, 5, False, True),  # certain, and for the worse
        (0, 0, False, False),
    ],
)
def test_the_target_needs_both_the_gain_and_the_certainty(
    only_sft: int, only_grpo: int, gain_passed: bool, p_value_passed: bool
) -> None:
    """Either alone misses the gate, and the reason names both figures with what is asked."""
    neither = 100 - only_sft - only_grpo
    verdict = decide(make_pairs("words", both=0, only_sft=only_sft, only_grpo=only_grpo, neither=neither), GATE)
    assert verdict["target"]["gain_passed"] is gain_passed
    assert verdict["target"]["p_value_passed"] is p_value_passed
    assert verdict["passed"] is (gain_passed and p_value_passed)
    if not verdict["passed"]:
        assert "+10.0 are asked" in verdict["reasons"][0]
        assert "at most 0.05 is allowed" in verdict["reasons"][0]


def test_a_certain_loss_never_passes_however_little_is_asked() -> None:
    """With no gain asked for, a significant difference must still be one for the better."""
    gate = GATE.model_copy(update={"min_gain": 0.0, "max_p_value": 1.0})
    assert not decide(make_pairs("words", both=0, only_sft=0, only_grpo=0, neither=9), gate)["passed"]
    assert not decide(make_pairs("words", both=0, only_sft=20, only_grpo=0, neither=9), gate)["passed"]
    assert decide(make_pairs("words", both=0, only_sft=0, only_grpo=20, neither=9), gate)["passed"]


def test_another_source_must_not_get_worse_beyond_the_margin() -> None:
    """What counts is the lower bound: few problems leave a loss possible even where none was seen."""
    target = make_pairs("words", both=50, only_sft=5, only_grpo=20, neither=25)
    many = decide(target + make_pairs("math", both=500, only_sft=20, only_grpo=20, neither=460), GATE)
    few = decide(target + make_pairs("math", both=5, only_sft=1, only_grpo=1, neither=3), GATE)
    assert many["passed"]
    assert many["others"][0]["lower_bound"] > -0.1
    assert few["others"][0]["gain"] == 0
    assert few["others"][0]["lower_bound"] < -0.1
    assert not few["passed"]
    assert few["target"]["passed"]
    assert few["reasons"] == [few["others"][0]["reason"]]
    assert few["reasons"][0].startswith("math: ")


def test_targets_are_taken_together() -> None:
    """Two target sources are one test on all their problems: the larger one counts for more."""
    pairs = make_pairs("a", both=0, only_sft=0, only_grpo=6, neither=4) + make_pairs(
        "b", both=0, only_sft=1, only_grpo=2, neither=27
    )
    verdict = decide(pairs, GATE.model_copy(update={"target": ("a", "b")}))
    assert verdict["target"]["gain"] == 7 / 40
    assert (verdict["target"]["sft"]["accuracy"], verdict["target"]["grpo"]["accuracy"]) == (1 / 40, 8 / 40)
    assert verdict["target"]["source"] == "a + b"
    assert verdict["others"] == []


def test_unscorable_is_not_right_on_either_side_and_is_shown() -> None:
    """An answer that nobody could grade earns nothing, for SFT as for GRPO."""
    pairs = [make_pair("words", 0, "unscorable", "right"), make_pair("words", 1, "right", "unscorable")]
    target = decide(pairs, GATE)["target"]
    assert (target["sft"]["correct"], target["grpo"]["correct"], target["gain"]) == (1, 1, 0.0)
    assert target["unscorable"] == {"sft": 1, "grpo": 1}


def test_a_target_without_problems_is_named() -> None:
    """A misspelt source must not make the gate pass on nothing."""
    with pytest.raises(PipelineError, match=r"report\.gate\.target: no test problem is from `word`; there are words"):
        decide(
            make_pairs("words", both=1, only_sft=0, only_grpo=0, neither=0),
            GATE.model_copy(update={"target": ("word",)}),
        )


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
