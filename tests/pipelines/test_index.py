"""The page over all runs and versions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from components.register.snapshot import Snapshot
from components.report.report import STAGE
from components.shared import jsonl, stage
from components.shared.page import percent
from pipelines.run.index import write
from tests.register.registrations import make_config, make_policy, run_register
from tests.report.synthetic import make_run
from tests.report.test_report import CONFIG


def make_outputs(folder: Path) -> Path:
    """A folder of outputs with a finished run and all that may become of others, and a registry beside it."""
    outputs, stages = folder / "outputs", make_run(folder / "stages")
    stage.run(STAGE, CONFIG, {**stages, "report": folder / "report"})
    version = run_register(
        make_config(folder), make_policy(folder / "policy"), folder / "report", folder / "registration"
    )
    trained = {"stage": "train_grpo", "event": "started", "outputs": {"training": str(stages["grpo_training"])}}
    failed = {"stage": "evaluate", "event": "failed", "error": "<b>no memory</b>", "exit_code": 2}
    journals: dict[str, list[Any]] = {
        "20260102T030405Z-params": [trained, {"stage": "register", "event": "finished"}],
        "20260103T030405Z-smoke": [trained, failed],
        "20260104T030405Z-smoke-2": [{"stage": "prepare_data", "event": "started", "outputs": {}}],
        "20260105T030405Z-empty": [],
    }
    for name, events in journals.items():
        run = outputs / "runs" / name
        run.mkdir(parents=True)
        lines = [json.dumps(event) for event in events]
        (run / "journal.jsonl").write_text("\n".join([*lines, '{"stage": "half wri']))
    summary = jsonl.read_json(folder / "report/summary.json")
    finished = {**summary, "version": version, "exit": 0}
    jsonl.write_json(outputs / "runs/20260102T030405Z-params/summary.json", finished)
    (outputs / "runs/20260102T030405Z-params/report.html").touch()
    (outputs / "runs/20260103T030405Z-smoke/summary.json").write_text('{"verdict": ')
    (outputs / "runs/mine").mkdir()
    return outputs


def test_every_run_and_version_is_listed(made_runs: Path) -> None:
    """Whatever became of a run, the newest first; links, figures, curves, aliases, and which run made a version."""
    outputs = made_runs / "outputs"
    text = write(outputs, str(made_runs / "registry")).read_text(encoding="utf-8")
    target = jsonl.read_json(made_runs / "report/verdict.json")["target"]
    accuracies = f"{percent(target['sft']['accuracy'])} → {percent(target['grpo']['accuracy'])}"
    rows = re.findall(r'<tr id="([^"]*)">(.*?)</tr>', text, re.DOTALL)
    assert [name for name, _ in rows] == sorted((path.name for path in outputs.glob("runs/2*")), reverse=True)
    by_name = dict(rows)
    for name, status in (
        ("20260105T030405Z-empty", "stopped"),
        ("20260104T030405Z-smoke-2", "stopped at prepare_data"),
        ("20260103T030405Z-smoke", "failed in evaluate: &lt;b&gt;no memory&lt;/b&gt;"),
        ("20260102T030405Z-params", "finished"),
    ):
        assert status in by_name[name]
        assert ("<svg" in by_name[name]) == (name[:8] in {"20260102", "20260103"})
    assert text.count("<polyline") == 2 * 2  # two curves of each of two runs
    finished = by_name["20260102T030405Z-params"]
    assert '<a href="runs/20260102T030405Z-params/report.html">params</a>' in finished
    assert accuracies in finished
    (version,) = re.findall(r"<tr><td><code>grpo-policy@v0\.0\.1</code>.*?</tr>", text, re.DOTALL)
    assert ">candidate</span>" in version
    assert '<a href="#20260102T030405Z-params"' in version
    assert accuracies in version
    version = jsonl.read_json(made_runs / "registration/version.json")
    assert version["registered"]["by"] in text


def test_a_damaged_version_is_listed_without_its_accuracy(made_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has finished must not end by it."""
    monkeypatch.setattr(Snapshot, "read_each", lambda *_: [(b'{"target": ', None)])
    text = write(made_runs / "outputs", str(made_runs / "registry")).read_text(encoding="utf-8")
    (version,) = re.findall(r"<tr><td><code>grpo-policy@v0\.0\.1</code>.*?</tr>", text, re.DOTALL)
    assert "→" not in version


def test_a_registry_that_cannot_be_read_is_named(made_runs: Path, tmp_path: Path) -> None:
    """The runs are listed all the same."""
    text = write(made_runs / "outputs", (tmp_path / "gone").as_uri()).read_text(encoding="utf-8")
    assert "4 runs, 1 registered version" in text
    assert re.search(r'class="banner warning"><p>git: .*gone', text)
