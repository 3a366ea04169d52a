"""A job of two ranks on the scripted cluster, and what its ranks would write on the shared volume."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from components.cluster.config import ClusterConfig, ClusterStage
from components.cluster.job import Job, RankFailure
from components.cluster.trainjob import run_on_cluster
from components.shared import jsonl
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.fake_cluster import ApiServer, kinds, script

RUN_ID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
NUM_RANKS = 2
RESULT = {"loss": 0.25}


@dataclass
class Launched:
    """What a step would launch, with its folders below `root`."""

    server: ApiServer
    root: Path
    changes: dict[str, Any] = field(default_factory=dict)
    with_samplers: bool = False
    run_id: str = RUN_ID

    @property
    def cluster(self) -> ClusterStage:
        """Where it runs."""
        settings = {
            "image": "registry.example/python-gpu:1",
            "nodes": NUM_RANKS,
            "mount": str(self.root),
            "queue_timeout_s": 3600,
            "start_timeout_s": 900,
            "stall_timeout_s": 1200,
            "training_timeout_s": 7200,
            "max_restarts": 0,
            **self.changes,
        }
        return ClusterStage(ClusterConfig.model_validate(settings), self.run_id, "train_grpo", self.root / "records")

    @property
    def job(self) -> Job:
        """What its ranks do."""
        return Job(
            folder=self.root / "work" / "launch",
            function="tests.cluster.ranks:act",
            config={"ending": "go_on", "rank": 0, "seconds": 0},
            folders={"folder": str(self.root)},
            outputs={"policy": str(self.root / "policy")},
            num_processes=NUM_RANKS,
            grace_s=20,
            with_samplers=self.with_samplers,
        )

    def run(self) -> dict[str, float]:
        """Launch it and wait for its end."""
        (self.root / "policy").mkdir(exist_ok=True)
        return run_on_cluster(self.job, self.cluster, self.server.clock)

    def work(self) -> None:
        """Write what ranks write that end well."""
        job = Job.read(self.job.folder)
        for rank in range(NUM_RANKS):
            job.start_rank(rank)
            job.write_outcome(rank, {"result": RESULT, "exit_code": 0})
        (Path(job.outputs["policy"]) / "weights").write_text("learned")

    def fail(self, *, rank: int = 0, error: str = "", exit_code: int = 75) -> None:
        """Write what a rank writes that fails; without a word where there is no error."""
        job = Job.read(self.job.folder)
        job.start_rank(rank)
        if error:
            job.write_outcome(rank, {"error": error, "exit_code": exit_code})
        job.write_failures(rank, [RankFailure(rank, exit_code, 1)])

    def goes_well(self, *before: script.Step) -> tuple[script.Step, ...]:
        """The end of a script in which all ranks end well."""
        return (*before, script.Running(20, ("step 1", "step 2")), script.Do(self.work), script.Complete())

    def trainjobs(self) -> list[dict[str, Any]]:
        """The training jobs that are in the cluster."""
        return self.server.cluster.all(kinds.TRAIN_JOBS)

    def records(self, name: str, attempt: int = 1) -> Any:
        """What was kept of an attempt."""
        path = self.cluster.records / f"attempt-{attempt}" / name
        return jsonl.read_json(path) if path.suffix == ".json" else path.read_text()


def launched(server: ApiServer, root: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Launched:
    """A job that nobody has launched yet, for the server as the cluster."""
    root.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(root / "kubeconfig")))
    server.cluster.add_runtime("grpo-torch")
    return Launched(server, root, changes)
