"""Watches and logs, as the real Kubernetes client reads them."""

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from kubernetes import client, watch
from urllib3.exceptions import HTTPError

from tests.cluster.jobs import NS, WHERE, create, delete, patch, pods, queued_job, refused, train_job
from tests.fake_cluster import ApiServer, Fault, kinds, script


def told(api: client.ApiClient, **options: Any) -> Iterator[tuple[str, str]]:
    """Type and name of each event of a watch over TrainJobs."""
    custom = client.CustomObjectsApi(api)
    for event in watch.Watch().stream(custom.list_namespaced_custom_object, *WHERE, **options):
        yield event["type"], event["object"]["metadata"].get("name", "")


def version(api: client.ApiClient) -> str:
    """The version of a list, from which a watch goes on."""
    found = client.CustomObjectsApi(api).list_namespaced_custom_object(*WHERE)["metadata"]["resourceVersion"]
    return str(found)


@contextlib.contextmanager
def passing(server: ApiServer, seconds: float = 0.3) -> Iterator[None]:
    """Time goes by while the body waits for the server."""
    stopped = threading.Event()

    def drive() -> None:
        while not stopped.wait(0.01):
            server.clock.advance(seconds)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def test_a_watch_without_a_version_begins_with_what_there_is(server: ApiServer, api: client.ApiClient) -> None:
    """Every object is told as added, then what changes; at its timeout the server ends it."""
    create(api, train_job("one", suspend=True))
    create(api, train_job("two", suspend=True))
    with passing(server):
        assert list(told(api, timeout_seconds=2)) == [("ADDED", "one"), ("ADDED", "two")]


def test_a_watch_from_a_list_tells_what_came_after(server: ApiServer, api: client.ApiClient) -> None:
    """Nothing before it, and nothing is left out between the list and the watch."""
    create(api, train_job("one", suspend=True))
    since = version(api)
    create(api, train_job("two", suspend=True))
    patch(api, {"metadata": {"labels": {"a": "b"}}}, "one")
    delete(api, "two")
    with passing(server):
        events = list(told(api, resource_version=since, timeout_seconds=2))
    assert [each for each in events if each != ("MODIFIED", "two")] == [
        ("ADDED", "two"),
        ("MODIFIED", "one"),
        ("DELETED", "two"),
    ]


def test_a_selector_turns_changes_into_comings_and_goings(server: ApiServer, api: client.ApiClient) -> None:
    """What comes to be selected is added, what no longer is is deleted."""
    create(api, train_job("one", suspend=True))
    since = version(api)
    patch(api, {"metadata": {"labels": {"run": "a"}}}, "one")
    patch(api, {"metadata": {"labels": {"run": "b"}}}, "one")
    with passing(server):
        events = list(told(api, resource_version=since, label_selector="run=a", timeout_seconds=2))
    assert events == [("ADDED", "one"), ("DELETED", "one")]


def test_a_watch_from_a_forgotten_version_is_gone(server: ApiServer, api: client.ApiClient) -> None:
    """The client gets 410 and has to list anew; an open watch ends the same way."""
    since = version(api)
    create(api, train_job(suspend=True))
    server.cluster.forget_history()
    with pytest.raises(client.ApiException) as gone:
        list(told(api, resource_version=since, timeout_seconds=5))
    assert gone.value.status == 410
    assert "too old resource version" in gone.value.reason


def test_bookmarks_tell_the_version_where_nothing_happens(server: ApiServer, api: client.ApiClient) -> None:
    """A client that asks for them can go on from there."""
    with passing(server, seconds=10):
        events = list(told(api, timeout_seconds=150, allow_watch_bookmarks=True))
    assert [type_ for type_, _ in events] == ["BOOKMARK", "BOOKMARK"]


def test_a_watch_may_be_closed_early_or_cut(server: ApiServer, api: client.ApiClient) -> None:
    """A stream that ends after some bytes breaks the connection under the client."""
    create(api, train_job(suspend=True))
    server.faults.add(Fault("GET", "watch=True", cut_after=40))
    with pytest.raises(HTTPError):
        list(told(api, timeout_seconds=5))


