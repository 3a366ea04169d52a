"""A stage's ranks as a TrainJob of Kubeflow Trainer (2.2 and later, `runtimePatches`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.cluster import names
from components.cluster.cluster import Cluster
from components.cluster.config import ClusterConfig
from components.cluster.job import Job
from components.shared import lineage
from components.shared.environment import JOB_VARIABLE
from components.shared.errors import PipelineError

Json = dict[str, Any]

STALE_AFTER_S = 600
"""A step that has not been heard of for so long is gone: twenty beats."""
NODE, ROLLOUT = "node", "rollout"
"""Replicated jobs of the runtimes, each with a container of the same name."""
SERVER_PORT = 8000
_RUNTIME, _RUNTIME_WITH_SERVERS = "grpo-torch", "grpo-torch-vllm"
_MANAGER = "grpo-pipeline/launcher"
_GPU, _GPU_TYPE = "nvidia.com/gpu", "nvidia.com/gpu.product"
_QUEUE = "kueue.x-k8s.io/queue-name"
_NO_SIDECAR = {"sidecar.istio.io/inject": "false"}


@dataclass(frozen=True)
class Owner:
    """What the job goes away with at the latest."""

    api_version: str
    kind: str
    name: str
    uid: str

    @classmethod
    def of(cls, pod: Json | None) -> "Owner | None":
        """Return what controls the pod of a step: the workflow of its run; None where nothing does.

        Never the pod itself: a node that is drained takes the pod, and the next attempt of the step adopts the job.
        """
        owners = pod["metadata"].get("ownerReferences", []) if pod else []
        found = next((each for each in owners if each.get("controller")), None)
        return found and cls(found["apiVersion"], found["kind"], found["name"], found["uid"])

    @property
    def reference(self) -> Json:
        """The owner reference; one that blocks nothing needs no right to change the owner."""
        owner = {"apiVersion": self.api_version, "kind": self.kind, "name": self.name, "uid": self.uid}
        return {**owner, "controller": False, "blockOwnerDeletion": False}


def job_name(job: Job, cluster: Cluster) -> str:
    """Return the name of a stage's job, short enough for the names of its pods.

    It is the same when the stage is run again, and another where anything else is asked.
    """
    asked = {"stage": cluster.stage, "run": cluster.run_id, "job": job.fields(), "cluster": cluster.config.model_dump()}
    return f"grpo-{cluster.run_id[:8]}-{lineage.value_digest(asked)[:8]}"


def server_urls(name: str, number: int) -> list[str]:
    """Return the addresses of a job's servers."""
    return [f"http://{name}-{ROLLOUT}-{index}-0.{name}:{SERVER_PORT}" for index in range(number)]


def train_job(job: Job, cluster: Cluster, environment: Mapping[str, str], owner: Owner | None, now: str) -> Json:
    """Return the manifest; `environment` is what the ranks are told besides."""
    config = cluster.config
    name = job_name(job, cluster)
    ours = {names.MANAGED_BY: names.OURS, names.RUN_ID: cluster.run_id, names.STAGE: cluster.label}
    labels = {**ours, names.WORK: lineage.value_digest(str(job.folder.parent))[:16]}
    spec: Json = {
        "runtimeRef": {
            "apiGroup": names.GROUP,
            "kind": "TrainingRuntime",
            "name": _RUNTIME_WITH_SERVERS if job.with_samplers else _RUNTIME,
        },
        "trainer": _trainer(job, config, environment),
        "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": _patch(job, config, ours)}],
        "activeDeadlineSeconds": config.training_timeout_s,
    }
    digest = lineage.value_digest({"spec": spec, "labels": ours, "queue": config.queue, "job": job.fields()})
    metadata: Json = {
        "name": name,
        "labels": labels if config.queue is None else {**labels, _QUEUE: config.queue},
        "annotations": {
            names.SPEC_DIGEST: digest,
            names.HEARTBEAT: now,
            names.STALE_AFTER_S: str(STALE_AFTER_S),
            **_NO_SIDECAR,
        },
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner.reference]
    return {"apiVersion": f"{names.GROUP}/{names.VERSION}", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _trainer(job: Job, config: ClusterConfig, environment: Mapping[str, str]) -> Json:
    secrets = [(key, secret) for secret, keys in config.secrets.items() for key in keys]
    return {
        "image": config.image,
        "command": ["python", "-m", "components.cluster.node", str(job.folder)],
        "env": [
            *({"name": name, "value": value} for name, value in environment.items()),
            *({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key, name in secrets),
        ],
        "numNodes": config.nodes,
        "numProcPerNode": _processes_per_node(job, config),
        "resourcesPerNode": _resources(config),
    }


def _processes_per_node(job: Job, config: ClusterConfig) -> int:
    asked = job.num_processes
    if config.gpus_per_node and asked != config.nodes * config.gpus_per_node:
        raise PipelineError(
            f"engine.num_processes is {asked}, but {config.nodes} nodes with {config.gpus_per_node} GPUs each run "
            f"{config.nodes * config.gpus_per_node} processes; make them equal"
        )
    if asked % config.nodes:
        raise PipelineError(f"engine.num_processes is {asked}, which {config.nodes} nodes cannot share evenly")
    return asked // config.nodes


def _resources(config: ClusterConfig) -> Json:
    # What lies in /dev/shm is memory of the pod: without room for it the kernel ends the pod.
    memory = config.memory_per_node_gib + config.shm_gib
    gpus = {_GPU: str(config.gpus_per_node)} if config.gpus_per_node else {}
    every = {"cpu": str(config.cpu_per_node), "memory": f"{memory}Gi", **gpus}
    return {"requests": every, "limits": every}


def _patch(job: Job, config: ClusterConfig, labels: Mapping[str, str]) -> Json:
    jobs = [_job_patch(NODE, config, labels, _selected(config), [])]
    if job.with_samplers:
        told = [{"name": JOB_VARIABLE, "value": str(job.folder)}]
        jobs.append(_job_patch(ROLLOUT, config, labels, _selected(config), told))
    return {"template": {"spec": {"replicatedJobs": jobs}}}


def _job_patch(
    name: str, config: ClusterConfig, labels: Mapping[str, str], spec: Mapping[str, Any], environment: Sequence[Json]
) -> Json:
    """What the pods of one replicated job have beyond the runtime's."""
    mounts = [{"name": "dshm", "mountPath": "/dev/shm"}, {"name": "work", "mountPath": config.mount}]
    container: Json = {"name": name, "volumeMounts": mounts}
    if environment:
        container["env"] = list(environment)
    volumes = [
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{config.shm_gib}Gi"}},
        {"name": "work", "persistentVolumeClaim": {"claimName": config.volume}},
    ]
    # By label for Istio of today, by annotation for that of before.
    metadata = {"labels": {**labels, **_NO_SIDECAR}, "annotations": _NO_SIDECAR}
    pod = {"metadata": metadata, "spec": {**spec, "volumes": volumes, "containers": [container]}}
    return {"name": name, "template": {"spec": {"template": pod}}}


def _selected(config: ClusterConfig) -> Json:
    """Where pods may run, and as whom."""
    nodes = {**config.node_selector, **({_GPU_TYPE: config.gpu_type} if config.gpu_type else {})}
    # An empty field means something else to Kubernetes than none: no key is every key.
    tolerations = [{key: value for key, value in each.model_dump().items() if value} for each in config.tolerations]
    found: Json = {"nodeSelector": nodes, "tolerations": tolerations, "serviceAccountName": config.service_account}
    return {key: value for key, value in found.items() if value}
