"""Preflight as Kubeflow runs it: a task that hands parameters on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.preflight.config import load_params, stage_sections
from tests.fake_cluster import ApiServer

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_task_hands_the_sections_on(server: ApiServer, tmp_path: Path) -> None:
    """The outputs are what a laptop's run has as parameters, and beside them what a cluster needs."""
    command = [sys.executable, "-m", "tests.preflight.as_task", str(tmp_path / "root")]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True, env=dict(os.environ))
    printed = json.loads(done.stdout.splitlines()[-1])
    outputs = printed["outputs"]
    expected = stage_sections(load_params(_ROOT / "params.yaml"))
    for stage in ("train_grpo", "report", "register"):
        expected[stage]["registry"] = "/work/registry"
    assert {stage: outputs.pop(f"{stage}_config") for stage in expected} == expected
    assert outputs.pop("cluster_config")["volume"] == "grpo-pipeline"
    asked = {"evaluate_gpus": "1", "evaluate_memory": "7Gi", "evaluate_node_selector": {}, "evaluate_tolerations": []}
    assert outputs == {**asked, "unchanged": False}
    assert "<title>Configuration of this run</title>" in Path(printed["page"]).read_text()
