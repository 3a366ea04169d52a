"""The whole graph on real stages with a tiny model, and when it goes wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from components.preflight.config import load_params
from components.shared.jsonl import read_json
from components.shared.lineage import digest, file_digest
from components.shared.page import percent
from pipelines.run.history import About, every_run
from tests import recorded_runs
from tests.pipelines.project import FinishedRun, Project, copy_project, unmoved
from tests.presets import ROOT, preset, write_params

pytestmark = pytest.mark.slow

BEFORE = ["prepare_data", "validate_data", "train_sft", "train_grpo", "evaluate"]
STAGES = [*BEFORE, "report", "register"]
SMOKE = ("run", "--params", "params/smoke.yaml")


def test_the_screen_is_for_people(smoke_run: FinishedRun) -> None:
    """Every stage is announced once; no warning of a library and no colour code reaches a pipe."""
    assert smoke_run.exit_code == 0, smoke_run.printed + smoke_run.errors
    headers = [line for line in smoke_run.printed.splitlines() if line.startswith("[")]
    assert headers == [f"[{number}/7] {stage}" for number, stage in enumerate(STAGES, start=1)]
    for noise in ("INFO", "WARNING", "\x1b"):
        assert noise not in smoke_run.printed
    assert smoke_run.errors == ""


def test_the_folder_of_a_run_has_its_results(smoke_run: FinishedRun) -> None:
    """Scores, verdict, version, times, digests and exit code as on the screen; the report, with version; the params."""
    summary = json.loads((smoke_run.folder / "summary.json").read_text())
    assert set(summary["models"]) == {"base", "sft", "grpo"}
    assert unmoved(smoke_run.outputs["train_grpo"]["policy"], smoke_run.outputs["train_sft"]["reference"]) == []
    assert list(summary["seconds"]) == STAGES
    assert (summary["exit"], summary["version"]["version"]) == (0, "v0.0.1")
    problems = smoke_run.outputs["prepare_data"]["problems"]
    assert summary["digests"]["test"] == file_digest(problems / "test.jsonl")
    assert summary["version"]["policy_digest"] == digest(smoke_run.outputs["train_grpo"]["policy"])
    assert summary["version"]["tag"] in smoke_run.printed
    for scores in summary["models"].values():
        for score in scores.values():
            assert percent(score["accuracy"]) in smoke_run.printed
    page = (smoke_run.folder / "report.html").read_text()
    assert "GRPO did not change accuracy" in page
    assert "grpo-policy-smoke@v0.0.1" in page
    assert load_params(smoke_run.folder / "params.yaml") == load_params(ROOT / "params/smoke.yaml")
    assert "extends" not in (smoke_run.folder / "params.yaml").read_text()


def test_a_missed_gate_registers_nothing_but_leaves_the_report(missed_run: FinishedRun) -> None:
    """Exit code 3, the verdict on the screen, summary and report in place, and no version in the registry."""
    assert missed_run.exit_code == 3, missed_run.printed + missed_run.errors
    assert missed_run.errors.count("\n") == 1
    assert "gate        MISSED" in missed_run.printed
    assert "registered  nothing" in missed_run.printed
    summary = json.loads((missed_run.folder / "summary.json").read_text())
    assert (summary["exit"], summary["version"], summary["verdict"]["passed"]) == (3, None, False)
    assert (missed_run.folder / "report.html").is_file()
    assert not list(missed_run.project.folder.glob("outputs/**/version.json"))


def test_a_second_run_takes_what_is_unchanged(smoke_run: FinishedRun, tmp_path: Path) -> None:
    """All but what reads or writes the registry: by hard link, with its lineage, so that nothing new is registered."""
    project = Project(shutil.copytree(smoke_run.project.folder, tmp_path / "again", symlinks=True))
    before = (project.folder / "outputs/latest").resolve()
    again = project.pipeline(*SMOKE, "--set=report.num_examples=2", "--set=train_sft.checkpoint.keep_last=3")
    assert again.exit_code == 0, again.printed + again.errors
    assert "warning: train_sft.checkpoint.keep_last changed, which has no effect on a reused result" in again.printed
    assert again.printed.count(f"      unchanged: from {smoke_run.folder.resolve().name}\n") == len(BEFORE)
    seeds = ["--dry-run", "--set", "prepare_data.seed=9", "--set", "train_sft.seed=9"]
    other, same = (project.pipeline(*each, *seeds).printed for each in (["run"], SMOKE))
    assert "[3/7] train_sft     runs: no earlier run of this params file has finished it\n" in other
    assert "stages would run (no time estimate: no earlier run is comparable); nothing was run" in other
    assert "[3/7] train_sft     runs: prepare_data will run; took " in same
    for stage in BEFORE:
        for name, folder in again.outputs[stage].items():
            for path in filter(Path.is_file, folder.rglob("*")):
                assert path.samefile(before / "artifacts" / stage / name / path.relative_to(folder))
    assert "registered  nothing new: the same weights are already registered as grpo-policy-smoke@" in again.printed
    figures = json.loads((again.folder / "summary.json").read_text())
    assert (list(figures["seconds"]), list(figures["reused_from"])) == (["report", "register"], BEFORE)


def test_a_killed_stage_is_reported_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    """With exit code 75, as the kernel kills for memory. A resumed run keeps its description; killed, it stops, too."""
    project = copy_project(tmp_path)
    with project.start(*SMOKE, "--name=mine", "--note=why", "--tag=a") as run:
        _wait_for_log(project, "--- validate_data")
        while len(processes := project.processes("pipelines.run.stages")) < 2:  # between two stages
            time.sleep(0.01)
        os.kill(max(processes), signal.SIGKILL)
        ended = FinishedRun.of(project, run)
    cause = "the stage was killed (SIGKILL), usually because the machine ran out of memory; close other programs"
    assert (ended.exit_code, ended.errors.strip()) == (75, f"error: {cause}")
    assert "stopped at validate_data; resume with: " in ended.printed
    assert not [*project.folder.glob("outputs/runs/**/validation/validation"), *project.folder.glob("outputs/latest")]
    with project.start("run", "--resume=mine") as resumed:
        while not project.processes("pipelines.run.stages"):
            time.sleep(0.05)
        resumed.kill()
    while project.processes():  # the stages end with their run, even if it is killed
        time.sleep(0.05)
    newest, _ = every_run(project.folder / "outputs")
    assert newest.state.startswith("stopped")
    assert (newest.name[-5:], newest.about) == ("-mine", About(params="smoke", note="why", tags=("a",)))


def test_ctrl_c_leaves_a_checkpoint_of_what_was_trained(tmp_path: Path) -> None:
    """The stage at work has the time that its params give it, and the next run goes on from there."""
    project, params = copy_project(tmp_path), preset()
    params["train_sft"] |= {"num_steps": 100_000}
    params["train_sft"]["checkpoint"] |= {"every_steps": 100_000}
    write_params(project.folder / "long.yaml", params)
    with project.start("run", "--params", "long.yaml") as run:
        _wait_for_log(project, r"train_sft \d+/100000")
        run.send_signal(signal.SIGINT)
        ended = FinishedRun.of(project, run)
    assert ended.exit_code == 128 + signal.SIGINT
    assert project.processes() == []
    assert not list(project.folder.rglob("*.partial"))
    (checkpoint,) = project.folder.glob("outputs/work/train_sft/*/checkpoints/step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    saved = rf"stopped at train_sft, step {step} of 100000 is saved; resume with: grpo-pipeline run --resume (\S+);"
    name = re.search(saved, ended.errors)
    assert name, ended.errors
    expected = project.pipeline("run", "--resume", name[1], "--dry-run").printed.splitlines()
    assert expected[0] == f"[1/7] prepare_data  unchanged: from {name[1]}"
    resumes = f"resumes after step {step} of 100000"
    assert expected[2] == f"[3/7] train_sft     runs: no earlier run of this params file has finished it; {resumes}"
    dropped = project.pipeline("run", "--resume", name[1], "--set=train_sft.num_steps=9", "--dry-run").printed
    assert f"step {step} of {name[1]} is not used: train_sft.num_steps: 100000 -> 9" in dropped


@pytest.mark.long(minutes=8)
@pytest.mark.timeout(7200)
def test_nothing_is_registered_after_a_stop(tmp_path: Path) -> None:
    """Ctrl-C at random moments of whole runs, some of which take most stages from the ones before."""
    project, random = copy_project(tmp_path), Random(int(os.environ.get("GRPO_PIPELINE_TEST_SEED", "1")))
    for number in range(int(os.environ.get("GRPO_PIPELINE_TEST_STOPS", "25"))):
        fresh = ["--fresh"] if number % 2 else []
        with project.start(*SMOKE, *fresh) as run:
            with suppress(subprocess.TimeoutExpired):
                run.wait(random.uniform(0.5, 25 if fresh else 10))
            registered = _registered(project)
            run.send_signal(signal.SIGINT)
            ended = FinishedRun.of(project, run)
        was_done = ended.exit_code == -signal.SIGINT and "7 of 7 stages" in ended.printed  # Python itself was ending
        assert was_done or ended.exit_code in (0, 128 + signal.SIGINT), ended.errors
        assert was_done or ended.exit_code == 0 or _registered(project) == registered, ended.errors
        assert project.processes() == []
        assert not list(project.folder.glob("outputs/runs/**/*.partial"))


@pytest.mark.long(minutes=2)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("preset", recorded_runs.PRESETS)
def test_a_run_that_the_docs_quote_has_its_recorded_results(preset: str, tmp_path: Path) -> None:
    """Line by line on a processor and with a torch that round alike; elsewhere the gate is passed too."""
    recorded, made = read_json(recorded_runs.RECORD)[preset], recorded_runs.make(preset, tmp_path)
    assert [line for line in made["results"] if line.startswith("gate passed: ")]
    if all(made[key] == recorded[key] for key in ("processor", "torch")):
        assert made["results"] == recorded["results"]


def _registered(project: Project) -> list[Path]:
    """The journals of runs that have finished `register`."""
    finished = '"stage": "register", "event": "finished"'
    return [path for path in project.folder.glob("outputs/runs/*/journal.jsonl") if finished in path.read_text()]


def _wait_for_log(project: Project, pattern: str) -> None:
    """Wait until the log of the only run matches."""
    deadline = time.monotonic() + 240
    while not any(re.search(pattern, log.read_text(), re.S) for log in project.folder.glob("outputs/runs/*/run.log")):
        assert time.monotonic() < deadline, f"the log has no {pattern}"
        time.sleep(0.05)
