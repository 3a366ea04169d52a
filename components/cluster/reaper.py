"""Removes training jobs whose step is gone: `python -m components.cluster.reaper`, every few minutes.

A step that is killed outright can remove nothing. Its job lives on until its heartbeat is older than the job itself
says; jobs without a heartbeat, and those that others have made, are left alone.
"""

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import names
from components.cluster.api import connect, own_namespace
from components.cluster.cleanup import delete
from components.cluster.trainjob.patience import reason
from components.shared.errors import RetryableError
from components.shared.progress import say
from components.shared.stage import exit_on_error

_STAGE = "reaper"


def reap(api: client.ApiClient, namespace: str, now: datetime) -> list[str]:
    """Delete the jobs whose heartbeat is stale at this time; return their names."""
    custom = client.CustomObjectsApi(api)
    where = (names.GROUP, names.VERSION, namespace, names.PLURAL)
    found = custom.list_namespaced_custom_object(*where, label_selector=names.selector({}))
    stale = [job["metadata"] for job in found["items"] if names.is_ours(job) and _is_stale(job, now)]
    return [each["name"] for each in stale if delete(custom, namespace, each["name"], as_seen=each)]


def _is_stale(job: Mapping[str, Any], now: datetime) -> bool:
    """Tell whether nobody waits for a job; one whose annotations cannot be read is left to people."""
    annotations = job["metadata"].get("annotations") or {}
    try:
        beaten = datetime.fromisoformat(annotations[names.HEARTBEAT])
        return (now - beaten).total_seconds() > float(annotations[names.STALE_AFTER_S])
    except (KeyError, ValueError, TypeError):
        return False


def main() -> None:
    """Reap once, in this pod's namespace or the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m components.cluster.reaper", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--namespace", default="", help="default: that of this pod")
    options = parser.parse_args()
    with exit_on_error(_STAGE):
        namespace = options.namespace or own_namespace()
        try:
            reaped = reap(connect(), namespace, datetime.now(UTC))
        except (client.ApiException, HTTPError) as error:
            raise RetryableError(f"training jobs of {namespace} cannot be looked through: {reason(error)}") from None
    say(_STAGE, f"removed {', '.join(reaped)}" if reaped else f"nothing to remove in {namespace}")


if __name__ == "__main__":
    main()
