"""Preflight as a task, which hands parameters on."""

import json
from pathlib import Path
from types import SimpleNamespace

from components.preflight.component import preflight
from components.preflight.config import DEPLOYMENT, load_params, stage_sections
from components.preflight.form import Form
from components.shared.deployment import DeploymentConfig
from tests.fake_cluster import ApiServer
from tests.presets import ROOT


def test_the_task_hands_the_sections_on(server: ApiServer, form: Form, tmp_path: Path) -> None:
    """The outputs are what a laptop's run has as parameters, and beside them what a cluster needs."""
    page = SimpleNamespace(path=str(tmp_path / "page.html"))
    paths = {name: str(tmp_path / name) for name in preflight.component_spec.outputs if name != "configuration"}
    deployment = {DEPLOYMENT: DeploymentConfig().model_dump(mode="json")}
    preflight.python_func(**form, **deployment, **paths, configuration=page)
    outputs = {name: Path(path).read_text() for name, path in paths.items()}
    expected = stage_sections(load_params(ROOT / "params.yaml"))
    for stage in ("train_grpo", "report", "register"):
        expected[stage]["registry"] = "/work/registry"
    assert {stage: json.loads(outputs.pop(f"{stage}_config")) for stage in expected} == expected
    assert json.loads(outputs.pop("cluster_config"))["volume"] == "grpo-pipeline"
    asked = {"evaluate_gpus": "1", "evaluate_memory": "7Gi", "evaluate_node_selector": "{}"}
    assert outputs == {**asked, "evaluate_tolerations": "[]", "unchanged": "false"}
    assert "<title>Configuration of this run</title>" in Path(page.path).read_text()
