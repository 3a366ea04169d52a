"""A job of two ranks on the fake cluster, and what its ranks would write on the shared volume."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from components.cluster import kube
from components.cluster.config import ClusterConfig, ClusterStage
from components.cluster.job import Job, RankFailure, name_of
from components.cluster.kube import Clock
from components.cluster.trainjob import run_on_cluster
from components.shared import jsonl
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.cluster.ranks import act
from tests.fake_cluster import ApiServer, kinds, script
from tests.fake_cluster.cluster import ScriptedCluster

RUN_ID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
NUM_RANKS = 2
RESULT = {"loss": 0.25}
EVERY_SETTING: dict[str, Any] = {
    "gpus_per_node": 1,
    "gpu_type": "NVIDIA-H100-80GB-HBM3",
    "memory_per_node_gib": 100,
    "shm_gib": 28,
    "cpu_per_node": 12,
    "volume": "models",
    "node_selector": {"pool": "training"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "secrets": {"hub": ["HF_TOKEN"]},
}


class KilledError(BaseException):
    """Nothing handles it."""


@dataclass
class Launched:
    """A job of a step, with its folders below `root`."""

    server: ApiServer
    root: Path
    changes: dict[str, Any] = field(default_factory=dict)
    with_samplers: bool = False
    run_id: str = RUN_ID
    work: str = "work"
    inputs: str = ""

    @property
    def stage(self) -> ClusterStage:
        """Where the job runs."""
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
        config, records = ClusterConfig.model_validate(settings), self.root / "records"
        return ClusterStage(config, self.run_id, "train_grpo", records, run_name=f"name of {self.run_id}")

    @property
    def job(self) -> Job:
        """What its ranks do."""
        return Job(
            folder=self.root / self.work / "launch",
            function=name_of(act),
            config={"ending": "go_on", "rank": 0, "seconds": 0},
            folders={"folder": str(self.root / self.inputs)},
            outputs={"policy": str(self.root / "policy")},
            num_processes=NUM_RANKS,
            grace_s=20,
            with_samplers=self.with_samplers,
        )

    @property
    def cluster(self) -> ScriptedCluster:
        """The cluster that it runs on."""
        return self.server.cluster

    def play(self, *steps: script.Step) -> None:
        """Say what happens to the job in the cluster."""
        self.cluster.play(*steps)

    def run(self, clock: Clock | None = None) -> dict[str, float]:
        """Run the job to its end."""
        (self.root / "policy").mkdir(exist_ok=True)
        return run_on_cluster(self.job, self.stage, clock or clock_of(self.server))

    def submit_and_die(self) -> None:
        """Be a step that is killed once its job is submitted."""
        with pytest.raises(KilledError):
            self.run(replace(clock_of(self.server), sleep=self._die_between_polls))

    def _die_between_polls(self, seconds: float) -> None:
        if seconds == 10:
            raise KilledError
        self.server.clock.advance(seconds)

    def succeed(self) -> None:
        """Write what successful ranks write."""
        job = Job.read(self.job.folder)
        for rank in range(NUM_RANKS):
            job.clear_rank(rank)
            job.write_outcome(rank, {"result": RESULT, "exit_code": 0})
        (Path(job.outputs["policy"]) / "weights").write_text("learned")

    def fail(self, rank: int, error: str, exit_code: int) -> None:
        """Write what a failed rank writes."""
        job = Job.read(self.job.folder)
        job.clear_rank(rank)
        job.write_outcome(rank, {"error": error, "exit_code": exit_code})
        job.write_failures(rank, [RankFailure(rank, exit_code, 1)])

    def success(self, *before: script.Step) -> tuple[script.Step, ...]:
        """A script in which all ranks succeed."""
        return (*before, script.Running(20, ("step 1", "step 2")), script.Do(self.succeed), script.Complete())

    def trainjobs(self) -> list[dict[str, Any]]:
        """The training jobs in the cluster."""
        return self.server.cluster.all(kinds.TRAIN_JOBS)

    def num_submissions(self) -> int:
        """How often a job was submitted."""
        return len([request for request in self.server.requests if request.method == "POST"])

    def records(self, name: str) -> Any:
        """What was recorded of the first attempt."""
        path = self.stage.records / "attempt-1" / name
        return jsonl.read_json(path) if path.suffix == ".json" else path.read_text()


def clock_of(server: ApiServer) -> Clock:
    """The time of a cluster."""
    return Clock(server.clock.monotonic, server.clock.sleep, server.clock.now)


def add_train_job(
    server: ApiServer, name: str, labels: dict[str, str], annotations: dict[str, str] | None = None, namespace: str = ""
) -> dict[str, Any]:
    """Start a training job in a cluster; return its metadata."""
    namespace = namespace or server.namespace
    server.cluster.add_runtime(name, namespace=namespace)
    server.cluster.play(script.Running(None))
    metadata = {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations or {}}
    spec = {"runtimeRef": {"apiGroup": kube.GROUP, "kind": "TrainingRuntime", "name": name}, "suspend": False}
    kind = {"apiVersion": f"{kube.GROUP}/{kube.VERSION}", "kind": "TrainJob"}
    (job,) = server.cluster.add({**kind, "metadata": metadata, "spec": spec})
    added: dict[str, Any] = job["metadata"]
    return added


def launched(server: ApiServer, root: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Launched:
    """A job that is not submitted yet, with the server as its cluster."""
    root.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(root / "kubeconfig")))
    server.cluster.add_runtime("grpo-torch")
    return Launched(server, root, changes)
