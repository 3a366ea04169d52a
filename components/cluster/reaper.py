"""Removes training jobs that nobody waits for: `python -m components.cluster.reaper`, every few minutes.

A step that is killed outright leaves its job. While the run lasts, another attempt of the step may adopt the job; after
the run, it is removed once its heartbeat is stale. Jobs without heartbeat or of other projects are left alone.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from kubernetes import client

from components.cluster import kube
from components.cluster.kube import Json, RetryPolicy, TrainJobs
from components.shared.progress import say
from components.shared.stage import exit_on_error

_STALE_AFTER_S = 600.0
"""Age of a heartbeat after which its step is taken to be gone: twenty times the interval of heartbeats."""
_RENEWAL_S = 60.0
"""Time for steps to renew their heartbeats after the API server was down: twice their longest pause between calls."""


def reap(
    api: client.ApiClient, namespace: str, now: datetime, wait: Callable[[float], object] = time.sleep
) -> list[str]:
    """Delete jobs of ended runs with a stale heartbeat; return their names. Raises the same errors as `TrainJobs`."""
    jobs = TrainJobs(api, namespace)
    stale = [job["metadata"] for job in jobs.find({}) if _is_stale(job["metadata"], now)]
    runs = kube.unfinished_workflows(api, namespace) if stale else {}
    orphaned = [metadata for metadata in stale if metadata["labels"][kube.RUN_ID] not in runs]
    if orphaned:
        wait(_RENEWAL_S)
    # A job whose heartbeat was renewed meanwhile has changed, and stays.
    return [metadata["name"] for metadata in orphaned if jobs.delete(metadata["name"], unchanged=metadata)]


def delete_run(api: client.ApiClient, namespace: str, run_id: str) -> list[str]:
    """Delete the training jobs of a run with their pods; return their names. Raises the same errors as `TrainJobs`."""
    jobs = TrainJobs(api, namespace)
    names = [job["metadata"]["name"] for job in jobs.find({kube.RUN_ID: run_id})]
    return [name for name in names if jobs.delete(name)]


def _is_stale(metadata: Json, now: datetime) -> bool:
    """Tell whether the heartbeat of a job is old, so that no step waits for it; False without a readable heartbeat."""
    try:
        heartbeat = datetime.fromisoformat((metadata.get("annotations") or {})[kube.HEARTBEAT])
        return (now - heartbeat).total_seconds() > _STALE_AFTER_S and kube.RUN_ID in metadata["labels"]
    except (KeyError, ValueError, TypeError):
        return False


def main() -> None:
    """Remove orphaned jobs in this pod's namespace once."""
    with exit_on_error("reaper"):
        namespace = kube.own_namespace()
        action = f"list training jobs and workflows of {namespace} and delete training jobs"
        reaped = RetryPolicy(limit_s=0).call(action, lambda: reap(kube.connect(), namespace, datetime.now(UTC)))
    say("reaper", f"removed {', '.join(reaped)}" if reaped else f"nothing to remove in {namespace}")


if __name__ == "__main__":
    main()
