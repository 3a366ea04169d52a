"""The pods of the scripted cluster: made, scheduled, started, ended; with the events that tell of it."""

from tests.fake_cluster.errors import Json
from tests.fake_cluster.kinds import EVENTS, PODS
from tests.fake_cluster.logs import Logs
from tests.fake_cluster.pod_templates import PodTemplate
from tests.fake_cluster.store import Store, key_of, rfc3339


class Pods:
    """What the scheduler and the kubelets do to the pods of one job."""

    def __init__(self, store: Store, logs: Logs) -> None:
        self._store, self._logs = store, logs
        self._num_events = 0

    def create(self, job: Json, template: PodTemplate, owner: Json, attempt: int) -> None:
        """Make a pod, Pending and without a node."""
        metadata = job["metadata"]
        made = self._store.version
        name = f"{metadata['name']}-{template.job}-{template.replica}-{template.index}-{made:05x}"[-253:]
        labels = {**template.metadata["labels"], "jobset.sigs.k8s.io/restart-attempt": str(attempt)}
        annotations = {
            **template.metadata["annotations"],
            "batch.kubernetes.io/job-completion-index": str(template.index),
        }
        self._store.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": metadata["namespace"],
                    "labels": labels,
                    "annotations": annotations,
                    "ownerReferences": [reference_to(owner)],
                },
                "spec": template.spec,
                "status": {"phase": "Pending"},
            }
        )

    def of(self, job: Json, replicated: str = "") -> list[Json]:
        """The pods of a job, or of one of its replicated jobs, in the order of their index."""
        metadata = job["metadata"]
        found = []
        for pod in self._store.all(PODS, metadata["namespace"]):
            labels = pod["metadata"].get("labels", {})
            mine = labels.get("jobset.sigs.k8s.io/jobset-name") == metadata["name"]
            if mine and labels["jobset.sigs.k8s.io/replicatedjob-name"].startswith(replicated):
                found.append(pod)
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]))

    def unschedulable(self, pod: Json, message: str) -> None:
        """The scheduler finds no node."""
        condition = self._condition("PodScheduled", "False", "Unschedulable", message)
        self._set(pod, phase="Pending", conditions=[condition])
        self.event(pod, "Warning", "FailedScheduling", message, "default-scheduler")

    def assign(self, pod: Json) -> None:
        """The scheduler finds a node; the container is being made."""
        if not pod["spec"].get("nodeName"):
            node = f"gpu-{pod['metadata']['labels']['batch.kubernetes.io/job-completion-index']}"
            pod["spec"]["nodeName"] = node
            self.event(pod, "Normal", "Scheduled", f"Successfully assigned the pod to {node}", "default-scheduler")
        self._waiting(pod, "ContainerCreating", "")

    def pull_fails(self, pod: Json, message: str) -> None:
        """The kubelet cannot get the image, and tries again ever more rarely."""
        image = pod["spec"]["containers"][0].get("image", "")
        self._waiting(pod, "ImagePullBackOff", f'Back-off pulling image "{image}": {message}')
        self.event(pod, "Warning", "Failed", f'Failed to pull image "{image}": {message}', "kubelet")
        self.event(pod, "Warning", "Failed", "Error: ErrImagePull", "kubelet")
        self.event(pod, "Normal", "BackOff", f'Back-off pulling image "{image}"', "kubelet")

    def start(self, pod: Json) -> None:
        """The containers run."""
        started = rfc3339(self._store.clock.now())
        for container in pod["spec"]["containers"]:
            self._logs.begin(pod, container["name"])
        states = [_container_status(each, {"running": {"startedAt": started}}) for each in pod["spec"]["containers"]]
        self._set(
            pod,
            phase="Running",
            conditions=[self._condition("PodScheduled", "True"), self._condition("Ready", "True")],
            containerStatuses=states,
            startTime=started,
            podIP="10.0.0.1",
        )
        self.event(pod, "Normal", "Started", "Started container", "kubelet")

    def say(self, pod: Json, *lines: str) -> None:
        """The first container prints."""
        self._logs.write(pod, pod["spec"]["containers"][0]["name"], *lines)

    def stop(self, pod: Json, exit_code: int, reason: str) -> None:
        """All containers end."""
        now = rfc3339(self._store.clock.now())
        ended = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": now}}
        states = [_container_status(each, ended) for each in pod["spec"]["containers"]]
        phase = "Succeeded" if exit_code == 0 else "Failed"
        self._set(pod, phase=phase, conditions=[self._condition("Ready", "False")], containerStatuses=states)
        for container in pod["spec"]["containers"]:
            self._logs.end(pod, container["name"])

    def remove(self, pod: Json) -> None:
        """The pod is gone, and its log with it."""
        for container in pod["spec"]["containers"]:
            self._logs.end(pod, container["name"])
        self._store.remove(key_of(pod))

    def event(self, about: Json, type_: str, reason: str, message: str, component: str) -> None:
        """Write an event, or count the one that says the same."""
        metadata = about["metadata"]
        now = rfc3339(self._store.clock.now())
        for event in self._store.all(EVENTS, metadata["namespace"]):
            if event["involvedObject"]["uid"] == metadata["uid"] and event["message"] == message:
                self._store.replace({**event, "count": event["count"] + 1, "lastTimestamp": now})
                return
        self._num_events += 1
        involved = {"apiVersion": about["apiVersion"], "kind": about["kind"], "namespace": metadata["namespace"]}
        self._store.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {
                    "name": f"{metadata['name']}.{self._store.version:016x}"[-253:],
                    "namespace": metadata["namespace"],
                },
                "involvedObject": {**involved, "name": metadata["name"], "uid": metadata["uid"]},
                "type": type_,
                "reason": reason,
                "message": message,
                "source": {"component": component},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )

    def _waiting(self, pod: Json, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        states = [_container_status(each, state) for each in pod["spec"]["containers"]]
        scheduled = self._condition("PodScheduled", "True")
        self._set(pod, phase="Pending", conditions=[scheduled], containerStatuses=states)

    def _set(self, pod: Json, **status: object) -> None:
        current = self._store.get(*key_of(pod))
        if current is not None:
            self._store.replace({**current, "spec": pod["spec"], "status": {**current["status"], **status}})

    def _condition(self, type_: str, status: str, reason: str = "", message: str = "") -> Json:
        moment = rfc3339(self._store.clock.now())
        return {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


def reference_to(owner: Json) -> Json:
    """An owner reference, as controllers write it."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _container_status(container: Json, state: Json) -> Json:
    running = "running" in state
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": running,
        "started": running,
        "restartCount": 0,
        "state": state,
    }
