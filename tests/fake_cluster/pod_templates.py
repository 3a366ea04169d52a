"""The pods of a TrainJob: the runtime's template with the TrainJob's own fields and its patches merged in."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fake_cluster.errors import Json

PORT = 29400


@dataclass(frozen=True)
class PodTemplate:
    """One pod that JobSet makes."""

    job: str
    """The replicated job it belongs to, such as `node`."""
    replica: int
    """Which of the job's replicas it belongs to; each is a Job of its own."""
    index: int
    """Its place in that Job."""
    metadata: Json
    spec: Json


def pod_templates(train_job: Json, runtime: Json) -> Iterator[PodTemplate]:
    """The pods that a TrainJob has while it runs."""
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        template = copy.deepcopy(job["template"]["spec"]["template"])
        step = job["template"].get("metadata", {}).get("labels", {}).get("trainer.kubeflow.org/trainjob-ancestor-step")
        metadata = template.get("metadata", {})
        for patch in _patches(train_job, job["name"]):
            _merge_metadata(metadata, patch.get("metadata", {}))
            _merge_spec(template["spec"], patch.get("spec", {}))
        count = job["template"]["spec"].get("parallelism", 1)
        if step == "trainer":
            count = num_nodes(train_job, runtime)
            _set_trainer(train_job, template["spec"], count)
        for replica, index in itertools.product(range(job.get("replicas", 1)), range(count)):
            labels = {
                **metadata.get("labels", {}),
                "jobset.sigs.k8s.io/jobset-name": train_job["metadata"]["name"],
                "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
                "jobset.sigs.k8s.io/job-index": str(replica),
                "batch.kubernetes.io/job-name": f"{train_job['metadata']['name']}-{job['name']}-{replica}",
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            if step:
                labels["trainer.kubeflow.org/trainjob-ancestor-step"] = step
            made = {"labels": labels, "annotations": metadata.get("annotations", {})}
            yield PodTemplate(job["name"], replica, index, made, copy.deepcopy(template["spec"]))


def num_nodes(train_job: Json, runtime: Json) -> int:
    """How many nodes the training has."""
    asked = train_job["spec"].get("trainer", {}).get("numNodes")
    found: int = asked or runtime["spec"].get("mlPolicy", {}).get("numNodes", 1)
    return found


def _patches(train_job: Json, job: str) -> Iterator[Json]:
    for patch in train_job["spec"].get("runtimePatches", []):
        template = patch.get("trainingRuntimeSpec", {}).get("template", {})
        for each in template.get("spec", {}).get("replicatedJobs", []):
            if each["name"] == job:
                yield each.get("template", {}).get("spec", {}).get("template", {})


def _merge_metadata(metadata: Json, patch: Json) -> None:
    for field in ("labels", "annotations"):
        metadata[field] = {**metadata.get(field, {}), **patch.get(field, {})}


def _merge_spec(spec: Json, patch: Json) -> None:
    for field, value in patch.items():
        if field in ("containers", "initContainers"):
            for container in value:
                own = next(each for each in spec[field] if each["name"] == container["name"])
                _merge_spec(own, {name: part for name, part in container.items() if name != "name"})
        elif isinstance(value, list):
            spec[field] = _by_name([*spec.get(field, []), *value])
        elif isinstance(value, dict):
            spec[field] = {**spec.get(field, {}), **value}
        else:
            spec[field] = value


def _by_name(items: list[Any]) -> list[Any]:
    """Later entries replace earlier ones of the same name; those without one are all kept."""
    named = {each.get("mountPath", each.get("name", str(each))): each for each in items}
    return list(named.values())


def _set_trainer(train_job: Json, spec: Json, count: int) -> None:
    """What Trainer's torch plugin writes into the container `node`."""
    trainer, name = train_job["spec"].get("trainer", {}), train_job["metadata"]["name"]
    container = next(each for each in spec["containers"] if each["name"] == "node")
    for field in ("image", "command", "args"):
        if field in trainer:
            container[field] = trainer[field]
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    processes = trainer.get("numProcPerNode", "auto")
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    added = [
        *trainer.get("env", []),
        {"name": "PET_NNODES", "value": str(count)},
        {"name": "PET_NPROC_PER_NODE", "value": str(processes)},
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    container["env"] = _by_name([*container.get("env", []), *added])
