"""Stages on the fake cluster with pods that really run: torchrun, gloo, DeepSpeed and all."""

from pathlib import Path
from typing import Any

import pytest

from components.cluster.task import run_task
from components.policy.checkpoint import save
from components.shared import lineage
from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.model import resolve_reference, write_reference
from components.shared.problem import Split, write_problems
from components.shared.stage import Stage
from components.train_grpo.train import STAGE as GRPO
from components.train_sft.config import TrainSFTConfig
from components.train_sft.train import STAGE as SFT
from tests import tiny
from tests.cluster.launched import RUN_ID
from tests.cluster.processes import ROOT
from tests.fake_cluster import ApiServer, RealClock, kinds, script
from tests.faults.rewards import MARK_VARIABLE
from tests.lineages import made
from tests.train_grpo.settings import grpo_config

SFT_CONFIG = TrainSFTConfig(
    model=tiny.MODEL,
    seed=1,
    num_steps=3,
    examples_per_step=6,
    learning_rate=1e-2,
    warmup_steps=1,
    final_learning_rate_fraction=0.1,
    max_tokens=64,
    checkpoint=tiny.CHECKPOINT,
    engine=tiny.engine_config(num_processes=2),
)
GRPO_CONFIG = grpo_config(
    prompts_per_step=2,
    reward__weights={"tests.faults.rewards:deadly": 1.0},
    reward__max_unscorable_fraction=1.0,
    checkpoint={**tiny.CHECKPOINT, "every_steps": 1},
    engine__num_processes=2,
)


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """A folder for problems, and a reference to a model on the volume."""
    problems, reference, model = (tmp_path / "problems", tmp_path / "reference", tmp_path / "volume/sft/reference")
    for folder in (problems, model):
        folder.mkdir(parents=True)
    save(tiny.checkpoint(), model)
    lineage.write(model, made("train_sft"))
    write_reference(reference, model)
    return {"problems": problems, "reference": reference}


@pytest.mark.parametrize(
    ("stage", "config", "deterministic"),
    [
        pytest.param(SFT, SFT_CONFIG, ("reference",), marks=pytest.mark.long, id="sft"),
        pytest.param(GRPO, GRPO_CONFIG, ("policy", "training"), marks=pytest.mark.long, id="grpo-with-a-killed-rank"),
    ],
)
def test_stage_on_a_cluster_has_the_results_of_one_here(
    tmp_path: Path,
    inputs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stage: Stage,
    config: Any,
    deterministic: tuple[str, ...],
) -> None:
    """The same bytes from two pods and from two processes of this machine, also where a rank is killed and resumed."""
    write_problems(inputs["problems"], Split.TRAIN, tiny.PROBLEMS if stage is SFT else tiny.PROBLEMS[:4])
    folders = {name: inputs[name] for name in stage.inputs}

    def run(attempt: str, cluster: dict[str, Any]) -> dict[str, float]:
        paths = {name: str(path) for name, path in folders.items()}
        values = config.model_dump(mode="json")
        return run_task(stage, values, str(tmp_path / attempt), cluster=cluster, run_id=RUN_ID, **paths).metrics

    cluster = {"image": "gpu:1", "nodes": 2, "gpus_per_node": 0, "mount": str(tmp_path / "volume")}
    with ApiServer(clock=RealClock(speed=10)) as server:
        server.cluster.add_runtime("grpo-torch", max_restarts=1)
        variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", MARK_VARIABLE: str(tmp_path / "died")}
        server.cluster.play(script.Executed(tuple(variables.items())))
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        metrics = run("there", cluster)
        assert server.cluster.all(kinds.TRAIN_JOBS) == []
        num_requests = len(server.requests)
        assert run("again", cluster) == metrics
        assert len(server.requests) == num_requests, "a finished stage is run again"
    if stage is GRPO:
        assert (tmp_path / "died").exists()
        assert "train_grpo: resuming after step 1" in capfd.readouterr().out
    left = [path for path in (tmp_path / "volume/grpo-pipeline/work").glob("*/*") if path.is_dir()]
    assert not left, "unfinished work is left"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert run("here", {}) == metrics
    for name in deterministic:
        there, again, here = (resolve_reference(tmp_path / attempt / name) for attempt in ("there", "again", "here"))
        on_cluster, on_this_machine = lineage.read(there), lineage.read(here)
        assert on_cluster
        assert on_this_machine
        assert on_cluster.stages == on_this_machine.stages
        ran_in = on_cluster.environment()
        assert ran_in
        assert ran_in.image == cluster["image"]
        assert lineage.digest(there) == lineage.digest(again) == lineage.digest(here)
    first = "base_model" if stage is SFT else "reference"
    before = resolve_reference((tmp_path / "here" / first) if stage is SFT else inputs[first])
    after = resolve_reference(tmp_path / "here" / deterministic[0])
    assert (before / "model.safetensors").read_bytes() != (after / "model.safetensors").read_bytes()
