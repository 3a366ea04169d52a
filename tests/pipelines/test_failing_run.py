"""The cluster's form of the graph, run here for real as far as it gets when preflight finds something wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.shared.environment import KUBECONFIG_VARIABLE
from tests.fake_cluster import ApiServer, kinds
from tests.presets import ROOT

CODE = """
import sys
from pathlib import Path
from kfp import local
from components.preflight.config import load_params
from components.preflight.form import form_of
from pipelines.graph import cluster_graph
params = load_params(Path("params.yaml"))
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1], raise_on_error=False)
cluster_graph(params)(**form_of(params) | {"grpo_num_steps": 0, "base_model": "scratch:huge"})
"""


@pytest.mark.slow
def test_a_run_that_cannot_start_ends_soon_and_cleanly(tmp_path: Path) -> None:
    """Preflight names everything that is wrong, and no stage runs."""
    with ApiServer() as server:
        server.cluster.add_runtime()
        environment = {**os.environ, KUBECONFIG_VARIABLE: str(server.kubeconfig(tmp_path / "kubeconfig"))}
        command = [sys.executable, "-c", CODE, str(tmp_path / "root")]
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
