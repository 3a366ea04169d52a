"""The whole graph on real stages with a tiny model: under KFP's local runner, and when it goes wrong."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from components.preflight.config import load_params
from components.shared.jsonl import read_rows
from components.shared.lineage import digest, file_digest
from components.shared.page import percent
from tests.pipelines.project import FinishedRun, Project, bytes_in, copy_project, smoke, unmoved
from tests.presets import ROOT

pytestmark = pytest.mark.slow

TITLES = [
    "prepare_data",
    "validate_data",
    "train_sft",
    "evaluate base",
    "evaluate sft",
    "train_grpo",
    "evaluate grpo",
    "report",
    "register",
]


def test_the_smoke_preset_runs_to_the_end(smoke_run: FinishedRun) -> None:
    """Every stage is announced once with its number, and the exit code is 0."""
    assert smoke_run.exit_code == 0, smoke_run.printed + smoke_run.errors
    headers = [line for line in smoke_run.printed.splitlines() if line.startswith("[")]
    assert headers == [f"[{number}/9] {title}" for number, title in enumerate(TITLES, start=1)]


def test_grpo_moves_every_weight(smoke_run: FinishedRun) -> None:
    """Its rewards differ from the first step on: runs that are compared byte for byte differ where GRPO does."""
    outputs = smoke_run.outputs
    assert unmoved(outputs["train_grpo"]["policy"], outputs["train_sft"]["reference"]) == []
    steps = [row for _, row in read_rows(outputs["train_grpo"]["training"] / "steps.jsonl")]
    assert all(row["gradient_norm"] > 0 for row in steps)
    assert "GRPO leaves accuracy" in (smoke_run.folder / "report.html").read_text()


def test_the_screen_is_for_people(smoke_run: FinishedRun) -> None:
    """No line of KFP, no warning and no colour code reaches a pipe; all of it is in the log."""
    for noise in ("INFO", "Warning", "KFP", "\x1b", "Artifact("):
        assert noise not in smoke_run.printed
    assert smoke_run.errors == ""
    assert "KFP Executor" in (smoke_run.folder / "kfp.log").read_text()


def test_the_summary_holds_what_the_table_shows(smoke_run: FinishedRun) -> None:
    """summary.json has scores, verdict, version, times, digests and the exit code of the run."""
    summary = json.loads((smoke_run.folder / "summary.json").read_text())
    assert set(summary["models"]) == {"base", "sft", "grpo"}
    assert summary["exit"] == 0
    assert list(summary["seconds"]) == TITLES
    assert summary["version"]["version"] == "v0.0.1"
    problems = smoke_run.outputs["prepare_data"]["problems"]
    assert summary["digests"]["test"] == file_digest(problems / "test.jsonl")
    assert summary["version"]["policy_digest"] == digest(smoke_run.outputs["train_grpo"]["policy"])
    assert summary["version"]["tag"] in smoke_run.printed
    for scores in summary["models"].values():
        for score in scores.values():
            assert percent(score["accuracy"]) in smoke_run.printed


def test_the_report_of_the_run_has_version_and_times(smoke_run: FinishedRun) -> None:
    """The page in the run's folder says more than the stage's, which is written before registration."""
    page = (smoke_run.folder / "report.html").read_text()
    stage_page = (smoke_run.outputs["report"]["report"] / "report.html").read_text()
    assert "grpo-policy-smoke@v0.0.1" in page
    assert "grpo-policy-smoke@v0.0.1" not in stage_page


def test_the_run_keeps_the_params_it_ran_with(smoke_run: FinishedRun) -> None:
    """A run's folder is complete: the params file is in it, with what it extends and all defaults."""
    text = (smoke_run.folder / "params.yaml").read_text()
    assert load_params(smoke_run.folder / "params.yaml") == load_params(ROOT / "params/smoke.yaml")
    assert "extends" not in text
    assert "max_gradient_norm" in text


def test_every_artifact_says_what_it_was_made_from(smoke_run: FinishedRun) -> None:
    """From the policy's folder alone one reaches the data it was trained on."""
    lineage = json.loads((smoke_run.outputs["train_grpo"]["policy"] / "lineage.json").read_text())
    problems = smoke_run.outputs["prepare_data"]["problems"]
    assert lineage["inputs"]["problems"]["digest"] == digest(problems)
    assert lineage["inputs"]["reference"]["lineage"]["inputs"]["problems"]["digest"] == digest(problems)


