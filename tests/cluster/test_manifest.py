from typing import Any

from components.cluster import kube
from components.cluster.manifest import owner_reference, train_job
from components.shared import lineage
from tests.cluster.launched import EVERY_SETTING, RUN_ID, Launched
from tests.fake_cluster import kinds, script

NOW = "2026-01-01T00:00:00+00:00"
WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-1", "uid": "1234"}


def _manifest(job: Launched, owner: dict[str, Any] | None = None, now: str = NOW) -> dict[str, Any]:
    return train_job(job.job, job.stage, {}, owner, now)


def _pods(job: Launched) -> list[dict[str, Any]]:
    """The pods that the cluster makes of a job."""
    pods: list[dict[str, Any]] = []
    look = script.Do(lambda: pods.extend(job.cluster.all(kinds.PODS)))
    job.play(*job.success(script.Running(5), look))
    job.run()
    return [pod for pod in pods if pod["metadata"]["name"].startswith("grpo-")]


def test_pods_have_what_the_settings_ask_for(job: Launched) -> None:
    """Resources including shared memory, volume, placement, secrets, labels."""
    job.changes.update(EVERY_SETTING)
    pods = _pods(job)
    assert len(pods) == 2
    for pod in pods:
        spec = pod["spec"]
        (container,) = spec["containers"]
        amounts = {"cpu": "12", "memory": "128Gi", "nvidia.com/gpu": "1"}
        assert container["resources"] == {"requests": amounts, "limits": amounts}
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert {"name": "work", "mountPath": str(job.root)} in container["volumeMounts"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert volumes["dshm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "28Gi"}
        assert volumes["work"]["persistentVolumeClaim"] == {"claimName": EVERY_SETTING["volume"]}
        assert spec["nodeSelector"] == {"pool": "training", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
        assert spec["tolerations"] == EVERY_SETTING["tolerations"]
        assert spec["terminationGracePeriodSeconds"] == 660, "the runtime's, which no patch changes"
        assert pod["metadata"]["labels"][kube.RUN_ID] == RUN_ID
        environment = {each["name"]: each for each in container["env"]}
        assert environment["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}
        assert (environment["PET_NNODES"]["value"], environment["PET_NPROC_PER_NODE"]["value"]) == ("2", "1")


def test_vllm_servers_are_pods_beside_the_ranks(job: Launched) -> None:
    """They know the folder of the job, ranks know their URLs, and both its key, which identifies nothing."""
    job.cluster.add_runtime("grpo-torch-vllm", jobs=("rollout", "node"))
    job.changes.update(rollout_servers=2)
    job.with_samplers = True
    pods = _pods(job)
    name = pods[0]["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]
    environments = {
        kind: {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        for kind in ("rollout", "node")
        for pod in pods
        if f"-{kind}-" in pod["metadata"]["name"]
    }
    assert environments["rollout"]["GRPO_PIPELINE_JOB"] == str(job.job.folder)
    urls = [f"http://{name}-rollout-{index}-0.{name}:8000" for index in range(2)]
    assert environments["node"]["GRPO_PIPELINE_SAMPLERS"] == ",".join(urls)
    key = environments["node"]["GRPO_PIPELINE_KEY"]
    assert len(key) == 64
    assert key == environments["rollout"]["GRPO_PIPELINE_KEY"]
    again = _manifest(job)
    assert key not in str(again), "each job has another one"
    digests = [each["metadata"]["annotations"][kube.SPEC_DIGEST] for each in (again, _manifest(job))]
    assert digests[0] == digests[1]


def test_job_has_labels_queue_owner_deadline_and_heartbeat(job: Launched) -> None:
    """They tell Kueue, the garbage collector, Trainer and the reaper what to do with it."""
    job.changes.update(queue="research", training_timeout_s=3600)
    owner = owner_reference({"metadata": {"ownerReferences": [{**WORKFLOW, "controller": True}]}})
    manifest = _manifest(job, owner)
    metadata = manifest["metadata"]
    assert metadata["name"].startswith(f"grpo-{RUN_ID[:8]}-")
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "grpo-pipeline",
        "grpo-pipeline/run-id": RUN_ID,
        "grpo-pipeline/stage": "train-grpo",
        "grpo-pipeline/work": lineage.value_digest(str(job.root / "work"))[:16],
        "kueue.x-k8s.io/queue-name": "research",
    }
    assert metadata["ownerReferences"] == [{**WORKFLOW, "controller": False, "blockOwnerDeletion": False}]
    assert metadata["annotations"][kube.HEARTBEAT] == NOW
    assert manifest["spec"]["activeDeadlineSeconds"] == 3600


def test_name_and_digest_identify_a_job(job: Launched) -> None:
    """They are equal at another time and for another owner, and differ where a setting does."""

    def identity(manifest: dict[str, Any]) -> tuple[str, str]:
        return manifest["metadata"]["name"], manifest["metadata"]["annotations"][kube.SPEC_DIGEST]

    first = identity(_manifest(job))
    assert identity(_manifest(job, WORKFLOW, "2027-01-01T00:00:00+00:00")) == first
    job.changes["cpu_per_node"] = 9
    assert not set(identity(_manifest(job))) & set(first)
