"""The same graph under DVC and KFP's own local runner: equal artifacts, and only what changed is computed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.shared.lineage import read
from pipelines.dvc_plots import install_template
from tests.pipelines.project import FinishedRun, Project, bytes_in, copy_project
from tests.test_pages import BROWSER

pytestmark = pytest.mark.slow


def test_both_runners_make_the_same_bytes(smoke_run: FinishedRun, dvc_project: Project) -> None:
    """Equal inputs give equal artifacts: in a run and under DVC, after a kill, on another day."""
    different = []
    for stage, outputs in smoke_run.outputs.items():
        for name in outputs.keys() - {"timings"}:
            folder = f"{stage}/{name}"
            one, other = bytes_in(outputs[name]), bytes_in(dvc_project.folder / "outputs/stages" / folder)
            different += [f"{folder}/{file}" for file in one.keys() | other.keys() if one.get(file) != other.get(file)]
            assert _threads(outputs[name]) == _threads(dvc_project.folder / "outputs/stages" / folder), folder
    assert ran_stages(dvc_project) == ["register"], "what is done is done again"
    # Who registered the version, and when; digests of what has that.
    assert sorted(different) == [f"register/registration/{name}.json" for name in ("digests", "version")]


def _threads(artifact: Path) -> dict[str, int | None]:
    """By stage, the threads that torch computed with, according to the lineage of what the stage has made."""
    made_by = read(artifact)
    assert made_by is not None
    return {made_by.stages[run.of].stage: run.threads for run in made_by.runs}


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
def test_plots_are_drawn_without_a_network(dvc_project: Project, tmp_path: Path) -> None:
    """The page of `dvc plots show`, made after set-up, names no other place, and a browser draws every chart."""
    install_template(dvc_project.folder, dvc_project.folder / "dvc_plots.template.html")
    plotted = dvc_project.run("dvc", "plots", "show")
    assert plotted.returncode == 0, plotted.stderr
    page = dvc_project.folder / "dvc_plots/index.html"
    assert re.findall(r"<script[^>]*src=", page.read_text()) == []
    titles = [next(iter(plot)) for plot in yaml.safe_load((dvc_project.folder / "dvc.yaml").read_text())["plots"]]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}"]
    command = [str(BROWSER), *options, *offline, page.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert len(re.findall(r"<(?:canvas|svg)[^>]*marks", drawn)) == len(titles)


def test_a_clone_runs_an_experiment_with_another_value(smoke_run: FinishedRun, tmp_path: Path) -> None:
    """`dvc exp run -S` in a new clone without raw data; own files are noticed, and `dvc params diff` names the key."""
    clone = copy_project(tmp_path / "clone")
    identity = ("-c", "user.name=a", "-c", "user.email=b")
    for command in (("add", "--all"), (*identity, "commit", "--quiet", "--message", "x")):
        assert clone.run("git", *command).returncode == 0
    steps = "train_grpo.num_steps=7"
    ran = clone.run("dvc", "exp", "run", "-S", steps, "-S", "prepare_data.sources.0.num_train=400", "prepare_data")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    compared = yaml.safe_load((clone.folder / "outputs/stages/params/train_grpo.yaml").read_text())["train_grpo"]
    assert (compared["num_steps"], "storage" in compared) == (7, False)
    changed = clone.run("dvc", "params", "diff", "--json").stdout
    num_steps = yaml.safe_load(Path("params.yaml").read_text())["train_grpo"]["num_steps"]
    expected = {"old": num_steps, "new": 7, "diff": 7 - num_steps}
    assert json.loads(changed)["params.yaml"]["train_grpo.num_steps"] == expected
    (clone.folder / "data/own/more.jsonl").write_text("{}\n")
    assert ran_stages(clone, "prepare_data") == ["prepare_data"]
    assert ran_stages(clone, "prepare_data") == []


def ran_stages(project: Project, *targets: str) -> list[str]:
    """The stages that `dvc repro` runs now."""
    return re.findall(r"Running stage '([^']+)'", project.run("dvc", "repro", *targets).stdout)


_RUN = """
import sys
from itertools import pairwise
from pathlib import Path
from kfp import dsl, local
from components.preflight.config import load_params, stage_sections
from pipelines.graph import stages
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1], raise_on_error=False)
@dsl.pipeline
def graph():
    tasks = stages(stage_sections(load_params(Path("params/smoke.yaml"))), False, launch={}, place={})
    for before, after in pairwise(tasks.values()):  # the runner has no order of its own
        after.after(before)
graph()
"""


def test_tasks_make_the_bytes_of_a_local_run(smoke_run: FinishedRun, tmp_path: Path) -> None:
    """Each component hands its stage the folders that it declares."""
    project = copy_project(tmp_path)
    ran = project.run(sys.executable, "-c", _RUN, str(tmp_path / "root"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    compared = 0
    for stage, outputs in smoke_run.outputs.items():
        for name in outputs.keys() - {"timings", "registration"}:
            made = list((tmp_path / "root").glob(f"*/{stage.replace('_', '-')}/*/{name}"))
            assert len(made) == 1, f"{stage}: {ran.stdout[-2000:]}"
            assert bytes_in(made[0]) == bytes_in(outputs[name]), f"{stage}: {name}"
            compared += 1
    assert compared == 9
