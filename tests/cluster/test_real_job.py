"""A training step on the tests' cluster, whose pods really run: torchrun, gloo, DeepSpeed and all."""

from pathlib import Path
from typing import Any

import pytest

from components.cluster.task import run_task
from components.shared import lineage
from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.model import resolve_reference
from components.shared.problem import Split, write_problems
from components.train_sft.train import STAGE
from tests import tiny
from tests.fake_cluster import ApiServer, RealClock, kinds, script

pytestmark = pytest.mark.slow

RUN_ID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
NODES = 2
OUTPUTS = ("base_model", "reference", "training")


def config() -> dict[str, Any]:
    """Three steps of a model with two processes."""
    return {
        "model": tiny.MODEL.model_dump(),
        "seed": 1,
        "num_steps": 3,
        "examples_per_step": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "final_learning_rate_fraction": 0.1,
        "max_tokens": 64,
        "checkpoint": tiny.CHECKPOINT,
        "engine": {**tiny.engine_config().model_dump(mode="json"), "num_processes": NODES},
    }


def run_step(folder: Path, problems: Path, cluster: dict[str, Any]) -> dict[str, float]:
    """Run the step as its Kubeflow component does, with its outputs in `folder`."""
    folders = {name: str(folder / name) for name in OUTPUTS}
    for path in folders.values():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return run_task(STAGE, config(), cluster=cluster, run_id=RUN_ID, problems=str(problems), **folders)


def test_a_training_job_gives_what_the_same_step_gives_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of a TrainJob make the model that two processes of this machine make, and nothing is left behind."""
    problems, volume = tmp_path / "problems", tmp_path / "volume"
    for folder in (problems, volume):
        folder.mkdir()
    write_problems(problems, Split.TRAIN, tiny.PROBLEMS)
    with ApiServer(clock=RealClock(speed=10)) as server:
        server.cluster.add_runtime("grpo-torch")
        server.cluster.play(script.Executed((("DS_ACCELERATOR", "cpu"), ("OMP_NUM_THREADS", "1"))))
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        cluster = {"image": "gpu:1", "nodes": NODES, "gpus_per_node": 0, "mount": str(volume)}
        metrics = run_step(tmp_path / "there", problems, cluster)
        assert server.cluster.all(kinds.TRAIN_JOBS) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    assert metrics == run_step(tmp_path / "here", problems, {})
    there, here = (resolve_reference(tmp_path / place / "reference") for place in ("there", "here"))
    assert there.is_relative_to(volume)
    assert lineage.digest(there) == lineage.digest(here)
