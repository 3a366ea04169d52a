"""The report stage on made-up outputs of the stages before it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from kfp import dsl

from components.register.registry import open_registry
from components.report import charts, component
from components.report.champion import Champion
from components.report.config import ReportConfig
from components.report.findings import champion_outcomes, collect_provenance, read_evaluation, read_findings
from components.report.report import STAGE, RunFacts, _choose_examples, render_report
from components.shared import jsonl, lineage, stage
from components.shared.errors import PipelineError
from components.shared.statistics import score
from tests.lineages import made
from tests.report.synthetic import SKILL, TOOLS, artifact_digest, make_run
from tests.report.test_gate import pair

Row = dict[str, Any]
VALUES: dict[str, Any] = {
    "gate": {"target": ["words"], "min_gain": 0.1, "max_p_value": 0.01, "margin": 0.2},
    "num_examples": 8,
}
CONFIG = ReportConfig.model_validate(VALUES)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The inputs of one run; to be read only."""
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def own_run(shared_run: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """A copy of the inputs that a test may change."""
    return {name: shutil.copytree(folder, tmp_path / name) for name, folder in shared_run.items()}


def _run_report(folders: Mapping[str, Path], out: Path, config: ReportConfig = CONFIG) -> dict[str, float]:
    return stage.run(STAGE, config, {**folders, "report": out})


@pytest.fixture(scope="module")
def written(shared_run: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the shared run."""
    out = tmp_path_factory.mktemp("out") / "report"
    _run_report(shared_run, out)
    return out


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at none: they take most of the time of a report."""
    monkeypatch.setattr(charts, "curve_chart", lambda *_, **__: (None, []))


def _read_page(report: Path) -> str:
    return re.sub(r"\s", " ", (report / "report.html").read_text(encoding="utf-8"))


def _edit(path: Path, change: Callable[[Row], Row]) -> None:
    jsonl.write_rows(path, [change(row) for _, row in jsonl.read_rows(path)])


@pytest.mark.slow
def test_equal_inputs_give_equal_bytes(shared_run: dict[str, Path], written: Path, tmp_path: Path) -> None:
    """In another process, with another hash seed, page, verdict and summary are the same; torch is not loaded."""
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"report": VALUES}))
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    options = [f"--{name.replace('_', '-')}={folder}" for name, folder in shared_run.items()]
    command = [sys.executable, "-m", "components.report", f"--params={params}", *options, f"--report={tmp_path / 'r'}"]
    environment = {"PYTHONHASHSEED": "5", "TZ": "Asia/Tokyo", "PYTHONPATH": str(tmp_path)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert lineage.digest(tmp_path / "r") == lineage.digest(written)


def test_page_is_self_contained_and_has_the_figures_of_the_verdict(written: Path) -> None:
    """Under 1 MB, well-formed, with nothing to fetch and no script; headline and gate repeat verdict.json."""
    text = (written / "report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?:|<script|<link|src=|@import", text)
    assert text.count("<svg") == text.count("</svg>") == 10
    without_void_tags = re.sub(r"<(meta|br)\b[^>]*>", "", text.removeprefix("<!doctype html>"))
    ElementTree.fromstring(without_void_tags)
    assert text.count('class="example"') == 8
    text, target = _read_page(written), jsonl.read_json(written / "verdict.json")["target"]
    sft, grpo = (f"{100 * target[model]['accuracy']:.1f} %" for model in ("sft", "grpo"))
    assert f"GRPO takes accuracy on words from {sft} to {grpo}" in text
    assert "Gate passed." in text
    assert "Gate missed" not in text
    assert f"{target['sft']['correct']} → {target['grpo']['correct']} of {target['grpo']['total']} right" in text


def test_charts_have_values_on_hover(shared_run: dict[str, Path], written: Path) -> None:
    """Of each curve at each step, in strips that cover the chart side by side."""
    text = (written / "report.html").read_text(encoding="utf-8")
    steps = {row["step"]: row for _, row in jsonl.read_rows(shared_run["grpo_training"] / "steps.jsonl")}
    strip = r'x="([\d.]+)".* width="([\d.]+)".*<title>step (\d+): reward ([\d.]+), accuracy ([\d.]+)</title>'
    told = [tuple(map(float, each)) for each in re.findall(strip, text)]
    assert len(told) >= 30
    for (x, width, step, *values), (following, *_) in pairwise(told):
        assert values == pytest.approx([steps[step]["reward"], steps[step]["accuracy"]], abs=0.005)
        assert x + width == pytest.approx(following, abs=0.2)


@pytest.mark.usefixtures("without_charts")
def test_run_without_gradient(own_run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The headline says that GRPO learned nothing instead of a gain, and so do the summary and a warning."""
    _edit(own_run["grpo_training"] / "steps.jsonl", lambda row: {**row, "gradient_norm": 0.0})
    _run_report(own_run, tmp_path / "report")
    text = _read_page(tmp_path / "report")
    accuracy = jsonl.read_json(tmp_path / "report" / "verdict.json")["target"]["grpo"]["accuracy"]
    assert f"GRPO learned nothing: accuracy on words stays at {100 * accuracy:.1f} %" in text
    assert "GRPO takes accuracy" not in text
    assert jsonl.read_json(tmp_path / "report" / "summary.json")["learned"] is False
    assert "report: warning: GRPO learned nothing" in capsys.readouterr().out


@pytest.mark.usefixtures("without_charts")
def test_early_stop_is_shown(own_run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the curve of validation; the figures at the end of training are those up to the policy's step."""
    training = own_run["grpo_training"]
    rows = [{"step": step, **score(10 + step, 40), "by_source": {}} for step in (0, 10, 20)]
    jsonl.write_rows(training / "validation.jsonl", rows)
    reason = "entropy 0.001 over the last 10 steps"
    jsonl.write_json(training / "result.json", {"policy_step": 10, "num_steps": 25, "stopped": reason})
    (training / "first_rollout.txt").write_text("the first 8 samples: 50% right\n")
    _edit(training / "steps.jsonl", lambda row: row if row["step"] < 10 else {**row, "entropy": 0.001})
    limited = ReportConfig.model_validate({"gate": {**VALUES["gate"], "health": {"min_entropy": 0.01}}})
    _run_report(own_run, tmp_path / "report", limited)
    page = _read_page(tmp_path / "report")
    assert "The policy is that of step 10 of 25, which answered 50.0 % (35.2 to 64.8) of 40 problems" in page
    assert f"After step 25: {reason}." in page
    assert "The first 8 samples: 50% right." in page
    assert 'aria-label="Validation accuracy, with the policy' in page
    assert f"warning: training stopped after step 25: {reason}" in capsys.readouterr().out
    summary, metrics = (jsonl.read_json(tmp_path / f"report/{name}.json") for name in ("summary", "metrics"))
    assert summary["training"] == {"policy_step": 10, "num_steps": 25, "stopped": reason}
    assert summary["mean_length_tokens"]["grpo"] > 2 * summary["mean_length_tokens"]["sft"]
    assert summary["digests"]["problems"] == artifact_digest("problems")
    assert metrics["policy_step"] == 10
    assert "entropy" not in " ".join(summary["verdict"]["reasons"])


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ((40, 20, 30, 10), [4, 2, 1, 1]),  # half newly right, a quarter newly wrong, the rest the same before and after
        ((1, 20, 0, 10), [1, 6, 0, 1]),
        ((0, 0, 0, 60), [0, 0, 0, 8]),
    ],
)
def test_as_many_examples_are_shown_as_may_be(found: tuple[int, ...], shown: list[int]) -> None:
    """Where there are too few of one outcome, there are more of another."""
    outcomes = [("wrong", "right"), ("right", "wrong"), ("right", "right"), ("wrong", "wrong")]
    pairs = [pair(*outcome) for outcome, number in zip(outcomes, found, strict=True) for _ in range(number)]
    groups = _choose_examples(pairs, 8)
    assert [(group["total"], len(group["pairs"])) for group in groups] == list(zip(found, shown, strict=True))


