"""A run of the cluster's form of the graph under KFP's local runner: `python -m ... PIPELINE_ROOT KEY=JSON ...`."""

import json
import sys

from kfp import local

from pipelines.grpo_post_training_on_cluster import FORM, grpo_post_training_on_cluster

if __name__ == "__main__":
    root, *settings = sys.argv[1:]
    given = {name: json.loads(value) for name, _, value in (setting.partition("=") for setting in settings)}
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=False)
    grpo_post_training_on_cluster(**FORM | given)
