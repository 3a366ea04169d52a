"""Preflight as a task under the local runner: `python -m tests.preflight.as_task PIPELINE_ROOT`; prints its outputs."""

import json
import sys

from kfp import local

from components.preflight.component import preflight
from components.preflight.config import DEPLOYMENT, load_params
from components.preflight.form import form_of
from components.shared.deployment import DeploymentConfig
from tests.presets import ROOT

if __name__ == "__main__":
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1])
    form = form_of(load_params(ROOT / "params.yaml"))
    task = preflight(**form, **{DEPLOYMENT: DeploymentConfig().model_dump(mode="json")})
    page = task.outputs.pop("configuration")
    print(json.dumps({"outputs": task.outputs, "page": page.path}))