@pytest.mark.usefixtures("without_charts")
def test_missed_gate_is_reported_and_does_not_fail_the_stage(tmp_path: Path) -> None:
    """The page and the verdict are written; `register` enforces the gate."""
    folders = make_run(tmp_path / "run", skill={**SKILL, "grpo": SKILL["sft"]}, problems=60)
    assert _run_report(folders, tmp_path / "report")["gate_passed"] == 0
    assert "Gate missed: the policy is not registered." in _read_page(tmp_path / "report")
    unenforced = ReportConfig.model_validate({**VALUES, "gate": {**VALUES["gate"], "enforce": False}})
    assert "Gate missed, not enforced" in render_report(unenforced, folders)


@pytest.mark.usefixtures("without_charts")
def test_runner_adds_version_times_and_phases(shared_run: dict[str, Path], tmp_path: Path) -> None:
    """After the run the page has the version, the times of the stages, and the shares of the phases of a step."""
    row = {"step": 1, "sampling_s": 2.0, "sync_s": 0.5, "update_s": 1.0, "step_s": 4.0, "tokens_per_s": 10.0}
    jsonl.write_rows(tmp_path / "timings.jsonl", [row, {**row, "step": 2, "sampling_s": 4.0, "step_s": 6.0}])
    version = {"tag": "grpo-policy@v0.0.7", "registry": "registry", "policy_digest": "ab" * 32}
    seconds = {"train_grpo": 141.2, "report": 9.0}  # the evaluation is reused
    facts = RunFacts(version, seconds, tmp_path, command="git checkout abc", files={"params": "params.yaml"})
    text = render_report(CONFIG, shared_run, run=facts)
    command, link = "<pre>git checkout abc</pre>", '<a href="params.yaml">params</a>'
    for each in (command, link, "2 min 21 s", "2 min 30 s", "step took 5 s", 'sampled">100</td></tr>\n</tbody>'):
        assert each in text
    assert text.count("grpo-policy@v0.0.7") == 2
    shares = re.findall(r"</i>([a-z ]+) (\d+)\u202f%", text[text.index("Where the time of GRPO went") :])
    assert shares[:4] == [("sampling", "60"), ("weight sync", "10"), ("update", "20"), ("waiting and other", "10")]


