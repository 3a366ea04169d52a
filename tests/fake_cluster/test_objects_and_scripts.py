"""The server as a test uses it."""

import threading
import time
from pathlib import Path

from kubernetes import client, config, watch

from tests.cluster.jobs import WHERE, create, delete, queued_job
from tests.fake_cluster import ApiServer, Clock, Fault, kinds, script


def test_a_script_is_played_to_the_real_client(server: ApiServer, api: client.ApiClient) -> None:
    """Hours of a job take no time, a fault befalls the client on the way, and all requests are written down."""
    server.cluster.play(script.Queued(3600), script.Running(7200, ("step 1", "step 2")), script.OUT_OF_MEMORY)
    server.faults.add(Fault("GET", "/trainjobs", status=429, retry_after_s=1))
    create(api, queued_job(), field_validation="Strict")
    server.clock.sleep(3 * 3600 + 60)
    custom = client.CustomObjectsApi(api)
    (job,) = custom.list_namespaced_custom_object(*WHERE)["items"]
    assert job["status"]["conditions"][-1]["type"] == "Failed"
    delete(api, propagation_policy="Background")
    assert [(each.method, each.status) for each in server.requests] == [
        ("POST", 201),
        ("GET", 429),
        ("GET", 200),
        ("DELETE", 200),
    ]
    assert server.requests[-1].time == 3 * 3600 + 60
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


def test_a_watch_moves_time_where_the_clock_is_told_so(tmp_path: Path) -> None:
    """Code that never sleeps sees a job to its end, by watching alone."""
    with ApiServer(clock=Clock(idle_s=0.02)) as server:
        server.cluster.add_runtime()
        api = config.new_client_from_config(str(server.kubeconfig(tmp_path / "kubeconfig")))
        create(api)
        custom = client.CustomObjectsApi(api)
        for event in watch.Watch().stream(custom.list_namespaced_custom_object, *WHERE, timeout_seconds=3600):
            conditions = event["object"].get("status", {}).get("conditions", [])
            if any(each["type"] == "Complete" for each in conditions):
                break
        assert 10 < server.clock.monotonic() < 60


def test_nothing_of_a_server_is_left(tmp_path: Path) -> None:
    """Clients keep their connections open; the threads behind them end with the server all the same."""
    before = threading.active_count()
    clients = []
    for _ in range(5):
        with ApiServer() as server:
            clients.append(config.new_client_from_config(str(server.kubeconfig(tmp_path / "kubeconfig"))))
            client.CoreV1Api(clients[-1]).list_namespaced_pod("team")
    given_up = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < given_up:
        time.sleep(0.01)
    assert threading.active_count() <= before
