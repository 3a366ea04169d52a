"""The report compares a policy with the champion in a registry, whose answers are fetched and verified."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from components.register.registry import open_registry
from components.report.config import ReportConfig
from components.report.report import STAGE, render_report
from components.shared import jsonl, stage
from components.shared.errors import PipelineError
from tests.report.synthetic import SKILL, TOOLS, make_run

Row = dict[str, Any]


def config_of(registry: Path, **champion: Any) -> ReportConfig:
    """A gate that compares with the champion of `model` in a registry."""
    gate = {"target": ["words"], "max_p_value": 0.01, "margin": 0.5, "champion": champion}
    return ReportConfig.model_validate({"gate": gate, "registry": str(registry), "name": "model", "num_examples": 2})


def crown(registry: Path, evaluation: Path, policy: Path, digest: str = "another") -> None:
    """Register an evaluated policy as the champion."""
    with open_registry(str(registry), None) as opened:
        stored = opened.store({"policy": policy, "evaluation": evaluation})
        version = {"format": 2, "name": "model", "version": "v0.0.1", "tag": "model@v0.0.1", "policy_digest": digest}
        made = opened.commit(version, {}, stored, "Register model@v0.0.1")
        message = f"Register\n\nBundle-Digest: {made['bundle_digest']}\n"
        assert opened.publish({"model@v0.0.1": message, "model#champion#1": "Promote champion: model@v0.0.1"})


def judge(folders: dict[str, Path], out: Path, config: ReportConfig) -> Row:
    """Run the stage and return its verdict."""
    stage.run(STAGE, config, {**folders, "report": out})
    verdict: Row = jsonl.read_json(out / "verdict.json")
    return verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The inputs of one report; to be read only."""
    return make_run(tmp_path_factory.mktemp("run"), problems=120)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The weights of a champion."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "policy"


def test_policy_is_compared_with_the_champion_problem_by_problem(
    run: dict[str, Path], policy: Path, tmp_path: Path
) -> None:
    """One that is far better than SFT and far worse than the champion is refused, and the page says by how much."""
    better = {"words": 0.98, "gsm8k": 0.9}
    champions = make_run(tmp_path / "champions", problems=120, skill={**SKILL, "grpo": better})
    config = config_of(tmp_path / "registry")
    assert judge(run, tmp_path / "before", config)["champion"] is None
    crown(tmp_path / "registry", champions["evaluation"], policy)
    verdict = judge(run, tmp_path / "after", config)
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
    shutil.rmtree(tmp_path / "registry")
    assert "not worse than champion model@v0.0.1" in render_report(config, run, verdict=verdict)


def test_champion_on_other_problems_is_not_compared(run: dict[str, Path], policy: Path, tmp_path: Path) -> None:
    """Neither passed nor missed unless a key says so; the same weights need no comparison."""
    others = make_run(tmp_path / "others", problems=80)
    crown(tmp_path / "registry", others["evaluation"], policy)
    verdict = judge(run, tmp_path / "pass", config_of(tmp_path / "registry"))
    assert verdict["passed"]
    assert verdict["champion"]["remark"] == "not comparable, it was evaluated on other problems"
    assert "not comparable, it was evaluated on other problems" in (tmp_path / "pass/report.html").read_text("utf-8")
    assert not judge(run, tmp_path / "miss", config_of(tmp_path / "registry", if_incomparable="miss"))["passed"]


@pytest.mark.parametrize("tools", [None, {**TOOLS, "environment": "python"}])
def test_champion_with_other_tools_is_not_compared(
    run: dict[str, Path], policy: Path, tmp_path: Path, tools: dict[str, Any] | None
) -> None:
    """Accuracies with a tool are not compared with accuracies without it, or with another tool."""
    for model in ("sft", "grpo"):
        path = run["evaluation"] / model / "scores.json"
        jsonl.write_json(path, {**jsonl.read_json(path), "protocol": {"tools": tools}})
    champions = make_run(tmp_path / "champions", problems=120)
    path = champions["evaluation"] / "grpo" / "scores.json"
    jsonl.write_json(path, {**jsonl.read_json(path), "protocol": {"tools": TOOLS}})
    crown(tmp_path / "registry", champions["evaluation"], policy)
    verdict = judge(run, tmp_path / "report", config_of(tmp_path / "registry"))
    assert verdict["champion"]["remark"] == "not comparable, it was asked in another way"


def test_damaged_answers_of_the_champion_are_an_error(run: dict[str, Path], policy: Path, tmp_path: Path) -> None:
    """They are named, and no verdict is made up without them."""
    crown(tmp_path / "registry", run["evaluation"], policy)
    for path in (tmp_path / "registry-storage").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PipelineError, match=r"model@v0\.0\.1: .*evaluation/grpo/records\.jsonl"):
        judge(run, tmp_path / "report", config_of(tmp_path / "registry"))
