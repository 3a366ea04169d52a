"""GRPO as a step on the tests' cluster, with pods that really run, one of which dies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.cluster.task import run_task
from components.policy.checkpoint import save
from components.shared import lineage
from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.model import resolve_reference, write_reference
from components.shared.problem import Split, write_problems
from components.train_grpo.train import STAGE
from tests import tiny
from tests.cluster import dying
from tests.fake_cluster import ApiServer, RealClock, kinds, script
from tests.train_grpo.settings import grpo_config

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
RUN_ID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
OUTPUTS = ("policy", "training", "timings")
LEARNED = ("policy", "training")
"""What is equal in equal runs."""


def _config() -> dict[str, Any]:
    """Three steps of two processes, with a checkpoint after each."""
    config = grpo_config(
        prompts_per_step=2,
        reward__weights={f"{dying.__name__}:{dying.brevity.__name__}": 1.0},
        reward__max_unscorable_fraction=1.0,
        checkpoint={**tiny.CHECKPOINT, "every_steps": 1},
        engine__num_processes=2,
    )
    return config.model_dump(mode="json")


def _run_step(folder: Path, given: dict[str, Path], cluster: dict[str, Any]) -> dict[str, float]:
    """Run the step as its Kubeflow component does, with its outputs in `folder`."""
    folder.mkdir(exist_ok=True)
    folders = {**given, **{name: folder / name for name in OUTPUTS}}
    paths = {name: str(path) for name, path in folders.items()}
    return run_task(STAGE, _config(), cluster=cluster, run_id=RUN_ID, **paths)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Path]:
    """Problems of a stage before, and a reference on the volume, of which there is but a reference here."""
    problems, reference, model = (
        tmp_path / "problems",
        tmp_path / "reference",
        tmp_path / "volume" / "sft" / "reference",
    )
    for folder in (problems, model):
        folder.mkdir(parents=True)
    write_problems(problems, Split.TRAIN, tiny.PROBLEMS[:4])
    save(tiny.checkpoint(), model)
    lineage.write(model, {"stage": "train_sft"})
    write_reference(reference, model)
    return {"problems": problems, "reference": reference}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster that runs pods for real, and starts those of a job again once."""
    with ApiServer(clock=RealClock(speed=10)) as server:
        server.cluster.add_runtime("grpo-torch", max_restarts=1)
        told = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", dying.MARK_VARIABLE: str(tmp_path / "died")}
        server.cluster.play(script.Executed(tuple(told.items())))
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


def test_grpo_on_a_cluster(
    tmp_path: Path,
    server: ApiServer,
    given: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A process is killed, the pods start again and go on: what comes of it is what two processes here make."""
    volume = tmp_path / "volume"
    cluster = {"image": "gpu:1", "nodes": 2, "gpus_per_node": 0, "mount": str(volume)}
    metrics = _run_step(tmp_path / "there", given, cluster)
    said = capfd.readouterr().out
    assert (tmp_path / "died").exists()
    assert "train_grpo: resuming after step 1" in said
    assert "train_grpo 3/3" in said
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    assert sorted(path.name for path in (tmp_path / "there" / "policy").iterdir()) == ["lineage.json", "pipeline.json"]
    left = [path for path in (volume / "grpo-pipeline" / "work").glob("*/*") if path.is_dir()]
    assert not left, "unfinished work is left"

    num_requests = len(server.requests)
    assert _run_step(tmp_path / "again", given, cluster) == metrics
    assert len(server.requests) == num_requests, "a finished stage is run again"

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert _run_step(tmp_path / "here", given, {}) == metrics
    reference, policy = (
        resolve_reference(path) / "model.safetensors" for path in (given["reference"], tmp_path / "here/policy")
    )
    assert reference.read_bytes() != policy.read_bytes()
    for name in LEARNED:
        there, again, here = (resolve_reference(tmp_path / place / name) for place in ("there", "again", "here"))
        assert lineage.read(there) == lineage.read(here)
        assert lineage.digest(there) == lineage.digest(again) == lineage.digest(here)
