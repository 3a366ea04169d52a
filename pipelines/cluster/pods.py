"""What the UI server of Kubeflow Pipelines tells about a run's pods: their logs, and whether they are still there.

Inside a cluster the address is that of the API server, which tells nothing of pods: logs then come from Kubernetes.
"""

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


class _NoUiError(PipelineError):
    """The address is not that of a UI server."""


def log(cluster: Cluster, run: Any, pod: str) -> str:
    """Return what a pod has printed so far, from the pod itself or from the archive once it is gone.

    Raises:
        NoLogError: There is none.
    """
    # The day is part of the archive's path on some installations.
    query = {**_query(cluster, pod), "runid": run.run_id, "createdat": run.created_at.strftime("%Y-%m-%d")}
    try:
        status, text = _get(cluster, _LOG, query)
    except _NoUiError as error:
        return _log_from_kubernetes(cluster, pod, error)
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
    try:
        status, text = _get(cluster, _EVENTS, _query(cluster, pod))
        events = json.loads(text)["items"] if status == 200 else []
    except (PipelineError, ValueError, KeyError):
        return None
    warnings = [each["message"] for each in events if each["type"] == "Warning" and each["reason"] != _HARMLESS]
    # Kubernetes repeats itself, ever shorter: the longest has the cause.
    return " ".join(max(warnings, key=len).split())[:300] if warnings else None


def _log_from_kubernetes(cluster: Cluster, pod: str, no_ui: _NoUiError) -> str:
    """Return what a pod that is still there has printed so far."""
    from kubernetes.client import ApiException, CoreV1Api
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect

    try:
        answer = CoreV1Api(connect()).read_namespaced_pod_log(
            pod, cluster.namespace or STANDALONE, container="main", _preload_content=False
        )
    except ApiException as error:
        if error.status in (400, 404):
            raise NoLogError(f"{pod}: there is no log of it") from None
        raise PipelineError(f"{no_ui}, and the Kubernetes API says {error.reason}") from None
    except (HTTPError, PipelineError):
        raise no_ui from None
    text: str = answer.data.decode("utf-8", errors="replace")
    return text


def _query(cluster: Cluster, pod: str) -> dict[str, str]:
    return {"podname": pod, "podnamespace": cluster.namespace or STANDALONE}


def _get(cluster: Cluster, path: str, query: dict[str, str]) -> tuple[int, str]:
    """Ask the UI server, whose refusals are text; anything else that goes wrong is an error."""
    from kfp_server_api import ApiException

    with explained(cluster.endpoint):
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
            if error.status == 404:
                raise _NoUiError(f"{cluster.endpoint}: has no {path}; name the address of the UI") from None
            raise
        text: str = answer.data.decode("utf-8", errors="replace")
        return 200, text
