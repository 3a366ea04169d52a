"""The roles: enough for every call that is made, and no more."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kubernetes import client, config

from components.cluster import kube, reaper
from components.cluster.config import ClusterConfig
from components.cluster.reaper import delete_run
from components.preflight import cluster
from components.preflight.cluster import LAUNCH
from components.shared.errors import PipelineError
from tests.cluster.launched import RESULT, launched
from tests.fake_cluster import ApiServer, kinds, script
from tests.k8s.rendered import NAMESPACES, OVERLAYS, Json, one, overlay

Grant = tuple[str, str, str, str]
"""Verb, API group, resource, and the one name that it holds for, or nothing for all."""

LAUNCHER: set[Grant] = {
    *((each.verb, each.group, each.resource, "") for each in LAUNCH),
    ("get", "trainer.kubeflow.org", "trainingruntimes", "grpo-torch"),
    ("get", "trainer.kubeflow.org", "trainingruntimes", "grpo-torch-vllm"),
    ("get", "", "persistentvolumeclaims", "grpo-pipeline"),
}
QUEUE: set[Grant] = {("get", "kueue.x-k8s.io", "localqueues", "grpo-pipeline")}
REAPER: set[Grant] = {(verb, "trainer.kubeflow.org", "trainjobs", "") for verb in ("delete", "list")}


def grants(role: Json) -> set[Grant]:
    """What a role permits, one by one."""
    return {
        (verb, group, resource, name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_roles_grant_what_is_needed_and_nothing_else(name: str) -> None:
    """The launcher's is what preflight asks for before a run, and what preflight itself looks at."""
    documents = overlay(name)
    launcher = LAUNCHER | (QUEUE if name.endswith("kueue") else set())
    assert grants(one(documents, "Role", "grpo-pipeline-launcher")) == launcher
    assert grants(one(documents, "Role", "grpo-pipeline-reaper")) == REAPER


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_is_granted_outside_the_namespace(name: str) -> None:
    """No cluster role is made or bound, and no role but the two."""
    documents = overlay(name)
    of_roles = {(d["kind"], d["metadata"]["name"]) for d in documents if "Role" in d["kind"]}
    assert of_roles == {
        (kind, f"grpo-pipeline-{who}") for kind in ("Role", "RoleBinding") for who in ("launcher", "reaper")
    }
    for document in documents:
        if document["kind"] == "RoleBinding":
            assert document["roleRef"]["kind"] == "Role"
            assert document["roleRef"]["name"] == document["metadata"]["name"]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster on which the overlay with a queue was applied."""
    with ApiServer(namespace=NAMESPACES["standalone-kueue"]) as server:
        server.cluster.add_runtime()
        yield server


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> client.ApiClient:
    """The real client."""
    return config.new_client_from_config(str(server.kubeconfig(tmp_path / "config")))


def test_the_reaper_can_do_its_work_with_its_role(server: ApiServer, api: client.ApiClient) -> None:
    """It lists and deletes jobs; whatever else it may not."""
    _make_job(api, server.namespace, heartbeat="2020-01-01T00:00:00+00:00")
    server.access.rules = one(overlay("standalone-kueue"), "Role", "grpo-pipeline-reaper")["rules"]
    assert reaper.reap(api, server.namespace, datetime.now(UTC)) == ["grpo-1"]
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    with pytest.raises(client.ApiException, match="403"):
        client.CoreV1Api(api).list_namespaced_pod(server.namespace)


def test_steps_can_look_at_what_preflight_checks_and_remove_jobs(server: ApiServer, api: client.ApiClient) -> None:
    """None of the checks is refused by the role, and what a run has left can be removed."""
    _make_job(api, server.namespace)
    server.access.rules = one(overlay("standalone-kueue"), "Role", "grpo-pipeline-launcher")["rules"]
    defaults = ClusterConfig(image="any")
    asked = len(server.requests)
    assert cluster.runtime(api, server.namespace, "grpo-torch") == []
    cluster.volume(api, server.namespace, defaults.volume)
    cluster.local_queue(api, server.namespace, "grpo-pipeline")
    assert delete_run(api, server.namespace, "run-1") == ["grpo-1"]
    assert {request.status for request in server.requests[asked:]} <= {200, 404}


def test_steps_cannot_read_secrets(server: ApiServer, api: client.ApiClient) -> None:
    """Secrets come to a step as environment variables, by name; the API server gives it none."""
    server.access.rules = one(overlay("standalone-kueue"), "Role", "grpo-pipeline-launcher")["rules"]
    with pytest.raises(client.ApiException, match="403"):
        client.CoreV1Api(api).read_namespaced_secret("grpo-pipeline-hub", server.namespace)


def test_launching_uses_every_right_of_a_launcher_and_no_other(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that queues, is preempted and ends well, one that fails, and what preflight asks for: the same set."""
    server.access.rules = one(overlay("standalone-kueue"), "Role", "grpo-pipeline-launcher")["rules"]
    used: set[Grant] = set()
    allow = server.access.authorize

    def noted(verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        allow(verb, group, resource, namespace, name)
        used.add((verb, group, resource, ""))

    monkeypatch.setattr(server.access, "authorize", noted)
    good = launched(server, tmp_path / "good", monkeypatch, namespace=server.namespace, queue="grpo-pipeline")
    server.cluster.play(script.Queued(30), script.Running(60), script.Preempted(60), *good.success())
    assert good.run() == RESULT
    bad = launched(server, tmp_path / "bad", monkeypatch, namespace=server.namespace)
    server.cluster.play(script.Running(10, ("step 1",)), script.OUT_OF_MEMORY)
    with pytest.raises(PipelineError, match="OOMKilled"):
        bad.run()
    assert {grant for grant in used if "selfsubject" not in grant[2]} == {
        (each.verb, each.group, each.resource, "") for each in LAUNCH
    }


def _make_job(api: client.ApiClient, namespace: str, heartbeat: str | None = None) -> None:
    annotations = {kube.HEARTBEAT: heartbeat, kube.STALE_AFTER_S: "60"} if heartbeat else {}
    labels = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: "run-1"}
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        kube.GROUP,
        kube.VERSION,
        namespace,
        kube.PLURAL,
        {
            "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
            "kind": "TrainJob",
            "metadata": {"name": "grpo-1", "labels": labels, "annotations": annotations},
            "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "grpo-torch"}},
        },
        field_validation="Strict",
    )
