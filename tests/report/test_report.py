"""The report stage on folders as the stages before it leave them."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from components.report.config import ReportConfig
from components.report.page import render_report
from components.report.report import STAGE
from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.stage import run
from tests.report.synthetic import SKILL, make_run

VALUES: dict[str, Any] = {
    "gate": {"target": ["words"], "min_gain": 0.1, "max_p_value": 0.01, "margin": 0.2, "enforce": True},
    "num_examples": 8,
}
CONFIG = ReportConfig.model_validate(VALUES)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The inputs of one run; to be read only."""
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def own_run(shared_run: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """A copy of the inputs that a test may damage."""
    return {name: shutil.copytree(folder, tmp_path / name) for name, folder in shared_run.items()}


def run_report(folders: Mapping[str, Path], out: Path, config: ReportConfig = CONFIG) -> dict[str, float]:
    """Run the stage as the runners do."""
    return run(STAGE, config, {**folders, "report": out})


@pytest.fixture(scope="module")
def written(shared_run: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the shared run."""
    out = tmp_path_factory.mktemp("out") / "report"
    run_report(shared_run, out)
    return out


@pytest.mark.slow
def test_equal_inputs_give_equal_bytes(shared_run: dict[str, Path], written: Path, tmp_path: Path) -> None:
    """In another process, with another hash seed, the page, verdict and summary are the same files."""
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"report": VALUES}))
    options = [f"--{name.replace('_', '-')}={folder}" for name, folder in shared_run.items()]
    command = [sys.executable, "-m", "components.report", f"--params={params}", *options, f"--report={tmp_path / 'r'}"]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": "5", "TZ": "Asia/Tokyo"})
    assert lineage.digest(tmp_path / "r") == lineage.digest(written)


def test_the_page_stands_alone(written: Path) -> None:
    """Under 1 MB, well-formed, with nothing to fetch and no script."""
    text = (written / "report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?:|<script|<link|src=|@import", text)
    assert text.count("<svg") == text.count("</svg>") == 11
    assert _unbalanced_tags(text) == []


def _unbalanced_tags(text: str) -> list[str]:
    problems, stack = [], []
    void = {"meta", "br", "path", "use", "rect"}

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in void:
                stack.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            if tag not in void and (not stack or stack.pop() != tag):
                problems.append(tag)

    Checker().feed(text)
    return problems + stack


def test_the_page_says_what_the_verdict_says(written: Path) -> None:
    """Headline, gate and tables repeat the figures of verdict.json."""
    text = re.sub(r"\s", " ", (written / "report.html").read_text(encoding="utf-8"))
    target = jsonl.read_json(written / "verdict.json")["target"]
    sft, grpo = (f"{100 * target[model]['accuracy']:.1f} %" for model in ("sft", "grpo"))
    assert f"GRPO takes accuracy on words from {sft} to {grpo}" in text
    assert "Gate passed." in text
    assert "Gate missed" not in text
    assert f"{target['sft']['correct']} → {target['grpo']['correct']} of {target['grpo']['total']} right" in text
    for part in (
        "SFT loss",
        "Worked share",
        "KL from",
        "Entropy",
        "Clip fraction",
        "By subject",
        "Config of train_grpo",
    ):
        assert part in text, part


def test_a_run_without_a_gradient_learned_nothing(
    own_run: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The headline says so in place of a gain, and so do the summary and a warning."""
    rows = [row for _, row in jsonl.read_rows(own_run["grpo_training"] / "steps.jsonl")]
    jsonl.write_rows(own_run["grpo_training"] / "steps.jsonl", [{**row, "gradient_norm": 0.0} for row in rows])
    run_report(own_run, tmp_path / "report")
    text = re.sub(r"\s", " ", (tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    accuracy = jsonl.read_json(tmp_path / "report" / "verdict.json")["target"]["grpo"]["accuracy"]
    assert f"GRPO learned nothing: accuracy on words stays at {100 * accuracy:.1f} %" in text
    assert "GRPO takes accuracy" not in text
    assert jsonl.read_json(tmp_path / "report" / "summary.json")["learned"] is False
    assert "report: warning: GRPO learned nothing" in capsys.readouterr().out


def test_summary_holds_what_the_runner_prints(shared_run: dict[str, Path], written: Path) -> None:
    """Scores by model and source, the verdict, how answers look, and digests from the lineage."""
    summary = jsonl.read_json(written / "summary.json")
    scores = jsonl.read_json(shared_run["grpo_evaluation"] / "scores.json")
    assert summary["models"]["grpo"] == scores["greedy"]["by_source"]
    assert set(summary["models"]) == set(summary["worked_fraction"]) == {"base", "sft", "grpo"}
    assert summary["verdict"] == jsonl.read_json(written / "verdict.json")
    assert summary["mean_length_tokens"]["grpo"] > 2 * summary["mean_length_tokens"]["sft"]
    assert summary["digests"]["problems"] == lineage.value_digest("problems")


def test_examples_show_what_was_put_right_first_then_what_broke(written: Path) -> None:
    """Half of the examples were put right, a quarter broken, the rest right before and after."""
    text = (written / "report.html").read_text(encoding="utf-8")
    sizes = re.findall(r"<h3>(SFT wrong, GRPO right|SFT right, GRPO wrong|Both right) <span[^>]*>(\d+) of", text)
    assert sizes == [("SFT wrong, GRPO right", "4"), ("SFT right, GRPO wrong", "2"), ("Both right", "2")]
    assert text.count('class="example"') == 8


def test_a_missed_gate_is_reported_and_fails_nothing_here(tmp_path: Path) -> None:
    """The stage ends well, so that the page and the verdict are there; `register` enforces."""
    folders = make_run(tmp_path / "run", skill={**SKILL, "grpo": SKILL["sft"]}, problems=60)
    metrics = run_report(folders, tmp_path / "report")
    assert metrics["gate_passed"] == 0
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Gate missed: the policy is not registered." in page
    unenforced = ReportConfig.model_validate({**VALUES, "gate": {**VALUES["gate"], "enforce": False}})
    assert "Gate missed, not enforced" in render_report(unenforced, folders)


def test_the_runner_can_add_the_version_and_the_times(shared_run: dict[str, Path]) -> None:
    """After the run the same page is drawn again with what only then is known."""
    version = {"tag": "grpo-policy@v0.0.7", "registry": "outputs/registry", "policy_digest": "ab" * 32}
    text = render_report(CONFIG, shared_run, version=version, seconds={"train_grpo": 141.2, "evaluate": 9.0})
    assert text.count("grpo-policy@v0.0.7") == 2
    assert "2 min 21 s" in text
    assert "2 min 30 s" in text


def test_the_phases_of_a_step_are_drawn_where_they_are_known(shared_run: dict[str, Path], tmp_path: Path) -> None:
    """With the share of each in the time of all steps, by hand, and what no phase accounts for."""
    rows = [
        {"step": 1, "sampling_s": 2.0, "sync_s": 0.5, "update_s": 1.0, "step_s": 4.0},
        {"step": 2, "sampling_s": 4.0, "sync_s": 0.5, "update_s": 1.0, "step_s": 6.0},
    ]
    jsonl.write_rows(tmp_path / "timings.jsonl", rows)
    text = render_report(CONFIG, shared_run, timings=tmp_path)
    assert "median GRPO step took 5 s" in text
    shown = re.findall(r"</i>([a-z ]+) (\d+)\u202f%", text[text.index("Where the time went") :])
    assert shown[:4] == [
        ("sampling", "60"),
        ("weight sync", "10"),
        ("update", "20"),
        ("waiting and other", "10"),
    ]
    assert "Where the time went" not in render_report(CONFIG, shared_run)


def test_hostile_answers_stay_text(own_run: dict[str, Path]) -> None:
    """What a model writes cannot become part of the page."""
    _edit_records(own_run["grpo_evaluation"], lambda row: {**row, "response": "<script>alert(1)</script><b>"})
    text = render_report(CONFIG, own_run)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


def _edit_records(evaluation: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    rows = [row for _, row in jsonl.read_rows(evaluation / "records.jsonl")]
    jsonl.write_rows(evaluation / "records.jsonl", [edited for row in rows if (edited := edit(row)) is not None])


def test_a_problem_that_only_one_model_answered_is_named(own_run: dict[str, Path], tmp_path: Path) -> None:
    """Without its partner an answer cannot be compared; nothing is written."""
    rows = [row for _, row in jsonl.read_rows(own_run["grpo_evaluation"] / "records.jsonl")]
    lost = next(row["id"] for row in rows if row["sample"] == 0 and row["verdict"] == "wrong")
    _edit_records(own_run["grpo_evaluation"], lambda row: None if row["id"] == lost else row)
    with pytest.raises(PipelineError, match=f"no answer to 1 of the problems .*such as {lost}"):
        run_report(own_run, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_another_problem_under_the_same_id_is_refused(own_run: dict[str, Path], tmp_path: Path) -> None:
    """Equal ids with another expected answer come from other data."""
    _edit_records(own_run["grpo_evaluation"], lambda row: {**row, "answer": row["answer"] + "0"})
    with pytest.raises(PipelineError, match=r"problem .*/test/00000 has another source or answer than"):
        run_report(own_run, tmp_path / "report")


def test_a_problem_answered_twice_is_refused(own_run: dict[str, Path], tmp_path: Path) -> None:
    """Two greedy answers to one problem would count twice."""
    _edit_records(own_run["sft_evaluation"], lambda row: {**row, "sample": 0})
    with pytest.raises(PipelineError, match=r"records\.jsonl:2: second greedy answer to problem gsm8k/test/00000"):
        run_report(own_run, tmp_path / "report")


def test_scores_of_other_records_are_refused(own_run: dict[str, Path], tmp_path: Path) -> None:
    """Tables and gate must speak of the same answers."""
    shutil.copy(own_run["sft_evaluation"] / "scores.json", own_run["grpo_evaluation"] / "scores.json")
    with pytest.raises(PipelineError, match=r"scores\.json: has .* evaluate again"):
        run_report(own_run, tmp_path / "report")


def test_models_evaluated_under_different_settings_are_not_compared(own_run: dict[str, Path], tmp_path: Path) -> None:
    """Another temperature or token limit makes another measurement."""
    made = lineage.read(own_run["grpo_evaluation"])
    assert made is not None
    lineage.write(own_run["grpo_evaluation"], {**made, "config": {**made["config"], "num_samples": 9}})
    with pytest.raises(PipelineError, match="evaluated under another config"):
        run_report(own_run, tmp_path / "report")


def test_a_damaged_record_is_named_by_line(own_run: dict[str, Path], tmp_path: Path) -> None:
    """File, line and key of what cannot be read."""
    _edit_records(own_run["grpo_evaluation"], lambda row: {**row, "verdict": "maybe"})
    with pytest.raises(PipelineError, match=r"records\.jsonl:1\.verdict: input should be 'right', 'wrong' or"):
        run_report(own_run, tmp_path / "report")


def test_a_quantity_that_no_step_recorded_leaves_its_place(own_run: dict[str, Path]) -> None:
    """Without a KL term there is no KL to draw, and the page says so."""
    rows = [row for _, row in jsonl.read_rows(own_run["grpo_training"] / "steps.jsonl")]
    jsonl.write_rows(own_run["grpo_training"] / "steps.jsonl", ({**row, "kl": None} for row in rows))
    text = render_report(CONFIG, own_run)
    assert text.count("Not recorded in this run.") == 1
    assert text.count("<svg") == 10


def test_a_long_run_still_fits_the_page(own_run: dict[str, Path]) -> None:
    """Thousands of steps and long answers are thinned and cut, not dropped."""
    rows = [row for _, row in jsonl.read_rows(own_run["grpo_training"] / "steps.jsonl")]
    many = [{**row, "step": index} for index, row in enumerate(rows * 100)]
    jsonl.write_rows(own_run["grpo_training"] / "steps.jsonl", many)
    _edit_records(own_run["grpo_evaluation"], lambda row: {**row, "response": "word " * 4000})
    assert len(render_report(CONFIG, own_run).encode()) < 1_000_000


@pytest.mark.slow
def test_the_stage_loads_neither_torch_nor_transformers(shared_run: dict[str, Path], tmp_path: Path) -> None:
    """The report runs in the light image."""
    code = (
        "import sys, json, pathlib; from components.report.report import report; "
        "from components.report.config import ReportConfig; folders = json.loads(sys.argv[1]); "
        "config = ReportConfig.model_validate(json.loads(sys.argv[2])); "
        "report(config, **{name: pathlib.Path(folder) for name, folder in folders.items()}); "
        "sys.exit(bool({'torch', 'transformers', 'deepspeed', 'vllm'} & set(sys.modules)))"
    )
    folders = {name: str(folder) for name, folder in {**shared_run, "report": tmp_path}.items()}
    subprocess.run([sys.executable, "-c", code, json.dumps(folders), json.dumps(VALUES)], check=True)


@pytest.mark.slow
def test_the_kubeflow_task_shows_the_page_and_the_metrics(shared_run: dict[str, Path], tmp_path: Path) -> None:
    """The wrapper runs the step and copies the page to where Kubeflow draws it."""
    from kfp import dsl

    from components.report import component

    inputs = {name: dsl.Artifact(uri=str(folder)) for name, folder in shared_run.items()}
    page, metrics = dsl.HTML(uri=str(tmp_path / "html" / "page")), dsl.Metrics(uri=str(tmp_path / "metrics"))
    out = dsl.Artifact(uri=str(tmp_path / "report"))
    component.report.python_func(config=VALUES, **inputs, report=out, page=page, metrics=metrics)
    assert (tmp_path / "html" / "page").read_bytes() == (tmp_path / "report" / "report.html").read_bytes()
    assert metrics.metadata["gate_passed"] == 1