def test_a_registered_version_comes_back(smoke_run: FinishedRun, tmp_path: Path) -> None:
    """What `grpo-pipeline fetch` brings is the policy that was trained."""
    fetched = FinishedRun.of(smoke_run.project, smoke_run.project.start("fetch", "v0.0.1", str(tmp_path / "policy")))
    assert fetched.exit_code == 0, fetched.errors
    assert digest(tmp_path / "policy") == digest(smoke_run.outputs["train_grpo"]["policy"])


def test_a_missed_gate_registers_nothing_but_leaves_the_report(missed_run: FinishedRun) -> None:
    """Exit code 3, the verdict on the screen, summary and report in place, and no version in the registry."""
    assert missed_run.exit_code == 3, missed_run.printed + missed_run.errors
    assert missed_run.errors.count("\n") == 1
    assert "gate        MISSED" in missed_run.printed
    assert "registered  nothing" in missed_run.printed
    summary = json.loads((missed_run.folder / "summary.json").read_text())
    assert (summary["exit"], summary["version"], summary["verdict"]["passed"]) == (3, None, False)
    assert (missed_run.folder / "report.html").is_file()
    assert "registration" not in [path.name for path in missed_run.folder.rglob("*")]
    registry = missed_run.project.folder / "outputs/registry"
    assert not registry.exists() or not list(registry.rglob("version.json"))


def test_equal_inputs_give_equal_artifacts(smoke_run: FinishedRun, missed_run: FinishedRun) -> None:
    """Two runs that differ in the gate alone agree in every byte of all that comes before it."""
    one, other = smoke_run.outputs, missed_run.outputs
    for title in TITLES[: TITLES.index("report")]:
        for name in set(one[title]) - {"timings"}:
            assert bytes_in(one[title][name]) == bytes_in(other[title][name]), f"{title}: {name}"


def test_a_killed_stage_is_reported_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    """SIGKILL from outside, as by the kernel when memory runs out: exit code 1, the log's end, no output in place."""
    project = copy_project(tmp_path)
    with project.start("run", "--params", "params/smoke.yaml") as run:
        os.kill(_process_of_second_stage(project), signal.SIGKILL)
        ended = FinishedRun.of(project, run)
    assert ended.exit_code == 1
    assert ended.errors.strip().startswith("error: validate_data stopped unexpectedly; the last lines of outputs/runs/")
    assert ended.errors.rstrip().endswith("Killed")
    assert "1 of 9 stages" in ended.printed
    assert not list(project.folder.glob("outputs/runs/**/validation"))
    assert not (project.folder / "outputs/latest").exists()


def test_ctrl_c_leaves_a_checkpoint_of_what_was_trained(tmp_path: Path) -> None:
    """The stage at work has the time that its params give it, and the next run goes on from there."""
    project = copy_project(tmp_path)
    params = smoke()
    params["train_sft"] |= {"num_steps": 100_000}
    params["train_sft"]["checkpoint"] |= {"every_steps": 100_000}
    project.use(params, "long.yaml")
    with project.start("run", "--params", "long.yaml") as run:
        _wait_until_printed(project, r"train_sft \d+/100000")
        run.send_signal(signal.SIGINT)
        stopped = FinishedRun.of(project, run)
    assert stopped.exit_code == 128 + signal.SIGINT
    assert "stopped, and no stage is left running" in stopped.errors
    assert project.processes("") == []
    assert len(list(project.folder.glob("outputs/work/train_sft/*/checkpoints/step-*"))) == 1
    assert not list(project.folder.rglob("*.partial"))


def test_a_stopped_run_leaves_no_process_behind(tmp_path: Path) -> None:
    """A plain kill of the command ends the stage too, which takes away what it has half written."""
    project = copy_project(tmp_path)
    with project.start("run", "--params", "params/smoke.yaml") as run:
        _process_of_second_stage(project)
        assert len(project.processes("")) > 2  # the command, the graph, the stage
        run.send_signal(signal.SIGTERM)
        stopped = FinishedRun.of(project, run)
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert "stopped, and no stage is left running" in stopped.errors
    assert project.processes("") == []
    assert not list(project.folder.rglob("*.partial"))


def _wait_until_printed(project: Project, pattern: str) -> None:
    """Wait until the log of the only run has a line like this."""
    deadline = time.monotonic() + 240
    while not any(re.search(pattern, log.read_text()) for log in project.folder.glob("outputs/runs/*/kfp.log")):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def _process_of_second_stage(project: Project) -> int:
    """Wait until the second stage of the only run works, and return its process."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        logs = [log.read_text() for log in project.folder.glob("outputs/runs/*/kfp.log")]
        found = project.processes("ephemeral_component.py")
        if found and any(log.count("Got executor_input") == 2 for log in logs):
            return found[0]
        time.sleep(0.05)
    pytest.fail("the second stage has not been started")
