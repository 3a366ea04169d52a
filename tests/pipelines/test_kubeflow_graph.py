"""Kubeflow's graph, run here by KFP's own local runner."""

import sys
from pathlib import Path

import pytest

from tests.pipelines.project import FinishedRun, bytes_in, copy_project

pytestmark = pytest.mark.slow

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
    tasks = stages(stage_sections(load_params(Path("params/smoke.yaml"))), launch={}, place={})
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
