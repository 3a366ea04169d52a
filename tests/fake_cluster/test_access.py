"""Who may do what, and what goes wrong on the way."""

import contextlib
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from tests.cluster.jobs import NS, conditions, create, delete, get, refused, train_job
from tests.fake_cluster import AFTER, BEFORE, ApiServer, Clock, Fault, RealClock, kinds, script, self_signed

READ_JOBS = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["get", "list"]}


def may(api: client.ApiClient, verb: str, resource: str, *, group: str = "", subresource: str | None = None) -> bool:
    """What a SelfSubjectAccessReview answers."""
    asked = client.V1ResourceAttributes(
        group=group, resource=resource, subresource=subresource, verb=verb, namespace=NS
    )
    review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked))
    answer = client.AuthorizationV1Api(api).create_self_subject_access_review(review)
    return bool(answer.status.allowed)


def test_a_role_allows_what_it_says_and_no_more(server: ApiServer, api: client.ApiClient) -> None:
    """The refusal names user, verb, resource and namespace, and the review answers accordingly."""
    create(api)
    server.access.rules = [READ_JOBS]
    assert get(api)["metadata"]["name"] == "grpo-1"
    assert refused(create, api, train_job("two")).startswith("403 ")
    said = refused(delete, api)
    assert 'trainjobs.trainer.kubeflow.org "grpo-1" is forbidden' in said
    assert 'User "system:serviceaccount:team:pipeline-runner" cannot delete resource "trainjobs"' in said
    assert 'in API group "trainer.kubeflow.org" in the namespace "team"' in said
    assert may(api, "get", "trainjobs", group="trainer.kubeflow.org")
    assert not may(api, "delete", "trainjobs", group="trainer.kubeflow.org")
    assert not may(api, "watch", "trainjobs", group="trainer.kubeflow.org")


def test_subresources_and_names_are_allowed_apart(server: ApiServer, api: client.ApiClient) -> None:
    """Pods does not imply pods/log, and resourceNames holds for those names only."""
    server.cluster.add_pod("main")
    secrets = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["git"], "verbs": ["get"]}
    server.access.rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]}, secrets]
    core = client.CoreV1Api(api)
    core.list_namespaced_pod(NS)
    assert 'cannot get resource "pods/log"' in refused(core.read_namespaced_pod_log, "main", NS)
    assert not may(api, "get", "pods", subresource="log")
    assert refused(core.read_namespaced_secret, "git", NS).startswith("404 ")
    assert refused(core.read_namespaced_secret, "other", NS).startswith("403 ")


def test_what_has_no_namespace_needs_a_cluster_role(server: ApiServer, api: client.ApiClient) -> None:
    """A Role is not enough to read a definition."""
    rule = {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["get"]}
    read = client.ApiextensionsV1Api(api).read_custom_resource_definition
    server.access.rules = [rule]
    assert "at the cluster scope" in refused(read, kinds.TRAIN_JOBS.resource)
    server.access.cluster_rules = [rule]
    assert read(kinds.TRAIN_JOBS.resource).spec.names.kind == "TrainJob"


def test_a_token_that_was_rotated_is_refused(server: ApiServer, api: client.ApiClient, tmp_path: Path) -> None:
    """401 until the client presents the new one."""
    create(api)
    server.access.rotate()
    assert refused(get, api).startswith("401 ")
    renewed = config.new_client_from_config(str(server.kubeconfig(tmp_path / "renewed")))
    assert get(renewed)["metadata"]["name"] == "grpo-1"


def test_tls_is_spoken_with_a_certificate(tmp_path: Path) -> None:
    """The kubeconfig names the authority; whoever does not know it is not connected."""
    with ApiServer(certificate=self_signed(tmp_path)) as server:
        api = config.new_client_from_config(str(server.kubeconfig(tmp_path / "config")))
        assert client.CoreV1Api(api).list_namespaced_pod(NS).items == []
        api.configuration.ssl_ca_cert = None
        strangers = client.CoreV1Api(client.ApiClient(api.configuration))
        with pytest.raises(HTTPError):
            strangers.list_namespaced_pod(NS, _request_timeout=5)


def calls(server: ApiServer) -> list[tuple[str, int]]:
    """Method and status of all requests."""
    return [(request.method, request.status) for request in server.requests]


def test_a_fault_befalls_so_many_requests(server: ApiServer, api: client.ApiClient) -> None:
    """In order, after those that pass; then all is well again."""
    server.faults.add(Fault("GET", "/trainjobs/", status=503, skip=1, times=2))
    create(api)
    get(api)
    assert refused(get, api).startswith("503 ")
    assert refused(get, api).startswith("503 ")
    get(api)
    assert calls(server) == [("POST", 201), ("GET", 200), ("GET", 503), ("GET", 503), ("GET", 200)]


