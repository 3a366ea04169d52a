"""The same graph under DVC: equal artifacts, and only what changed is computed."""

import json
import re

import pytest
import yaml

from tests.pipelines.project import FinishedRun, Project, bytes_in
from tests.presets import preset, write_params

pytestmark = pytest.mark.slow


def test_both_runners_make_the_same_bytes(smoke_run: FinishedRun, dvc_project: Project) -> None:
    """Equal inputs give equal artifacts: under KFP and DVC, after a kill, on another day."""
    different = []
    for stage, outputs in smoke_run.outputs.items():
        for name in outputs.keys() - {"timings"}:
            folder = f"{stage}/{name}"
            one, other = bytes_in(outputs[name]), bytes_in(dvc_project.folder / "outputs/stages" / folder)
            different += [f"{folder}/{file}" for file in one.keys() | other.keys() if one.get(file) != other.get(file)]
    assert not different


def test_a_second_repro_does_nothing(dvc_project: Project) -> None:
    """What is done is not done again."""
    assert _ran(dvc_project) == []


def test_metrics_and_plots_are_there_for_dvc(dvc_project: Project) -> None:
    """`dvc metrics show` knows the accuracies, `dvc plots show` draws the curves."""
    shown = dvc_project.run("dvc", "metrics", "show", "--json")
    metrics = json.loads(shown.stdout)[""]["data"]
    scores = metrics["outputs/stages/evaluate/evaluation/grpo/scores.json"]["data"]
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
    params = preset()
    params["train_grpo"]["learning_rate"] *= 1.01
    params["report"]["gate"]["enforce"] = False
    write_params(dvc_project.folder / "params.yaml", params)
    assert _ran(dvc_project) == ["train_grpo", "evaluate", "report", "register"]


def _ran(project: Project) -> list[str]:
    """The stages that `dvc repro` runs now."""
    return re.findall(r"Running stage '([^']+)'", project.run("dvc", "repro").stdout)
