"""What is asked of the cluster's API about one training job, as plain JSON."""

import json
from collections.abc import Mapping
from typing import Any

from kubernetes import client

from components.cluster import names
from components.cluster.cleanup import delete

Json = dict[str, Any]

_JOBS = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{{namespace}}/{names.PLURAL}"
_NOT_FOUND = 404
_FOLLOW_S = (5.0, 90.0)
"""Connecting, and reading until the next line: a connection that is lost without a word is found out."""


class Objects:
    """The training jobs of a namespace, their pods, events and logs.

    Every call raises kubernetes.client.ApiException where it is refused, urllib3.exceptions.HTTPError where there is no
    answer.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._api = api
        self._custom = client.CustomObjectsApi(api)

    def job(self, name: str) -> Json | None:
        """Return a job, or None where there is none."""
        try:
            return self._get(f"{_JOBS}/{{name}}", name=name)
        except client.ApiException as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def jobs(self, labels: Mapping[str, str]) -> list[Json]:
        """Return our jobs that have these labels."""
        return self._list(_JOBS, labelSelector=names.selector(labels))

    def create(self, manifest: Json) -> None:
        """Submit a job; a field that the cluster does not know is an error."""
        self._custom.create_namespaced_custom_object(
            names.GROUP, names.VERSION, self.namespace, names.PLURAL, manifest, field_validation="Strict"
        )

    def delete(self, name: str) -> bool:
        """Delete a job, which goes away after its pods; return whether it was there."""
        return delete(self._custom, self.namespace, name, pods_first=True)

    def change(self, job: Json, metadata: Json) -> None:
        """Merge something into a job's metadata, unless another job has taken its name."""
        changes = {"metadata": {"uid": job["metadata"]["uid"], **metadata}}
        self._custom.patch_namespaced_custom_object(
            names.GROUP, names.VERSION, self.namespace, names.PLURAL, job["metadata"]["name"], changes
        )

    def pod(self, name: str) -> Json | None:
        """Return a pod, or None where there is none; by a list, which is all that the role of a step allows."""
        found = self._list("/api/v1/namespaces/{namespace}/pods", fieldSelector=f"metadata.name={name}")
        return found[0] if found else None

    def pods(self, job_name: str) -> list[Json]:
        """Return the pods of a job."""
        return self._list(
            "/api/v1/namespaces/{namespace}/pods", labelSelector=f"jobset.sigs.k8s.io/jobset-name={job_name}"
        )

    def events(self, about: Json) -> list[Json]:
        """Return what was reported of an object, the oldest first."""
        uid = about["metadata"]["uid"]
        found = self._list("/api/v1/namespaces/{namespace}/events", fieldSelector=f"involvedObject.uid={uid}")
        return sorted(found, key=lambda each: each.get("lastTimestamp") or "")

    def log(self, pod: str, container: str, *, follow: bool, since: str | None = None, tail: int | None = None) -> Any:
        """Return the response whose body is a log, each line with its time; with `follow` it goes on with new ones."""
        asked = {"container": container, "follow": str(follow).lower(), "timestamps": "true"}
        asked |= {"sinceTime": since} if since else {}
        asked |= {"tailLines": str(tail)} if tail else {}
        path = "/api/v1/namespaces/{namespace}/pods/{name}/log"
        return self._call(path, {"name": pod}, asked, _FOLLOW_S if follow else None)

    def _list(self, path: str, **query: str) -> list[Json]:
        found: list[Json] = self._get(path, query)["items"]
        return found

    def _get(self, path: str, query: Mapping[str, str] | None = None, **parameters: str) -> Json:
        found: Json = json.loads(self._call(path, parameters, query or {}, None).data)
        return found

    def _call(
        self, path: str, parameters: Mapping[str, str], query: Mapping[str, str], timeout: tuple[float, float] | None
    ) -> Any:
        return self._api.call_api(
            path,
            "GET",
            {"namespace": self.namespace, **parameters},
            list(query.items()),
            {"Accept": "application/json, */*"},
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=timeout,
        )
