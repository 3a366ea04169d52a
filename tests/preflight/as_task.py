"""Preflight as a task under the local runner: `python -m tests.preflight.as_task PIPELINE_ROOT`; prints its outputs."""

import json
import sys

from kfp import local

from components.preflight.component import preflight
from pipelines.grpo_post_training_on_cluster import FORM

if __name__ == "__main__":
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1])
    task = preflight(**{name: FORM[name] for name in preflight.component_spec.inputs})
    page = task.outputs.pop("configuration")
    print(json.dumps({"outputs": task.outputs, "page": page.path}))
