"""TrainJobs as the tests of the server write and ask for them, through the real client."""

from typing import Any

import pytest
from kubernetes import client

from tests.fake_cluster import ApiServer, kinds

NS = "team"
WHERE = ("trainer.kubeflow.org", "v1alpha1", NS, "trainjobs")
QUEUE = "kueue.x-k8s.io/queue-name"
Json = dict[str, Any]


def train_job(name: str = "grpo-1", *, metadata: Json | None = None, **spec: Any) -> Json:
    """A TrainJob's manifest."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, **(metadata or {})},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "grpo-torch"}, **spec},
    }


def queued_job(name: str = "grpo-1", **spec: Any) -> Json:
    """A TrainJob that Kueue admits."""
    return train_job(name, metadata={"labels": {QUEUE: "gpu"}}, **spec)


def create(api: client.ApiClient, document: Json | None = None, **options: Any) -> Json:
    """Create a TrainJob."""
    made: Json = client.CustomObjectsApi(api).create_namespaced_custom_object(
        *WHERE, document or train_job(), **options
    )
    return made


def get(api: client.ApiClient, name: str = "grpo-1") -> Json:
    """A TrainJob as it is now."""
    found: Json = client.CustomObjectsApi(api).get_namespaced_custom_object(*WHERE, name)
    return found


def patch(api: client.ApiClient, body: Any, name: str = "grpo-1", **options: Any) -> Json:
    """Change a TrainJob."""
    changed: Json = client.CustomObjectsApi(api).patch_namespaced_custom_object(*WHERE, name, body, **options)
    return changed


def patch_as(api: client.ApiClient, content_type: str, body: Any, name: str = "grpo-1") -> Json:
    """Change a TrainJob by another kind of patch than the client chooses for custom kinds."""
    group, version, namespace, plural = WHERE
    changed, _, _ = api.call_api(
        f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}",
        "PATCH",
        header_params={"Content-Type": content_type},
        body=body,
        response_type="object",
        auth_settings=["BearerToken"],
    )
    found: Json = changed
    return found


def delete(api: client.ApiClient, name: str = "grpo-1", **options: Any) -> Any:
    """Delete a TrainJob."""
    return client.CustomObjectsApi(api).delete_namespaced_custom_object(*WHERE, name, **options)


def pods(api: client.ApiClient, **options: Any) -> list[Any]:
    """The pods of the namespace."""
    return list(client.CoreV1Api(api).list_namespaced_pod(NS, **options).items)


def conditions(server: ApiServer, name: str = "grpo-1") -> dict[str, tuple[str, str]]:
    """Status and reason of each of a TrainJob's conditions."""
    job = server.cluster.get(kinds.TRAIN_JOBS, name)
    assert job is not None
    found = job.get("status", {}).get("conditions", [])
    return {each["type"]: (each["status"], each["reason"]) for each in found}


def refused(call: Any, *arguments: Any, **options: Any) -> str:
    """Code and words of the server's refusal."""
    with pytest.raises(client.ApiException) as error:
        call(*arguments, **options)
    return f"{error.value.status} {error.value.body}".replace('\\"', '"')