def test_a_watch_may_end_before_its_time(server: ApiServer, api: client.ApiClient) -> None:
    """In good order, and the client has to ask again."""
    create(api, train_job("one", suspend=True))
    server.faults.add(Fault("GET", "watch=True", ends_after=len(_first_event(server))))
    assert list(told(api, timeout_seconds=3600)) == [("ADDED", "one")]


def _first_event(server: ApiServer) -> bytes:
    job = server.cluster.get(kinds.TRAIN_JOBS, "one")
    return json.dumps({"type": "ADDED", "object": job}).encode() + b"\n"


def follow(api: client.ApiClient, name: str, **options: Any) -> list[str]:
    """The lines of a log that is followed."""
    return list(watch.Watch().stream(client.CoreV1Api(api).read_namespaced_pod_log, name, NS, **options))


def test_a_log_is_followed_to_the_container_s_end(server: ApiServer, api: client.ApiClient) -> None:
    """Each line comes once, and the stream ends with the container."""
    create(api)
    server.clock.advance(4)
    (pod,) = pods(api)
    with passing(server):
        assert follow(api, pod.metadata.name) == ["step 1", "step 2", "step 3"]


def test_a_log_is_read_from_a_moment_or_from_its_end(server: ApiServer, api: client.ApiClient) -> None:
    """tailLines, sinceSeconds, timestamps and limitBytes."""
    server.cluster.play(script.Running(30, ("a", "b", "c")), script.Running(None))
    create(api)
    server.clock.advance(60)
    (pod,) = pods(api)
    core = client.CoreV1Api(api)

    def log(**options: Any) -> str:
        return str(core.read_namespaced_pod_log(pod.metadata.name, NS, **options))

    assert log(tail_lines=2) == "b\nc\n"
    started = timedelta(seconds=2.5)
    assert log(since_seconds=60 - int(started.total_seconds()) - 15) == "c\n"
    assert log(limit_bytes=3) == "a\nb"
    assert log(timestamps=True).startswith("2026-01-01T00:00:02.500000000Z a\n")
    assert "422" in refused(log, since_seconds=0)


def test_a_log_that_is_not_there_yet_or_not_any_more(server: ApiServer, api: client.ApiClient) -> None:
    """A pod without a node, one whose image cannot be pulled, a container's earlier start, another name."""
    server.cluster.play(script.Unschedulable(60), script.PullBackOff(60), script.Running(None))
    create(api)
    server.clock.advance(1)
    (pod,) = pods(api)
    read, name = client.CoreV1Api(api).read_namespaced_pod_log, pod.metadata.name
    assert "does not have a host assigned" in refused(read, name, NS)
    server.clock.advance(61)
    assert "is waiting to start: trying and failing to pull image" in refused(read, name, NS)
    server.clock.advance(70)
    assert read(name, NS) == ""
    assert "previous terminated container" in refused(read, name, NS, previous=True)
    assert "container main is not valid for pod" in refused(read, name, NS, container="main")
    delete(api)
    server.clock.advance(5)
    assert "404" in refused(read, name, NS)


def test_a_log_stream_may_be_cut_in_mid_line(server: ApiServer, api: client.ApiClient) -> None:
    """The client has half a line and an error, and gets the whole when it asks again."""
    server.cluster.play(script.Running(2, ("first line", "second line")), script.Running(None))
    create(api)
    server.clock.advance(10)
    (pod,) = pods(api)
    server.faults.add(Fault("GET", "/log", cut_after=len("first line\nsec")))
    lines: list[str] = []
    stream = watch.Watch().stream(client.CoreV1Api(api).read_namespaced_pod_log, pod.metadata.name, NS)
    with pytest.raises(HTTPError):
        lines.extend(stream)
    log = client.CoreV1Api(api).read_namespaced_pod_log(pod.metadata.name, NS)
    assert log == "first line\nsecond line\n"


def test_a_preempted_job_s_log_ends_with_its_pod(server: ApiServer, api: client.ApiClient) -> None:
    """Who follows is let go when Kueue takes the pods away."""
    server.cluster.play(script.Queued(5), script.Running(20, ("one",)), script.Preempted(None))
    create(api, queued_job())
    server.clock.advance(10)
    (pod,) = pods(api)
    with passing(server):
        assert follow(api, pod.metadata.name) == ["one"]
