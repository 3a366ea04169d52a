"""The same graph under DVC: equal artifacts, and only what changed is computed."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import yaml

from tests.pipelines.project import FinishedRun, Project, bytes_in, smoke

pytestmark = pytest.mark.slow

FOLDERS = {
    ("prepare_data", "problems"): "prepare_data/problems",
    ("validate_data", "validation"): "validate_data/validation",
    ("train_sft", "base_model"): "train_sft/base_model",
    ("train_sft", "reference"): "train_sft/reference",
    ("train_sft", "training"): "train_sft/training",
    ("train_grpo", "policy"): "train_grpo/policy",
    ("train_grpo", "training"): "train_grpo/training",
    ("evaluate base", "evaluation"): "evaluate/base",
    ("evaluate sft", "evaluation"): "evaluate/sft",
    ("evaluate grpo", "evaluation"): "evaluate/grpo",
    ("report", "report"): "report/report",
    ("register", "registration"): "register/registration",
}


@pytest.fixture(scope="module")
def repeated(dvc_project: Project) -> Project:
    """The smoke preset under DVC, whose train_grpo was killed in the middle and then run again."""
    with subprocess.Popen(
        ["dvc", "repro", "train_grpo"],
        cwd=dvc_project.folder,
        env=dvc_project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as repro:
        os.kill(_wait_for_training(dvc_project), signal.SIGKILL)
        printed, _ = repro.communicate(timeout=60)
    assert repro.returncode != 0, printed
    assert not (dvc_project.folder / "outputs/stages/train_grpo/policy").exists()
    again = dvc_project.run("dvc", "repro")
    assert again.returncode == 0, again.stdout + again.stderr
    return dvc_project


def test_both_runners_make_the_same_bytes(smoke_run: FinishedRun, repeated: Project) -> None:
    """Equal inputs give equal artifacts: under KFP and DVC, after a kill, on another day."""
    different = []
    for (task, name), folder in FOLDERS.items():
        one, other = bytes_in(smoke_run.outputs[task][name]), bytes_in(repeated.folder / "outputs/stages" / folder)
        different += [f"{folder}/{file}" for file in one.keys() | other.keys() if one.get(file) != other.get(file)]
    assert not different


def test_a_second_repro_does_nothing(repeated: Project) -> None:
    """What is done is not done again."""
    assert _ran(repeated.run("dvc", "repro").stdout) == []


def test_metrics_and_plots_are_there_for_dvc(repeated: Project) -> None:
    """`dvc metrics show` knows the accuracies, `dvc plots show` draws the curves."""
    shown = repeated.run("dvc", "metrics", "show", "--json")
    metrics = json.loads(shown.stdout)[""]["data"]
    scores = metrics["outputs/stages/evaluate/grpo/scores.json"]["data"]
    assert 0 <= scores["greedy"]["all"]["accuracy"] <= 1
    assert "verdict" in metrics["outputs/stages/report/report/summary.json"]["data"]
    plotted = repeated.run("dvc", "plots", "show")
    assert plotted.returncode == 0, plotted.stderr
    page = (repeated.folder / "dvc_plots/index.html").read_text()
    for title in yaml.safe_load((repeated.folder / "dvc.yaml").read_text())["plots"]:
        assert next(iter(title)) in page


def test_a_new_learning_rate_reruns_what_depends_on_it(repeated: Project) -> None:
    """train_grpo and what follows from it, and nothing before."""
    params = smoke()
    params["train_grpo"]["learning_rate"] *= 1.01
    params["report"]["gate"]["enforce"] = False
    repeated.use(params)
    ran = _ran(repeated.run("dvc", "repro").stdout)
    assert ran == ["train_grpo", "evaluate@grpo", "report", "register"]


def _wait_for_training(project: Project) -> int:
    """Return the process of train_grpo once it has begun to write its outputs aside."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if (project.folder / "outputs/stages/train_grpo/.policy.partial").exists():
            (stage,) = project.processes("components.train_grpo")
            return stage
        time.sleep(0.05)
    pytest.fail("train_grpo has not been started")


def _ran(printed: str) -> list[str]:
    return re.findall(r"Running stage '([^']+)'", printed)
