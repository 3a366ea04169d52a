"""The TrainJob as the cluster takes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.cluster import kube
from components.cluster.manifest import job_name, owner_reference, train_job
from components.shared import lineage
from components.shared.errors import PipelineError
from tests.cluster.launched import RUN_ID, Launched, launched
from tests.fake_cluster import ApiServer, kinds, script

NOW = "2026-01-01T00:00:00+00:00"
CONTROLLER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-1", "uid": "1234"}
OWNER = owner_reference({"metadata": {"ownerReferences": [{**CONTROLLER, "controller": True}]}})


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster with both runtimes."""
    with ApiServer() as server:
        server.cluster.add_runtime("grpo-torch-vllm", jobs=("rollout", "node"))
        yield server


def _manifest(job: Launched, **options: Any) -> dict[str, Any]:
    return train_job(job.job, job.cluster, options.pop("environment", {}), options.pop("owner", None), NOW)


def _pods(server: ApiServer, job: Launched) -> list[dict[str, Any]]:
    """The pods that the cluster makes of the job."""
    found: list[dict[str, Any]] = []
    note = script.Do(lambda: found.extend(server.cluster.all(kinds.PODS)))
    server.cluster.play(*job.goes_well(script.Running(5), note))
    job.run()
    return [pod for pod in found if pod["metadata"]["name"].startswith("grpo-")]


def test_the_pods_of_a_job(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have what was asked for: resources with shared memory counted in, volume, place, labels and no sidecar."""
    job = launched(
        server,
        tmp_path,
        monkeypatch,
        gpus_per_node=1,
        gpu_type="NVIDIA-H100-80GB-HBM3",
        memory_per_node_gib=100,
        shm_gib=28,
        cpu_per_node=12,
        volume="models",
        node_selector={"pool": "training"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        secrets={"hub": ["HF_TOKEN"]},
        service_account="trainer",
    )
    pods = _pods(server, job)
    assert len(pods) == 2
    for pod in pods:
        spec = pod["spec"]
        container = spec["containers"][0]
        every = {"cpu": "12", "memory": "128Gi", "nvidia.com/gpu": "1"}
        assert container["resources"] == {"requests": every, "limits": every}
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert {"name": "work", "mountPath": str(tmp_path)} in container["volumeMounts"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert volumes["dshm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "28Gi"}
        assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "models"}
        assert spec["nodeSelector"] == {"pool": "training", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
        assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert spec["serviceAccountName"] == "trainer"
        assert spec["terminationGracePeriodSeconds"] == 60, "the runtime's, which no patch changes"
        assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
        assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        assert pod["metadata"]["labels"][kube.RUN_ID] == RUN_ID
        environment = {each["name"]: each for each in container["env"]}
        assert environment["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}
        assert environment["PET_NNODES"]["value"] == "2"
        assert environment["PET_NPROC_PER_NODE"]["value"] == "1"


def test_the_job_itself(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its labels, its queue, its owner, its deadline and its heart."""
    job = launched(server, tmp_path, monkeypatch, queue="research", training_timeout_s=3600)
    manifest = _manifest(job, owner=OWNER)
    metadata = manifest["metadata"]
    assert metadata["name"] == job_name(job.job, job.cluster)
    assert metadata["name"].startswith(f"grpo-{RUN_ID[:8]}-")
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "grpo-pipeline",
        "grpo-pipeline/run-id": RUN_ID,
        "grpo-pipeline/stage": "train-grpo",
        "grpo-pipeline/work": lineage.value_digest(str(job.root / "work"))[:16],
        "kueue.x-k8s.io/queue-name": "research",
    }
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "name": "run-1",
            "uid": "1234",
            "controller": False,
            "blockOwnerDeletion": False,
        }
    ]
    assert metadata["annotations"][kube.HEARTBEAT] == NOW
    assert float(metadata["annotations"][kube.STALE_AFTER_S]) > 60
    assert manifest["spec"]["activeDeadlineSeconds"] == 3600
    assert manifest["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"


def test_the_name_and_the_digest_tell_jobs_apart(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal when the same is asked for at another time by another pod; different when anything else is."""
    job = launched(server, tmp_path, monkeypatch)
    first = _manifest(job)
    again = train_job(
        job.job, job.cluster, {}, {**CONTROLLER, "name": "other", "uid": "1"}, "2027-01-01T00:00:00+00:00"
    )
    for each in (first, again):
        each["identity"] = each["metadata"]["name"], each["metadata"]["annotations"][kube.SPEC_DIGEST]
    assert again["identity"] == first["identity"]
    job.changes["cpu_per_node"] = 9
    other = _manifest(job)
    assert other["metadata"]["name"] != first["metadata"]["name"]
    assert other["metadata"]["annotations"][kube.SPEC_DIGEST] != first["metadata"]["annotations"][kube.SPEC_DIGEST]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 2, "gpus_per_node": 4}, r"engine.num_processes is 2, but 2 nodes with 4 GPUs each run 8"),
        ({"nodes": 3, "gpus_per_node": 0}, r"engine.num_processes is 2, which 3 nodes cannot share evenly"),
    ],
)
def test_processes_and_gpus_must_agree(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """Or some GPU would be paid for and idle."""
    with pytest.raises(PipelineError, match=message):
        _manifest(launched(server, tmp_path, monkeypatch, **changes))


def test_a_job_without_gpus_asks_for_none(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its processes share the cores of a pod."""
    manifest = _manifest(launched(server, tmp_path, monkeypatch, nodes=1, gpus_per_node=0))
    assert manifest["spec"]["trainer"]["numProcPerNode"] == 2
    assert set(manifest["spec"]["trainer"]["resourcesPerNode"]["limits"]) == {"cpu", "memory"}


def test_a_job_with_servers(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are pods of the other runtime, which know the job; its ranks know their addresses."""
    job = launched(server, tmp_path, monkeypatch, rollout_servers=2)
    job.with_samplers = True
    pods = _pods(server, job)
    name = pods[0]["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]
    (rollout,) = [pod for pod in pods if "-rollout-" in pod["metadata"]["name"]]
    told = {each["name"]: each["value"] for each in rollout["spec"]["containers"][0]["env"]}
    assert told["GRPO_PIPELINE_JOB"] == str(job.job.folder)
    node = next(pod for pod in pods if "-node-" in pod["metadata"]["name"])
    environment = {each["name"]: each.get("value") for each in node["spec"]["containers"][0]["env"]}
    assert environment["GRPO_PIPELINE_SAMPLERS"] == ",".join(
        f"http://{name}-rollout-{index}-0.{name}:8000" for index in range(2)
    )
