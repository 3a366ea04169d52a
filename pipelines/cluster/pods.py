"""What the UI server of Kubeflow Pipelines tells about a run's pods: their logs, and whether they are still there."""

import json
import re
from typing import Any

from components.shared.errors import PipelineError
from pipelines.cluster.explained import explained
from pipelines.cluster.runs import STANDALONE, Cluster

_LOG, _POD, _EVENTS = "/k8s/pod/logs", "/k8s/pod", "/k8s/pod/events"
_NO_LOG = "Could not get main container logs"
_HARMLESS = "FailedToRetrieveImagePullSecret"
"""Reason of an event about a secret that need not exist."""


class NoLogError(PipelineError):
    """The server has no log of a pod: nothing was printed yet, or the pod is gone and its log was not archived."""


def log(cluster: Cluster, run: Any, pod: str) -> str:
    """Return what a pod has printed so far, from the pod itself or from the archive once it is gone.

    Raises:
        NoLogError: There is none.
    """
    # The day is part of the archive's path on some installations.
    query = {**_query(cluster, pod), "runid": run.run_id, "createdat": run.created_at.strftime("%Y-%m-%d")}
    status, text = _get(cluster, _LOG, query)
    # The server reports a log that breaks off with a line at its end, under status 200.
    printed, marker, _ = text.partition(_NO_LOG)
    if status == 200 and (printed or not marker):
        return printed
    raise NoLogError(f"{pod}: there is no log of it")


def is_gone(cluster: Cluster, pod: str) -> bool:
    """Tell whether a pod does not exist any more; False where the server does not know."""
    status, text = _get(cluster, _POD, _query(cluster, pod))
    return status != 200 and bool(re.search(r"not found|NotFound", text))


def warning(cluster: Cluster, pod: str) -> str | None:
    """Return what Kubernetes last said that is in the way of a pod, such as an image that cannot be pulled."""
    status, text = _get(cluster, _EVENTS, _query(cluster, pod))
    try:
        events = json.loads(text)["items"] if status == 200 else []
    except (ValueError, KeyError):
        return None
    warnings = [each["message"] for each in events if each["type"] == "Warning" and each["reason"] != _HARMLESS]
    # Kubernetes repeats itself, ever shorter: the longest has the cause.
    return " ".join(max(warnings, key=len).split())[:300] if warnings else None


def _query(cluster: Cluster, pod: str) -> dict[str, str]:
    return {"podname": pod, "podnamespace": cluster.namespace or STANDALONE}


def _get(cluster: Cluster, path: str, query: dict[str, str]) -> tuple[int, str]:
    """Ask the UI server, whose refusals are text; anything else that goes wrong is an error."""
    from kfp_server_api import ApiException

    with explained(cluster.endpoint, missing=f"{cluster.endpoint}: {path} is not there: logs need the UI's address"):
        try:
            answer = cluster.client._run_api.api_client.call_api(
                path,
                "GET",
                query_params=list(query.items()),
                auth_settings=["Bearer"],
                _return_http_data_only=True,
                _preload_content=False,  # a log is no JSON
            )
        except ApiException as error:
            refusal = str(error.body or "")
            if error.status in (404, 500) and not refusal.lstrip().startswith(("{", "<")):
                return error.status, refusal
            raise
        text: str = answer.data.decode("utf-8", errors="replace")
        return 200, text
