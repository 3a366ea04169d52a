from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch

from tests.cluster.api_server import ApiServer, Fault, kinds, script

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
NS = "team"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster with the runtime that the jobs name."""
    with ApiServer(namespace=NS) as server:
        server.cluster.add_runtime()
        yield server


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> client.ApiClient:
    """The real client, connected."""
    return config.new_client_from_config(str(server.kubeconfig(tmp_path / "config")))


def train_job(name: str = "grpo-1", **spec: Any) -> dict[str, Any]:
    """A TrainJob's manifest."""
    reference = {"kind": "TrainingRuntime", "name": "grpo-torch"}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": reference, **spec},
    }


def create(api: client.ApiClient, document: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Create a TrainJob through the real client."""
    custom = client.CustomObjectsApi(api)
    made: dict[str, Any] = custom.create_namespaced_custom_object(GROUP, VERSION, NS, PLURAL, document, **kwargs)
    return made


def conditions(server: ApiServer, name: str = "grpo-1") -> dict[str, str]:
    """A TrainJob's conditions by type."""
    job = server.cluster.get(kinds.TRAIN_JOBS, name)
    assert job is not None
    return {each["type"]: each["status"] for each in job.get("status", {}).get("conditions", [])}


def test_a_job_runs_and_completes(server: ApiServer, api: client.ApiClient) -> None:
    """A job without a script has a pod that prints, and completes."""
    create(api, train_job(), field_validation="Strict")
    server.clock.advance(5)
    core = client.CoreV1Api(api)
    (pod,) = core.list_namespaced_pod(NS).items
    assert pod.status.phase == "Running"
    assert core.read_namespaced_pod_log(pod.metadata.name, NS) == "step 1\n"
    server.clock.advance(20)
    assert conditions(server) == {"Complete": "True"}
    assert core.read_namespaced_pod_log(pod.metadata.name, NS) == "step 1\nstep 2\nstep 3\n"


def test_unknown_fields_are_refused_under_strict_validation(server: ApiServer, api: client.ApiClient) -> None:
    """A field of another version of the API is refused, and dropped without the request to be strict."""
    document = train_job(podTemplateOverrides=[])
    with pytest.raises(client.ApiException) as refused:
        create(api, document, field_validation="Strict")
    assert refused.value.status == 400
    assert 'unknown field \\"spec.podTemplateOverrides\\"' in refused.value.body
    create(api, document)
    job = server.cluster.get(kinds.TRAIN_JOBS, "grpo-1")
    assert job is not None
    assert "podTemplateOverrides" not in job["spec"]


def test_watch_tells_what_happens(server: ApiServer, api: client.ApiClient) -> None:
    """A watch tells each change of a job, up to its end."""
    server.clock.idle_s = 0.02
    server.cluster.play(script.Queued(30), script.Running(60), script.OUT_OF_MEMORY)
    labelled = train_job()
    labelled["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpu"}
    create(api, labelled)
    seen = []
    custom = client.CustomObjectsApi(api)
    for event in watch.Watch().stream(
        custom.list_namespaced_custom_object, GROUP, VERSION, NS, PLURAL, timeout_seconds=600
    ):
        found = event["object"].get("status", {}).get("conditions", [])
        seen.append([f"{each['type']}={each['status']}" for each in found])
        if "Failed=True" in seen[-1]:
            break
    assert ["Suspended=True"] in seen
    assert seen[-1] == ["Suspended=False", "Failed=True"]


def test_faults_come_in_their_order(server: ApiServer, api: client.ApiClient) -> None:
    """A fault befalls so many requests as it says, and is written down with them."""
    server.faults.add(Fault("GET", "/pods", status=503, skip=1))
    core = client.CoreV1Api(api)
    core.list_namespaced_pod(NS)
    with pytest.raises(client.ApiException):
        core.list_namespaced_pod(NS)
    core.list_namespaced_pod(NS)
    assert [request.status for request in server.requests] == [200, 503, 200]
