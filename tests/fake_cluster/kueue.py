"""Kueue: a Workload for every TrainJob with a queue, which says whether it is admitted; so does the job itself."""

from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import TRAIN_JOBS, WORKLOADS
from tests.fake_cluster.store import Condition, Key, Store, reference_to

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MANAGER = "kueue.x-k8s.io/manager"


class Kueue:
    """Admits and preempts TrainJobs when a test asks for it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def queue(self, job: Json) -> None:
        """A TrainJob with a queue is new."""
        metadata = job["metadata"]
        if QUEUE_LABEL not in metadata.get("labels", {}):
            return
        made = {"name": _workload(job)[2], "namespace": metadata["namespace"], "ownerReferences": [reference_to(job)]}
        made["labels"] = {"kueue.x-k8s.io/job-uid": metadata["uid"]}
        kind = {"apiVersion": WORKLOADS.api_version, "kind": WORKLOADS.name}
        self._store.create({**kind, "metadata": made, "spec": {"queueName": metadata["labels"][QUEUE_LABEL]}})

    def wait(self, job: Json, message: str) -> None:
        """There is no room for a job, or no more."""
        released = ("Admitted", "False", "NoReservation", "The workload has no reservation")
        pending = ("QuotaReserved", "False", "Pending", message)
        self._say(job, pending, *([released] if self._has(job, "Admitted") else []))

    def admit(self, job: Json) -> None:
        """There is room: the pods get the queue's labels, and the job is resumed."""
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL, "")
        reserved = ("QuotaReserved", "True", "QuotaReserved", f"Quota reserved in ClusterQueue {queue}")
        back = ("Evicted", "False", "QuotaReserved", "Previously: Preempted")
        admitted = ("Admitted", "True", "Admitted", "The workload is admitted")
        self._say(job, reserved, *([back] if self._has(job, "Evicted") else []), admitted)
        patches = job["spec"].get("runtimePatches", [])
        pod = {"metadata": {"labels": {"kueue.x-k8s.io/local-queue-name": queue}}, "spec": {}}
        patch = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": pod}}}]}}}
        added = {"manager": _MANAGER, "time": self._store.clock.stamp(), "trainingRuntimeSpec": patch}
        self._write(job, [*patches, added], suspend=False)

    def preempt(self, job: Json) -> None:
        """Another job needs the room: this one is suspended, and its pods are as before."""
        why = "Preempted to accommodate a workload (UID: 1, JobUID: 2) due to prioritization in the ClusterQueue"
        self._say(job, ("Evicted", "True", "Preempted", why))
        patches = [each for each in job["spec"].get("runtimePatches", []) if each["manager"] != _MANAGER]
        self._write(job, patches, suspend=True)

    def _write(self, job: Json, patches: list[Json], *, suspend: bool) -> None:
        changes = {"runtimePatches": patches} if patches else {}
        spec = {name: value for name, value in job["spec"].items() if name != "runtimePatches"}
        self._store.replace({**job, "spec": {**spec, **changes, "suspend": suspend}})

    def _say(self, job: Json, *conditions: Condition) -> None:
        self._store.set_conditions(_workload(job), *conditions)

    def _has(self, job: Json, type_: str) -> bool:
        workload = self._store.get(*_workload(job)) or {}
        return any(each["type"] == type_ for each in workload.get("status", {}).get("conditions", []))


def _workload(job: Json) -> Key:
    metadata = job["metadata"]
    return WORKLOADS, metadata["namespace"], f"{TRAIN_JOBS.name.lower()}-{metadata['name']}-{metadata['uid'][-5:]}"
