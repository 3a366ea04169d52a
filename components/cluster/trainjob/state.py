"""What a TrainJob and its pods say of themselves, read without asking anything."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from components.cluster.trainjob.manifest import NODE

Json = dict[str, Any]


class Phase(StrEnum):
    """Where a job is."""

    QUEUED = "waits in the queue"
    PENDING = "waits for its pods to run"
    RUNNING = "runs"
    COMPLETE = "is complete"
    FAILED = "has failed"

    @property
    def is_end(self) -> bool:
        """Whether nothing comes after it."""
        return self in (Phase.COMPLETE, Phase.FAILED)


def phase_of(job: Json, pods: Sequence[Json], num_nodes: int) -> Phase:
    """Return where a job is."""
    for kind, phase in (("Complete", Phase.COMPLETE), ("Failed", Phase.FAILED)):
        if condition(job, kind)["status"] == "True":
            return phase
    if job["spec"].get("suspend"):
        return Phase.QUEUED
    nodes = [pod for pod in pods if replicated_job(pod) == NODE]
    started = [pod for pod in nodes if pod["status"].get("phase", "Pending") != "Pending"]
    return Phase.RUNNING if len(started) >= num_nodes else Phase.PENDING


def condition(document: Json, kind: str) -> Json:
    """Return a condition of an object, with status Unknown where it has none of the kind."""
    found: list[Json] = document.get("status", {}).get("conditions") or []
    nothing = {"type": kind, "status": "Unknown", "reason": "", "message": ""}
    return next((each for each in found if each["type"] == kind), nothing)


def replicated_job(pod: Json) -> str:
    """Return which part of the job a pod belongs to."""
    name: str = pod["metadata"]["labels"].get("jobset.sigs.k8s.io/replicatedjob-name", "")
    return name


def first_node(pods: Sequence[Json]) -> Json | None:
    """Return the newest pod with the first rank, once it prints."""
    index = "batch.kubernetes.io/job-completion-index"
    firsts = [pod for pod in pods if replicated_job(pod) == NODE and pod["metadata"]["labels"].get(index) == "0"]
    begun = [pod for pod in firsts if states_of(pod, "running") or states_of(pod, "terminated")]
    return max(begun, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def states_of(pod: Json, kind: str) -> list[Json]:
    """Return the states of this kind (waiting, running, terminated) that containers of a pod are in."""
    statuses = pod["status"].get("containerStatuses") or []
    return [status["state"][kind] for status in statuses if kind in status.get("state", {})]
