"""A run of the graph for a cluster under KFP's local runner: `python -m tests.pipelines.failing_run PIPELINE_ROOT`."""

import sys

from kfp import local

from components.preflight.config import load_params
from components.preflight.form import form_of
from pipelines.graph import cluster_graph
from tests.presets import ROOT

if __name__ == "__main__":
    params = load_params(ROOT / "params.yaml")
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1], raise_on_error=False)
    wrong = {"train_grpo_num_steps": 0, "train_sft_model_base": "scratch:huge"}
    cluster_graph(params)(**form_of(params) | wrong)
