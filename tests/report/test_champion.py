"""The report compares a policy with the champion in a registry, whose answers are fetched and verified."""

from pathlib import Path
from typing import Any

import pytest

from components.register.registry import open_registry
from components.report import charts
from components.report.champion import Champion
from components.report.config import ReportConfig
from components.report.findings import champion_outcomes, read_evaluation
from components.report.report import STAGE, render_report
from components.shared import jsonl, stage
from tests.report.synthetic import SKILL, TOOLS, make_run

Row = dict[str, Any]


def _config_of(registry: Path) -> ReportConfig:
    gate = {"target": ["words"], "max_p_value": 0.01, "margin": 0.5}
    return ReportConfig.model_validate({"gate": gate, "registry": str(registry), "name": "model", "num_examples": 2})


def crown(registry: Path, evaluation: Path) -> None:
    """Register an evaluated policy as the champion."""
    with open_registry(str(registry), None) as opened:
        stored = opened.store({"evaluation": evaluation})
        version = {"format": 2, "name": "model", "version": "v0.0.1", "tag": "model@v0.0.1", "policy_digest": "another"}
        made = opened.commit(version, {}, stored, "Register model@v0.0.1")
        message = f"Register\n\nBundle-Digest: {made['bundle_digest']}\n"
        assert opened.publish({"model@v0.0.1": message, "model#champion#1": "Promote champion: model@v0.0.1"})


def _judge(folders: dict[str, Path], out: Path, config: ReportConfig) -> Row:
    stage.run(STAGE, config, {**folders, "report": out})
    verdict: Row = jsonl.read_json(out / "verdict.json")
    return verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The inputs of one report; to be read only."""
    return make_run(tmp_path_factory.mktemp("run"), problems=120)


@pytest.fixture(autouse=True)
def _without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time of a report, and nothing here looks at them."""
    monkeypatch.setattr(charts, "curve_chart", lambda *_, **__: (None, []))


def test_policy_is_compared_with_the_champion(run: dict[str, Path], tmp_path: Path) -> None:
    """One that is far better than SFT and far worse than the champion is refused, and the page says by how much."""
    better = {"words": 0.98, "gsm8k": 0.9}
    champions = make_run(tmp_path / "champions", problems=120, skill={**SKILL, "grpo": better})
    config = _config_of(tmp_path / "registry")
    assert _judge(run, tmp_path / "before", config)["champion"] is None
    crown(tmp_path / "registry", champions["evaluation"])
    verdict = _judge(run, tmp_path / "after", config)
    assert [part["passed"] for part in verdict["sources"]] == [True, True]
    assert not verdict["passed"]
    words = verdict["champion"]["sources"][0]
    records = [row for _, row in jsonl.read_rows(champions["evaluation"] / "grpo" / "records.jsonl")]
    right = [row["verdict"] == "right" for row in records if row["sample"] == 0 and row["source"] == "words"]
    assert words["champion"]["correct"] == sum(right)
    assert words["gain"] < -0.05
    assert verdict["reasons"] == [verdict["champion"]["reason"]]
    page = (tmp_path / "after" / "report.html").read_text("utf-8")
    assert "not worse than champion model@v0.0.1" in page
    # A page that is rendered later keeps the verdict: the registry may have changed.
    verdict["champion"] |= {"comparable": False, "remark": "not comparable, it was asked in another way"}
    assert "not comparable, it was asked in another way" in render_report(config, run, verdict=verdict)


@pytest.mark.parametrize(
    ("changes", "answered", "remark"),
    [
        ({}, {}, ""),
        ({"policy_digest": "own"}, {}, "has the same weights"),
        ({"records": []}, {}, "its version has no answers to compare with"),
        ({}, {"answer": "1"}, "not comparable, it was evaluated on other problems"),
        ({"protocol": {"tools": {**TOOLS, "environment": "python"}}}, {}, "not comparable, it was asked in another"),
    ],
)
def test_champion_has_to_be_comparable(run: dict[str, Path], changes: Row, answered: Row, remark: str) -> None:
    """Accuracies with a tool are not compared with accuracies without it, or with another tool."""
    protocol = {"tools": TOOLS}
    evaluation = read_evaluation(run["evaluation"] / "grpo")._replace(scores={"protocol": protocol})
    records = [{**row, **answered} for _, row in jsonl.read_rows(evaluation.folder / "records.jsonl")]
    values = {"tag": "model@v0.0.1", "policy_digest": "another", "records": records, "protocol": protocol}
    compared = champion_outcomes(Champion(**{**values, **changes}), evaluation, "own")
    assert compared.remark.startswith(remark)
    assert compared.is_same == (remark == "has the same weights")
    assert set(compared.outcomes) == (set() if remark else {"words", "gsm8k"})
