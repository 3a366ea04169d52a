"""The pods of training jobs: as Trainer and JobSet make them, scheduled, started and ended, with events and logs."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import EVENTS, JOB_SETS, PODS
from tests.fake_cluster.store import Store, key_of, reference_to

ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_PORT = 29500
_JOB_SET, _JOB = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class Output:
    """What a container has printed, with the times."""

    lines: list[tuple[datetime, str]] = field(default_factory=list)
    is_over: bool = False


Outputs = dict[tuple[str, str], Output]
"""By the pod's uid and the name of the container."""


class Pods:
    """What the scheduler and the kubelets do to pods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.outputs: Outputs = {}
        self._numbers = itertools.count()

    def create(self, job_set: Json, attempt: int) -> None:
        """Create the pods of a JobSet, without nodes; they belong to it."""
        for pod in pods_of(job_set, attempt):
            pod["metadata"]["name"] += f"-{next(self._numbers):05x}"
            pod["metadata"]["ownerReferences"] = [reference_to(job_set)]
            self._store.create(pod)

    def of(self, job: Json, replicated_job: str = "") -> list[Json]:
        """Return the pods of a job, or of one of its replicated jobs, in the order of their index."""
        pods = []
        for pod in self._store.all(PODS, job["metadata"]["namespace"]):
            labels = pod["metadata"].get("labels", {})
            if labels.get(_JOB_SET) == job["metadata"]["name"] and labels[_JOB].startswith(replicated_job):
                pods.append(pod)
        return sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][INDEX]))

    def unschedulable(self, pod: Json, message: str) -> None:
        """The scheduler finds no node."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._set(pod, conditions=[condition])
        self.event(pod, "Warning", "FailedScheduling", message)

    def assign(self, pod: Json) -> None:
        """The scheduler finds a node; the container is being created."""
        if "nodeName" not in pod["spec"]:
            pod["spec"]["nodeName"] = f"gpu-{pod['metadata']['labels'][INDEX]}"
            message = f"Successfully assigned the pod to {pod['spec']['nodeName']}"
            self.event(pod, "Normal", "Scheduled", message)
        self._wait(pod, {"reason": "ContainerCreating"})

    def pull_fails(self, pod: Json, message: str) -> None:
        """The kubelet cannot get the image, and tries again ever more rarely."""
        self.assign(pod)
        image = pod["spec"]["containers"][0].get("image", "")
        back_off = f'Back-off pulling image "{image}": {message}'
        self._wait(pod, {"reason": "ImagePullBackOff", "message": back_off})
        self.event(pod, "Warning", "Failed", f'Failed to pull image "{image}": {message}')

    def start(self, pod: Json) -> None:
        """The containers run."""
        started = self._store.clock.stamp()
        for container in pod["spec"]["containers"]:
            self.outputs[pod["metadata"]["uid"], container["name"]] = Output()
        conditions = [{"type": type_, "status": "True"} for type_ in ("PodScheduled", "Ready")]
        state = {"running": {"startedAt": started}}
        self._set(pod, state, phase="Running", conditions=conditions, startTime=started)
        self.event(pod, "Normal", "Started", "Started container")

    def print(self, pod: Json, *lines: str, container: str = "") -> None:
        """A container, the first if none is named, prints lines."""
        name = container or pod["spec"]["containers"][0]["name"]
        output = self.outputs.setdefault((pod["metadata"]["uid"], name), Output())
        output.lines += [(self._store.clock.now(), line) for line in lines]
        self._store.clock.changed.notify_all()

    def stop(self, pod: Json, exit_code: int, reason: str, evicted: str = "") -> None:
        """All containers end, of an eviction if there is a message about one."""
        ended = {"exitCode": exit_code, "reason": reason, "finishedAt": self._store.clock.stamp()}
        phase, conditions = "Failed" if exit_code else "Succeeded", [{"type": "Ready", "status": "False"}]
        conditions += [each for each in pod["status"].get("conditions", []) if each["type"] == "DisruptionTarget"]
        why = {"reason": "Evicted", "message": evicted} if evicted else {}
        self._set(pod, {"terminated": ended}, phase=phase, conditions=conditions, **why)
        self.end_logs(pod)

    def disrupt(self, pod: Json, reason: str, message: str) -> None:
        """Say why a pod is about to be taken from its node."""
        target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        self._set(pod, conditions=[*pod["status"].get("conditions", []), target])

    def end_logs(self, pod: Json) -> None:
        """End the logs of all containers, for whoever follows them."""
        for (uid, _), output in self.outputs.items():
            output.is_over = output.is_over or uid == pod["metadata"]["uid"]
        self._store.clock.changed.notify_all()

    def event(self, about: Json, type_: str, reason: str, message: str) -> None:
        """Write an event."""
        metadata, now = about["metadata"], self._store.clock.stamp()
        involved = {key: about[key] for key in ("apiVersion", "kind")}
        involved |= {key: metadata[key] for key in ("namespace", "name", "uid")}
        name = f"{metadata['name']}.{len(self._store.all(EVENTS)):016x}"
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": metadata["namespace"]}}
        event |= {"involvedObject": involved, "type": type_, "reason": reason, "message": message}
        self._store.create({**event, "firstTimestamp": now, "lastTimestamp": now, "count": 1})

    def _wait(self, pod: Json, reason: Json) -> None:
        self._set(pod, {"waiting": reason}, conditions=[{"type": "PodScheduled", "status": "True"}])

    def _set(self, pod: Json, state: Json | None = None, **status: object) -> None:
        current = self._store.get(*key_of(pod))
        if current is None:
            return
        if state is not None:
            names = [each["name"] for each in pod["spec"]["containers"]]
            status["containerStatuses"] = [{"name": name, "state": state} for name in names]
        self._store.replace({**current, "spec": pod["spec"], "status": {**current["status"], **status}})


