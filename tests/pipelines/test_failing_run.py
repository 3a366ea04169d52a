"""The cluster's form of the graph, run here for real as far as it gets when preflight finds something wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.shared.environment import KUBECONFIG_VARIABLE
from tests.fake_cluster import ApiServer, kinds

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_that_cannot_start_ends_soon_and_cleanly(tmp_path: Path) -> None:
    """Preflight names everything that is wrong, no stage runs, and clean_up writes what became of the run."""
    with ApiServer() as server:
        server.cluster.add_runtime()
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        command = [sys.executable, "-m", "tests.pipelines.failing_run", str(tmp_path / "root")]
        environment = {**os.environ, KUBECONFIG_VARIABLE: str(kubeconfig)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert server.cluster.all(kinds.TRAIN_JOBS) == []
    said = [line.strip() for line in done.stdout.splitlines()]
    first = said.index("error: preflight: 3 to correct before this run can start")
    assert [line.partition(":")[0] for line in said[first + 1 : first + 4]] == [
        "train_sft_model_base",
        "train_grpo_num_steps",
        "deployment.volume",
    ]
    (run,) = (tmp_path / "root").iterdir()
    assert {path.name for path in run.iterdir() if path.is_dir()} <= {"preflight", "clean-up"}
    assert (run / "clean-up" / "summary").read_text().startswith("# Run failed")
