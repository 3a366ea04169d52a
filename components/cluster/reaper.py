"""Removes training jobs that nobody waits for: `python -m components.cluster.reaper`, every few minutes.

A step that is killed outright cannot remove its job. The job runs on until its heartbeat is older than the job's own
annotation allows; jobs without a heartbeat and jobs of other projects are left alone.
"""

import argparse
from datetime import UTC, datetime

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import kube
from components.cluster.kube import Json, TrainJobs
from components.shared.errors import RetryableError
from components.shared.progress import say
from components.shared.stage import exit_on_error


def reap(api: client.ApiClient, namespace: str, now: datetime) -> list[str]:
    """Delete the jobs whose heartbeat is stale at this time; return their names.

    Raises:
        kubernetes.client.ApiException: The API server refuses.
        urllib3.exceptions.HTTPError: It does not answer.
    """
    jobs = TrainJobs(api, namespace)
    stale = [job["metadata"] for job in jobs.find({}) if _is_stale(job["metadata"], now)]
    # Unless the heartbeat was renewed meanwhile.
    return [metadata["name"] for metadata in stale if jobs.delete(metadata["name"], unchanged=metadata)]


def delete_run(api: client.ApiClient, namespace: str, run_id: str) -> list[str]:
    """Delete the training jobs of a run with their pods; return their names. Raises as `reap`."""
    assert run_id
    jobs = TrainJobs(api, namespace)
    names = [job["metadata"]["name"] for job in jobs.find({kube.RUN_ID: run_id})]
    return [name for name in names if jobs.delete(name)]


def _is_stale(metadata: Json, now: datetime) -> bool:
    """Tell whether nobody waits for a job; jobs whose annotations cannot be read are left to people."""
    annotations = metadata.get("annotations") or {}
    try:
        beat = datetime.fromisoformat(annotations[kube.HEARTBEAT])
        is_stale = (now - beat).total_seconds() > float(annotations[kube.STALE_AFTER_S])
    except (KeyError, ValueError, TypeError):
        return False
    return is_stale and kube.RUN_ID in metadata["labels"]


def main() -> None:
    """Reap once, in this pod's namespace or the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m components.cluster.reaper", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--namespace", default="", help="default: that of this pod")
    options = parser.parse_args()
    with exit_on_error("reaper"):
        namespace = options.namespace or kube.own_namespace()
        try:
            reaped = reap(kube.connect(), namespace, datetime.now(UTC))
        except (client.ApiException, HTTPError) as error:
            message = f"cannot list and delete training jobs of {namespace}: {kube.error_message(error)}"
            raise RetryableError(message) from None
    say("reaper", f"removed {', '.join(reaped)}" if reaped else f"nothing to remove in {namespace}")


if __name__ == "__main__":
    main()
