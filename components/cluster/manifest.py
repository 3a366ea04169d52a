"""A job as a TrainJob of Kubeflow Trainer (2.2 and later, for `runtimePatches`)."""

import secrets
from collections.abc import Mapping, Sequence

from components.cluster import kube
from components.cluster.config import GPU_RESOURCE, ClusterConfig, ClusterStage
from components.cluster.job import Job
from components.cluster.kube import Json
from components.shared import lineage
from components.shared.environment import JOB_VARIABLE, KEY_VARIABLE, SERVERS_VARIABLE, TRAIN_JOB_VARIABLE

NODE, ROLLOUT = "node", "rollout"
"""Replicated jobs of the runtimes, each with a container of the same name."""
SERVER_PORT = 8000
RUNTIME, RUNTIME_WITH_SERVERS = "grpo-torch", "grpo-torch-vllm"
_QUEUE = "kueue.x-k8s.io/queue-name"


def owner_reference(pod: Json | None) -> Json | None:
    """Return a reference to the workflow that controls a pod; the job is deleted with it. None without a workflow."""
    owners = pod["metadata"].get("ownerReferences", []) if pod else []
    for owner in owners:
        if owner.get("controller"):
            reference = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
            # To block the owner's deletion would take permission to update the workflow.
            return {**reference, "controller": False, "blockOwnerDeletion": False}
    return None


def job_name(job: Job, stage: ClusterStage) -> str:
    """Return the name of a stage's job: the same for a repeated stage with the same inputs and config."""
    inputs = {"stage": stage.stage, "run": stage.run_id, "job": job.fields(), "cluster": stage.config.model_dump()}
    return f"grpo-{stage.run_id[:8]}-{lineage.value_digest(inputs)[:8]}"


def train_job(job: Job, stage: ClusterStage, environment: Mapping[str, str], owner: Json | None, now: str) -> Json:
    """Return the TrainJob for a job; its ranks get `environment`, with the addresses of vLLM servers added."""
    config, name = stage.config, job_name(job, stage)
    labels = {
        kube.MANAGED_BY: kube.PROJECT,
        kube.RUN_ID: stage.run_id,
        kube.STAGE: stage.stage.replace("_", "-"),
        kube.WORK: lineage.value_digest(str(job.folder.parent))[:16],
    }
    # Another run of the same work may adopt this job, so the digest leaves out the run, the name and the key.
    anonymous_spec = _spec(job, config, environment, "", {**labels, kube.RUN_ID: ""}, key="")
    digest = lineage.value_digest({"spec": anonymous_spec, "queue": config.queue, "job": job.work()})
    metadata: Json = {
        "name": name,
        "labels": labels if config.queue is None else {**labels, _QUEUE: config.queue},
        "annotations": {kube.SPEC_DIGEST: digest, kube.HEARTBEAT: now, kube.RUN_NAME: stage.run_name},
        **({"ownerReferences": [owner]} if owner else {}),
    }
    spec = _spec(job, config, environment, name, labels, key=secrets.token_hex())
    return {"apiVersion": f"{kube.GROUP}/{kube.VERSION}", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _spec(
    job: Job, config: ClusterConfig, environment: Mapping[str, str], name: str, labels: Mapping[str, str], *, key: str
) -> Json:
    """Return the spec of a TrainJob; `key` is the password for its vLLM servers."""
    environment = {**environment, TRAIN_JOB_VARIABLE: name}
    patches = [_patch(NODE, config, labels, [])]
    if job.with_samplers:
        urls = [f"http://{name}-{ROLLOUT}-{index}-0.{name}:{SERVER_PORT}" for index in range(config.rollout_servers)]
        environment = {**environment, SERVERS_VARIABLE: ",".join(urls), KEY_VARIABLE: key}
        for_servers = {JOB_VARIABLE: str(job.folder), TRAIN_JOB_VARIABLE: name, KEY_VARIABLE: key}
        patches.append(_patch(ROLLOUT, config, labels, _variables(for_servers)))
    runtime = RUNTIME_WITH_SERVERS if job.with_samplers else RUNTIME
    patch = {"template": {"spec": {"replicatedJobs": patches}}}
    return {
        "runtimeRef": {"apiGroup": kube.GROUP, "kind": "TrainingRuntime", "name": runtime},
        "trainer": _trainer(job, config, environment),
        "runtimePatches": [{"manager": "grpo-pipeline/launcher", "trainingRuntimeSpec": patch}],
        "activeDeadlineSeconds": config.training_timeout_s,
    }


def _trainer(job: Job, config: ClusterConfig, environment: Mapping[str, str]) -> Json:
    """Return the trainer of a TrainJob: the command of the pods of ranks, and the resources that they request."""
    pod = config.training_pod
    amounts = {"cpu": str(pod.cpu), "memory": f"{pod.memory_gib}Gi"}
    if config.gpus_per_node:
        amounts[GPU_RESOURCE] = str(config.gpus_per_node)
    references = [{"name": secret, "key": key} for secret, keys in config.secrets.items() for key in keys]
    return {
        "image": config.image,
        "command": ["python", "-m", "components.cluster.agent", str(job.folder)],
        "env": [
            *_variables(environment),
            *({"name": each["key"], "valueFrom": {"secretKeyRef": each}} for each in references),
        ],
        "numNodes": config.nodes,
        "numProcPerNode": job.num_processes // config.nodes,
        "resourcesPerNode": {"requests": amounts, "limits": {**amounts, "cpu": str(pod.cpu_limit)}},
    }


def _patch(name: str, config: ClusterConfig, labels: Mapping[str, str], environment: Sequence[Json]) -> Json:
    """Return the additions to a replicated job of the runtime: its pods' nodes, volumes, labels and variables."""
    mounts = [{"name": "dshm", "mountPath": "/dev/shm"}, {"name": "work", "mountPath": config.mount}]
    container: Json = {"name": name, "volumeMounts": mounts, "env": list(environment)}
    spec: Json = {
        "nodeSelector": config.labels,
        # Kubernetes distinguishes empty and missing fields: a toleration without a key tolerates every taint.
        "tolerations": [_without_empty(each.model_dump()) for each in config.tolerations],
        "volumes": [
            {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{config.training_pod.shm_gib}Gi"}},
            {"name": "work", "persistentVolumeClaim": {"claimName": config.volume}},
        ],
        "containers": [_without_empty(container)],
    }
    pod = {"metadata": {"labels": dict(labels)}, "spec": _without_empty(spec)}
    return {"name": name, "template": {"spec": {"template": pod}}}


def _variables(environment: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in environment.items()]


def _without_empty(fields: Json) -> Json:
    return {key: value for key, value in fields.items() if value}