def test_throttling_says_when_to_come_again(server: ApiServer, api: client.ApiClient) -> None:
    """429 with Retry-After, which the client waits for by itself before it gives up."""
    server.faults.add(Fault("GET", status=429, retry_after_s=1))
    began = time.monotonic()
    client.CoreV1Api(api).list_namespaced_pod(NS)
    assert time.monotonic() - began > 0.9
    assert [request.status for request in server.requests] == [429, 200]


@pytest.mark.parametrize(("drop", "jobs"), [(BEFORE, 0), (AFTER, 1)])
def test_a_connection_is_dropped_before_or_after_the_effect(
    server: ApiServer, api: client.ApiClient, drop: str, jobs: int
) -> None:
    """The client cannot tell which."""
    server.faults.add(Fault("POST", drop=drop))
    with pytest.raises(HTTPError):
        create(api)
    assert len(server.cluster.all(kinds.TRAIN_JOBS)) == jobs


def test_an_error_may_have_had_its_effect(server: ApiServer, api: client.ApiClient) -> None:
    """A 500 after the object was made."""
    server.faults.add(Fault("POST", status=500, effect=True))
    assert refused(create, api).startswith("500 ")
    assert len(server.cluster.all(kinds.TRAIN_JOBS)) == 1


def test_an_answer_may_be_slow(server: ApiServer, api: client.ApiClient) -> None:
    """Slower than the client's patience, however often it asks again."""
    server.faults.add(Fault("GET", delay_s=1, times=10))
    with pytest.raises(HTTPError):
        client.CoreV1Api(api).list_namespaced_pod(NS, _request_timeout=(0.2, 0.2))


def test_random_faults_are_the_same_for_a_seed(tmp_path: Path) -> None:
    """So that a failing schedule can be run again."""

    def statuses(seed: int) -> list[int]:
        with ApiServer(seed=seed) as server:
            server.faults.add(Fault("GET", status=503, chance=0.3, times=100))
            core = client.CoreV1Api(config.new_client_from_config(str(server.kubeconfig(tmp_path / "config"))))
            for _ in range(30):
                with contextlib.suppress(client.ApiException):
                    core.list_namespaced_pod(NS)
            return [request.status for request in server.requests]

    assert statuses(1) == statuses(1)
    assert statuses(1) != statuses(2)
    assert {200, 503} == set(statuses(1))


def test_a_mistake_of_the_server_s_own_is_no_fault() -> None:
    """It is raised at the end, so that no test takes it for a dropped connection."""

    def broken(_: Any) -> Any:
        raise ZeroDivisionError

    def ask() -> None:
        with ApiServer() as server:
            server.kfp.answer = broken  # type: ignore[assignment,method-assign]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{server.url}/apis/v2beta1/healthz")

    with pytest.raises(ZeroDivisionError):
        ask()


def test_time_stands_still_until_it_is_told_to_go_on(server: ApiServer) -> None:
    """Actions happen at their moment, in order, however far the clock is moved."""
    clock, seen = server.clock, []
    for seconds in (30, 10, 20):
        clock.call_in(seconds, lambda: seen.append(clock.monotonic()))
    time.sleep(0.05)
    assert (clock.monotonic(), seen) == (0, [])
    clock.sleep(25)
    assert (clock.monotonic(), seen) == (25, [10, 20])
    clock.advance(3600)
    assert seen == [10, 20, 30]


def test_threads_that_sleep_beside_are_woken_on_the_way() -> None:
    """A heartbeat every 30 s beats as often as it would, though the driver sleeps for long at once."""
    clock = Clock()
    beats: list[float] = []

    def heart() -> None:
        while len(beats) < 10:
            clock.sleep(30)
            beats.append(clock.monotonic())

    thread = threading.Thread(target=heart)
    thread.start()
    time.sleep(0.05)
    clock.sleep(301)
    thread.join(5)
    assert beats == [30 * number for number in range(1, 11)]


def test_a_real_clock_runs_by_itself(tmp_path: Path) -> None:
    """For code in a process of its own: a minute takes a tenth of a second."""
    with ApiServer(clock=RealClock(speed=600)) as server:
        server.cluster.add_runtime("grpo-torch")
        server.cluster.play(script.Running(60), script.Complete())
        create(config.new_client_from_config(str(server.kubeconfig(tmp_path / "config"))))
        given_up = time.monotonic() + 10
        while "Complete" not in conditions(server) and time.monotonic() < given_up:
            time.sleep(0.01)
        assert conditions(server)["Complete"] == ("True", "AllJobsCompleted")