@pytest.fixture(scope="module")
def tool_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The inputs of a run whose models use a calculator; to be read only."""
    return make_run(tmp_path_factory.mktemp("tool-run"), tools=True)


def test_answers_in_turns_are_shown_as_conversations(tool_run: dict[str, Path], written: Path) -> None:
    """What the environment answers is set apart, the middle of a long one is folded; use and curves are counted."""
    text = render_report(CONFIG, tool_run)
    (shown,) = re.findall(r"Ann has 5 books and gets 9, 6, 1, 1, 8 more.*?</article>", text, re.DOTALL)
    policy = shown[shown.index("GRPO") :]
    assert re.findall(r"<pre>(?:```\w+\n)?(.*?)(?:\n```\n)?</pre>", policy) == [
        *("5+9", "14", "14+6", "20", "20+1", "21", "21+1", "22", "22+8", "30", "#### 30")
    ]
    assert policy.count('<div class="detail">calculator answers</div>') == 5
    folded = policy[policy.index("<details>") : policy.index("</details>")]
    assert "<summary>4 more turns</summary>" in folded
    assert [call in folded for call in ("5+9", "14+6", "22+8", "#### 30")] == [False, True, True, False]
    scores = jsonl.read_json(tool_run["evaluation"] / "grpo" / "scores.json")
    fraction = scores["tools"]["with_call"]["all"]["fraction"]
    assert f'<div class="figure">{100 * fraction:.0f}\u202f%</div>' in text
    assert "Completions that use the tool (share)" in text
    assert re.search(r"\b(samples?|trajector\w+|responses?)\b", re.sub(r"<[^>]*>", "", text), re.IGNORECASE) is None
    assert "max turns <code>8</code>" in text
    without = (written / "report.html").read_text(encoding="utf-8")
    assert "tool" not in without[without.index("</style>\n<header>") :]


def test_any_page_is_small_and_answers_stay_text(tool_run: dict[str, Path], tmp_path: Path) -> None:
    """Thousands of steps are thinned; of long answers and many turns the rest is counted."""
    run = {name: shutil.copytree(folder, tmp_path / name) for name, folder in tool_run.items()}
    turn = {"text": "<b>call</b>" * 100, "observation": "</pre><script>" * 100, "rewards": {}}
    _edit(run["evaluation"] / "sft" / "records.jsonl", lambda row: {**row, "turns": [turn] * 200})
    response = "<script>alert(1)</script>" + "word " * 4000
    _edit(run["evaluation"] / "grpo" / "records.jsonl", lambda row: {**row, "turns": [], "response": response})
    rows = [row for _, row in jsonl.read_rows(run["grpo_training"] / "steps.jsonl")]
    many = [{**row, "step": index, "kl": None} for index, row in enumerate(rows * 100)]
    jsonl.write_rows(run["grpo_training"] / "steps.jsonl", many)
    text = render_report(ReportConfig.model_validate({**VALUES, "num_examples": 16}), run)
    assert len(text.encode()) < 1_000_000
    for absent in ("<script", "Where the time of GRPO went", "Registered as"):
        assert absent not in text
    for shown in ("&lt;script&gt;alert(1)", "198 more turns", "192 turns not shown: records.jsonl of the evaluation"):
        assert shown in text
    assert text.count("Not recorded in this run.") == 1


def _records(name: str, change: Callable[[Row], Row]) -> Callable[[dict[str, Path]], object]:
    return lambda run: _edit(run["evaluation"] / name / "records.jsonl", change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_records("grpo", lambda row: {**row, "id": row["id"].replace("words/", "x/")}), "problem words/test/00001 is"),
        (_records("grpo", lambda row: {**row, "answer": "x"}), "test/00000 is missing .* or has another"),
        (_records("sft", lambda row: {**row, "sample": 0}), r"jsonl:2: second greedy answer to problem gsm8k/"),
        (lambda run: shutil.copy(run["evaluation"] / "sft/scores.json", run["evaluation"] / "grpo"), r"scores\.json:"),
        (_records("grpo", lambda row: {**row, "verdict": "maybe"}), r"records\.jsonl:1\.verdict: should be"),
    ],
)
def test_evaluations_that_cannot_be_compared_are_refused(
    own_run: dict[str, Path], damage: Callable[[dict[str, Path]], object], message: str
) -> None:
    """The file and what is wrong with it are named."""
    damage(own_run)
    with pytest.raises(PipelineError, match=message):
        read_findings(CONFIG, own_run)


def test_provenance_has_the_packages_of_all_stages_of_one_run() -> None:
    """Stages run in different images: all packages are named, with every version; one stage has one config in a run."""
    light, heavy = {"numpy": "2.3.5"}, {"numpy": "2.3.4", "torch": "2.13.0"}
    problems = made("prepare_data", packages=light)
    policy = made("train_grpo", inputs={"problems": problems}, packages=heavy)
    evaluation = made("evaluate", inputs={"policy": policy, "problems": problems}, packages=heavy)
    validation = made("validate_data", inputs={"problems": problems}, packages=light)
    provenance = collect_provenance({"grpo": evaluation, "validation": validation}, {"report": {"num_examples": 1}})
    assert list(provenance.configs) == ["prepare_data", "train_grpo", "validate_data", "evaluate", "report"]
    assert provenance.packages == {"numpy": "2.3.4, 2.3.5", "torch": "2.13.0"}
    other = made("prepare_data", {"seed": 2})
    with pytest.raises(PipelineError, match="input `b` was made under another config of prepare_data"):
        collect_provenance({"a": problems, "b": other}, {})


@pytest.mark.usefixtures("without_charts")
def test_kubeflow_component_shows_page_and_metrics(shared_run: dict[str, Path], tmp_path: Path) -> None:
    """The page has the cost of the run; the folder that is passed on is on the volume."""
    sources = {"validation": "validation", "sft_training": "sft", "grpo_training": "grpo", "evaluation": "evaluation"}
    for name, source in sources.items():
        shutil.copytree(shared_run[name], tmp_path / source / name.removeprefix(f"{source}_"))
    inputs: dict[str, Any] = {source: str(tmp_path / source) for source in sources.values()}
    inputs |= {"validation": dsl.Artifact(uri=inputs["validation"]), "volume": str(tmp_path), "run_id": "run-1"}
    page, metrics = dsl.HTML(uri=str(tmp_path / "html" / "page")), dsl.Metrics(uri=str(tmp_path / "metrics"))
    out = dsl.Artifact(uri=str(tmp_path / "made"))
    (folder,) = component.report.python_func(config=VALUES, **inputs, report=out, report_page=page, metrics=metrics)
    assert not Path(folder).is_relative_to(out.path)
    text = (tmp_path / "html" / "page").read_text(encoding="utf-8")
    assert re.search(r"<tr><td>report</td>.*core-minutes", text)
    for place in (out.path, folder):
        assert "core-minutes" not in (Path(place) / "report" / "report.html").read_text(encoding="utf-8")
    assert metrics.metadata["gate_passed"] == 1


@pytest.mark.usefixtures("without_charts")
def test_policy_is_compared_with_the_champion(shared_run: dict[str, Path], written: Path, tmp_path: Path) -> None:
    """One that is far better than SFT and far worse than the champion is refused, and the page says by how much."""
    assert jsonl.read_json(written / "verdict.json")["champion"] is None
    champions = make_run(tmp_path / "champions", skill={**SKILL, "grpo": {"words": 0.98, "gsm8k": 0.9}})
    with open_registry(str(tmp_path / "registry"), None) as registry:
        stored = registry.store({"evaluation": champions["evaluation"]})
        version = {"format": 2, "name": "model", "version": "v0.0.1", "tag": "model@v0.0.1", "policy_digest": "another"}
        made = registry.commit(version, {}, stored, "Register model@v0.0.1")
        message = f"Register\n\nBundle-Digest: {made['bundle_digest']}\n"
        assert registry.publish({"model@v0.0.1": message, "model#champion#1": "Promote champion: model@v0.0.1"})
    config = CONFIG.model_copy(update={"registry": str(tmp_path / "registry"), "name": "model"})
    _run_report(shared_run, tmp_path / "report", config)
    verdict = jsonl.read_json(tmp_path / "report/verdict.json")
    assert [part["passed"] for part in verdict["sources"]] == [True, True]
    assert not verdict["passed"]
    words = verdict["champion"]["sources"][0]
    scores = jsonl.read_json(champions["evaluation"] / "grpo/scores.json")["greedy"]["by_source"]
    assert words["champion"] == scores["words"]
    assert words["gain"] < -0.05
    assert verdict["reasons"] == [verdict["champion"]["reason"]]
    assert "not worse than champion model@v0.0.1" in _read_page(tmp_path / "report")
    # A page that is rendered later keeps the verdict: the registry may have changed.
    verdict["champion"] |= {"comparable": False, "remark": "not comparable, it was asked in another way"}
    assert "not comparable, it was asked in another way" in render_report(config, shared_run, verdict=verdict)


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
def test_champion_has_to_be_comparable(shared_run: dict[str, Path], changes: Row, answered: Row, remark: str) -> None:
    """Accuracies with a tool are not compared with accuracies without it, or with another tool."""
    protocol = {"tools": TOOLS}
    evaluation = read_evaluation(shared_run["evaluation"] / "grpo")._replace(scores={"protocol": protocol})
    records = [{**row, **answered} for _, row in jsonl.read_rows(evaluation.folder / "records.jsonl")]
    values = {"tag": "model@v0.0.1", "policy_digest": "another", "records": records, "protocol": protocol}
    compared = champion_outcomes(Champion(**{**values, **changes}), evaluation, "own")
    assert compared.remark.startswith(remark)
    assert compared.is_same == (remark == "has the same weights")
    assert set(compared.outcomes) == (set() if remark else {"words", "gsm8k"})


@pytest.mark.parametrize(
    ("fraction", "values", "limits"),
    [(True, [0.2, 0.9], (-4, 104)), (True, [-0.3, 1.7], (-40, 180)), (False, [0.0, 0.0], (0, 1))],
)
def test_all_of_a_curve_is_within_its_axes(
    monkeypatch: pytest.MonkeyPatch, fraction: bool, values: list[float], limits: tuple[float, float]
) -> None:
    """A reward may be negative, and a line along the upper edge would be cut in half."""
    drawn = Mock()
    monkeypatch.setattr(charts, "_svg", drawn)
    steps = [{"step": step, "reward": value} for step, value in enumerate(values)]
    charts.curve_chart(steps, "Reward", {"reward": "reward"}, fraction=fraction)
    assert drawn.call_args.args[0].axes[0].get_ylim() == pytest.approx(limits)
