"""Removal of what a run has left in the cluster."""

from collections.abc import Mapping
from typing import Any

from kubernetes import client

from components.cluster import names

_NOT_FOUND, _CONFLICT = 404, 409


def delete_run(api: client.ApiClient, namespace: str, run_id: str) -> list[str]:
    """Delete the training jobs of a run with all that belongs to them; return their names.

    Raises:
        kubernetes.client.ApiException: The API server refuses.
        urllib3.exceptions.HTTPError: It does not answer.
    """
    assert run_id
    custom = client.CustomObjectsApi(api)
    where = (names.GROUP, names.VERSION, namespace, names.PLURAL)
    found = custom.list_namespaced_custom_object(*where, label_selector=names.selector({names.RUN_ID: run_id}))
    return [name for job in found["items"] if (name := job["metadata"]["name"]) and delete(custom, namespace, name)]


def delete(
    custom: client.CustomObjectsApi,
    namespace: str,
    name: str,
    *,
    as_seen: Mapping[str, Any] | None = None,
    pods_first: bool = False,
) -> bool:
    """Delete a training job with all that belongs to it; return whether it was there.

    With the metadata `as_seen` it is left alone, as if it were not there, where anything has changed since. With
    `pods_first` it is there until nothing is left that belongs to it.
    """
    wanted = as_seen and client.V1Preconditions(uid=as_seen["uid"], resource_version=as_seen["resourceVersion"])
    policy = "Foreground" if pods_first else "Background"
    body = client.V1DeleteOptions(propagation_policy=policy, preconditions=wanted)
    try:
        custom.delete_namespaced_custom_object(names.GROUP, names.VERSION, namespace, names.PLURAL, name, body=body)
    except client.ApiException as error:
        if error.status == _NOT_FOUND or (as_seen and error.status == _CONFLICT):
            return False
        raise
    return True
