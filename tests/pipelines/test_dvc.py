"""The same graph under DVC: equal artifacts, and only what changed is computed."""

import json
import re

import pytest
import yaml

from tests.pipelines.project import FinishedRun, Project, bytes_in, smoke, unmoved

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


def test_both_runners_make_the_same_bytes(smoke_run: FinishedRun, dvc_project: Project) -> None:
    """Equal inputs give equal artifacts: under KFP and DVC, after a kill, on another day."""
    different = []
    for (task, name), folder in FOLDERS.items():
        one, other = bytes_in(smoke_run.outputs[task][name]), bytes_in(dvc_project.folder / "outputs/stages" / folder)
        different += [f"{folder}/{file}" for file in one.keys() | other.keys() if one.get(file) != other.get(file)]
    assert not different
    stages = dvc_project.folder / "outputs/stages"
    assert unmoved(stages / "train_grpo/policy", stages / "train_sft/reference") == []


def test_a_second_repro_does_nothing(dvc_project: Project) -> None:
    """What is done is not done again."""
    assert _ran(dvc_project.run("dvc", "repro").stdout) == []


def test_metrics_and_plots_are_there_for_dvc(dvc_project: Project) -> None:
    """`dvc metrics show` knows the accuracies, `dvc plots show` draws the curves."""
    shown = dvc_project.run("dvc", "metrics", "show", "--json")
    metrics = json.loads(shown.stdout)[""]["data"]
    scores = metrics["outputs/stages/evaluate/grpo/scores.json"]["data"]
    assert 0 <= scores["greedy"]["all"]["accuracy"] <= 1
    assert "verdict" in metrics["outputs/stages/report/report/summary.json"]["data"]
    plotted = dvc_project.run("dvc", "plots", "show")
    assert plotted.returncode == 0, plotted.stderr
    page = (dvc_project.folder / "dvc_plots/index.html").read_text()
    for title in yaml.safe_load((dvc_project.folder / "dvc.yaml").read_text())["plots"]:
        assert next(iter(title)) in page


@pytest.mark.long
def test_a_new_learning_rate_reruns_what_depends_on_it(dvc_project: Project) -> None:
    """train_grpo and what follows from it, and nothing before."""
    params = smoke()
    params["train_grpo"]["learning_rate"] *= 1.01
    params["report"]["gate"]["enforce"] = False
    dvc_project.use(params)
    ran = _ran(dvc_project.run("dvc", "repro").stdout)
    assert ran == ["train_grpo", "evaluate@grpo", "report", "register"]


def _ran(printed: str) -> list[str]:
    return re.findall(r"Running stage '([^']+)'", printed)