def job_set_of(train_job: Json, runtime: Json) -> Json:
    """Return the JobSet that Trainer makes of a TrainJob: the runtime's, with the TrainJob's fields and patches."""
    spec, made_for = copy.deepcopy(runtime["spec"]["template"]["spec"]), train_job["metadata"]
    name, trainer = made_for["name"], train_job["spec"].get("trainer", {})
    spec["replicatedJobs"] = [{"groupName": "default", "replicas": 1, **job} for job in spec["replicatedJobs"]]
    for job in spec["replicatedJobs"]:
        inner = job["template"]["spec"]
        for patch in _patches(train_job, job["name"]):
            inner["template"] = _merged(inner["template"], patch)
        count = inner.get("parallelism", 1)
        if job["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR_LABEL) == "trainer":
            count = trainer.get("numNodes") or runtime["spec"]["mlPolicy"]["numNodes"]
            _set_trainer(name, trainer, inner["template"]["spec"], count)
        inner |= {"completionMode": "Indexed", "completions": count, "parallelism": count}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    defaults = {"network": network, "successPolicy": {"operator": "All"}}
    defaults["startupPolicy"] = {"startupPolicyOrder": "AnyOrder"}
    spec = {**defaults, **spec, "suspend": train_job["spec"].get("suspend", False)}
    metadata = {"name": name, "namespace": made_for["namespace"], "ownerReferences": [reference_to(train_job)]}
    return {"apiVersion": JOB_SETS.api_version, "kind": JOB_SETS.name, "metadata": metadata, "spec": spec}


def pods_of(job_set: Json, attempt: int) -> Iterator[Json]:
    """Yield the pods that a JobSet has while it runs."""
    name, namespace = job_set["metadata"]["name"], job_set["metadata"]["namespace"]
    for job in job_set["spec"]["replicatedJobs"]:
        inner = job["template"]["spec"]
        template = inner["template"]
        step = job["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR_LABEL)
        metadata = {"labels": {}, "annotations": {}, **template.get("metadata", {})}
        for replica, index in itertools.product(range(job["replicas"]), range(inner["parallelism"])):
            labels = {
                **metadata["labels"],
                _JOB_SET: name,
                _JOB: job["name"],
                "jobset.sigs.k8s.io/job-index": str(replica),
                "jobset.sigs.k8s.io/restart-attempt": str(attempt),
                "batch.kubernetes.io/job-name": f"{name}-{job['name']}-{replica}",
                INDEX: str(index),
                **({ANCESTOR_LABEL: step} if step else {}),
            }
            made = {"name": f"{name}-{job['name']}-{replica}-{index}", "namespace": namespace, "labels": labels}
            made["annotations"] = {**metadata["annotations"], INDEX: str(index)}
            spec, status = copy.deepcopy(template["spec"]), {"phase": "Pending"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": spec, "status": status}


def _patches(train_job: Json, replicated_job: str) -> Iterator[Json]:
    for patch in train_job["spec"].get("runtimePatches", []):
        template = patch.get("trainingRuntimeSpec", {}).get("template", {})
        for each in template.get("spec", {}).get("replicatedJobs", []):
            if each["name"] == replicated_job:
                yield each.get("template", {}).get("spec", {}).get("template", {})


def _merged(target: Any, patch: Any) -> Any:
    """Apply a strategic merge patch: mappings by key, lists by the name or the path of their items."""
    if isinstance(patch, dict) and isinstance(target, dict):
        return {**target, **{key: _merged(target.get(key), value) for key, value in patch.items()}}
    if isinstance(patch, list) and isinstance(target, list):
        items = {_name(each): each for each in target}
        return list({**items, **{_name(each): _merged(items.get(_name(each)), each) for each in patch}}.values())
    return patch


def _name(item: Any) -> str:
    return str(item.get("mountPath", item.get("name", item)) if isinstance(item, dict) else item)


def _set_trainer(name: str, trainer: Json, spec: Json, count: int) -> None:
    """Set what Trainer's torch plugin writes into the container `node`."""
    container = next(each for each in spec["containers"] if each["name"] == "node")
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    added = [
        *trainer.get("env", []),
        {"name": "PET_NNODES", "value": str(count)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", "auto"))},
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    container["env"] = _merged(container.get("env", []), added)
    container["ports"] = [*container.get("ports", []), {"containerPort": _PORT, "protocol": "TCP"}]
