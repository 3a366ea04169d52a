"""Kubeflow's graph, run here by KFP's own local runner: its components, and what preflight finds wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.shared.environment import KUBECONFIG_VARIABLE
from tests.fake_cluster import ApiServer, kinds
from tests.pipelines.project import FinishedRun, bytes_in, copy_project
from tests.presets import ROOT

pytestmark = pytest.mark.slow

_START = """
import sys
from itertools import pairwise
from pathlib import Path
from kfp import dsl, local
from components.preflight.config import load_params, stage_sections
from pipelines.graph import cluster_graph, stages
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1], raise_on_error=False)
"""
_STAGES = """
@dsl.pipeline
def graph():
    tasks = stages(stage_sections(load_params(Path("params/smoke.yaml"))), launch={}, place={})
    for before, after in pairwise(tasks.values()):  # the runner has no order of its own
        after.after(before)
graph()
"""
_CLUSTER = """
params = load_params(Path("params.yaml"))
cluster_graph(params)(grpo_num_steps=0, base_model="scratch:huge")
"""


def test_tasks_make_the_bytes_of_a_local_run(smoke_run: FinishedRun, tmp_path: Path) -> None:
    """Each component hands its stage the folders that it declares."""
    project = copy_project(tmp_path)
    ran = project.run(sys.executable, "-c", _START + _STAGES, str(tmp_path / "root"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    compared = 0
    for stage, outputs in smoke_run.outputs.items():
        for name in outputs.keys() - {"timings", "registration"}:
            made = list((tmp_path / "root").glob(f"*/{stage.replace('_', '-')}/*/{name}"))
            assert len(made) == 1, f"{stage}: {ran.stdout[-2000:]}"
            assert bytes_in(made[0]) == bytes_in(outputs[name]), f"{stage}: {name}"
            compared += 1
    assert compared == 9


def test_a_run_that_cannot_start_ends_soon_and_cleanly(tmp_path: Path) -> None:
    """Preflight names everything that is wrong, and no stage runs."""
    with ApiServer() as server:
        server.cluster.add_runtime()
        environment = {**os.environ, KUBECONFIG_VARIABLE: str(server.kubeconfig(tmp_path / "kubeconfig"))}
        command = [sys.executable, "-c", _START + _CLUSTER, str(tmp_path / "root")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert server.cluster.all(kinds.TRAIN_JOBS) == []
    lines = [line.strip() for line in done.stdout.splitlines()]
    first = lines.index("error: preflight: 3 to correct before this run can start")
    assert [line.partition(":")[0] for line in lines[first + 1 : first + 4]] == [
        "base_model",
        "grpo_num_steps",
        "deployment.volume",
    ]
    (run,) = (tmp_path / "root").iterdir()
    assert {path.name for path in run.iterdir() if path.is_dir()} <= {"preflight"}
