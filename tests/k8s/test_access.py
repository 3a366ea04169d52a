"""The roles permit every call that is made, and no other."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kubernetes import client, config

from components.cluster import kube, reaper
from components.cluster.config import ClusterConfig
from components.preflight import capacity, cluster
from components.preflight.cluster import LAUNCH, QUEUE
from components.shared.errors import PipelineError
from tests.cluster.launched import RESULT, add_train_job, launched
from tests.fake_cluster import ApiServer, script
from tests.k8s.rendered import NAMESPACES, OVERLAYS, Json, one, overlay

Grant = tuple[str, str, str, str]
"""Verb, API group, resource, and the one name that it holds for, or "" for all."""

LAUNCHER: set[Grant] = {
    *((verb, group, resource, "") for verb, resource, group in (*LAUNCH, *QUEUE)),
    ("get", "trainer.kubeflow.org", "trainingruntimes", "grpo-torch"),
    ("get", "trainer.kubeflow.org", "trainingruntimes", "grpo-torch-vllm"),
    ("get", "", "persistentvolumeclaims", "grpo-pipeline"),
}
CAPACITY: set[Grant] = {("list", "", "nodes", "")}
LOCAL_QUEUE: set[Grant] = {(verb, "kueue.x-k8s.io", "localqueues", "") for verb in ("get", "list")}
COLLECTOR: set[Grant] = {("list", "trainer.kubeflow.org", "trainjobs", ""), ("list", "argoproj.io", "workflows", "")}
REAPER: set[Grant] = {*COLLECTOR, ("delete", "trainer.kubeflow.org", "trainjobs", "")}


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
def test_roles_permit_what_is_needed(name: str) -> None:
    """In the namespace alone, but for looking at nodes and queues where one installation is all of Kubeflow."""
    documents = overlay(name)
    launcher = LAUNCHER | (LOCAL_QUEUE if name.endswith("kueue") else set())
    assert grants(one(documents, "Role", "grpo-pipeline-launcher")) == launcher
    assert grants(one(documents, "Role", "grpo-pipeline-reaper")) == REAPER
    assert grants(one(documents, "Role", "grpo-pipeline-collector")) == COLLECTOR
    roles = {(each["kind"], each["metadata"]["name"]) for each in documents if "Role" in each["kind"]}
    subjects = ("grpo-pipeline-collector", "grpo-pipeline-launcher", "grpo-pipeline-reaper")
    expected = {(kind, subject) for kind in ("Role", "RoleBinding") for subject in subjects}
    if name.startswith("standalone"):
        assert grants(one(documents, "ClusterRole", "grpo-pipeline-capacity")) == CAPACITY
        expected |= {(kind, "grpo-pipeline-capacity") for kind in ("ClusterRole", "ClusterRoleBinding")}
        binding = one(documents, "ClusterRoleBinding", "grpo-pipeline-capacity")
        assert binding["roleRef"]["name"] == "grpo-pipeline-capacity"
        assert binding["subjects"] == one(documents, "RoleBinding", "grpo-pipeline-launcher")["subjects"]
    assert roles == expected
    for subject in subjects:
        reference = one(documents, "RoleBinding", subject)["roleRef"]
        assert (reference["kind"], reference["name"]) == ("Role", subject)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster on which the overlay with a queue was applied, with a stale job of a run."""
    with ApiServer(namespace=NAMESPACES["standalone-kueue"]) as server:
        server.cluster.add_runtime()
        _add_stale_job(server)
        yield server


def _add_stale_job(server: ApiServer) -> None:
    annotations = {kube.HEARTBEAT: "2020-01-01T00:00:00+00:00"}
    add_train_job(server, "grpo-1", {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: "run-1"}, annotations)


def _take_role(server: ApiServer, name: str) -> None:
    server.access.rules = one(overlay("standalone-kueue"), "Role", f"grpo-pipeline-{name}")["rules"]


def test_reaper_preflight_and_stop_work_with_their_roles(server: ApiServer, tmp_path: Path) -> None:
    """Neither may read anything else, not even secrets, which steps get as environment variables."""
    api = config.new_client_from_config(str(server.kubeconfig(tmp_path / "config")))
    core, before = client.CoreV1Api(api), len(server.requests)
    _take_role(server, "launcher")
    assert list(cluster.runtime(api, server.namespace, "grpo-torch", 600)) == []
    assert len(list(cluster.runtime(api, server.namespace, "grpo-torch-vllm", 600))) == 1
    list(cluster.volume(api, server.namespace, ClusterConfig().volume))
    list(cluster.local_queue(api, server.namespace, "grpo-pipeline"))
    role = one(overlay("standalone-kueue"), "ClusterRole", "grpo-pipeline-capacity")
    server.access.cluster_rules = role["rules"]
    list(capacity.too_large_for_nodes(api, ClusterConfig(), 0))
    assert reaper.delete_run(api, server.namespace, "run-1") == ["grpo-1"]
    assert {request.status for request in server.requests[before:]} <= {200, 404}
    with pytest.raises(client.ApiException, match="403"):
        core.read_namespaced_secret("grpo-pipeline-hub", server.namespace)
    _add_stale_job(server)
    _take_role(server, "reaper")
    assert reaper.reap(api, server.namespace, datetime.now(UTC), server.clock.sleep) == ["grpo-1"]
    with pytest.raises(client.ApiException, match="403"):
        core.list_namespaced_pod(server.namespace)


def test_launching_uses_every_permission_that_preflight_asks_for(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other: with a job that is queued, preempted and successful, and one that fails."""
    _take_role(server, "launcher")
    used: set[Grant] = set()
    authorize = server.access.authorize

    def record(verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        authorize(verb, group, resource, namespace, name)
        used.add((verb, group, resource, ""))

    monkeypatch.setattr(server.access, "authorize", record)
    good = launched(server, tmp_path / "good", monkeypatch, namespace=server.namespace, queue="grpo-pipeline")
    good.play(script.Queued(30), script.Running(60), script.Preempted(60), *good.success())
    assert good.run() == RESULT
    bad = launched(server, tmp_path / "bad", monkeypatch, namespace=server.namespace)
    bad.play(script.Running(10, ("step 1",)), script.OUT_OF_MEMORY)
    with pytest.raises(PipelineError, match="OOMKilled"):
        bad.run()
    wanted = {(verb, group, resource, "") for verb, resource, group in (*LAUNCH, *QUEUE)}
    assert {grant for grant in used if "selfsubject" not in grant[2]} == wanted
