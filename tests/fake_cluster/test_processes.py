"""Training jobs whose pods are processes of this machine."""

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes import client, config

from tests.cluster.jobs import NS, Json, conditions, create, delete, pods, train_job
from tests.fake_cluster import ApiServer, RealClock, script


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster in real time, whose pods really run."""
    with ApiServer(clock=RealClock(speed=20)) as server:
        server.cluster.add_runtime("grpo-torch", max_restarts=1)
        server.cluster.play(script.Executed())
        yield server


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> client.ApiClient:
    """The real client."""
    return config.new_client_from_config(str(server.kubeconfig(tmp_path / "kubeconfig")))


def job(code: str, *, nodes: int = 1, env: tuple[Json, ...] = ()) -> Json:
    """A TrainJob whose containers run some Python."""
    return train_job(trainer={"numNodes": nodes, "command": ["python", "-c", code], "env": list(env)})


def wait_until(happened: Callable[[], object]) -> None:
    """Wait, but not for ever."""
    given_up = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < given_up
        time.sleep(0.02)


def test_containers_run_with_their_environment(server: ApiServer, api: client.ApiClient) -> None:
    """Each node knows its rank and where they meet, secrets are there, and what it prints is the pod's log."""
    secret = {"token": base64.b64encode(b"s3cret").decode()}
    server.cluster.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "data": secret})
    names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "TOKEN")
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    create(api, job(f"import os; print(*(os.environ[name] for name in {names}))", nodes=2, env=(token,)))
    wait_until(lambda: conditions(server).get("Complete"))
    read = client.CoreV1Api(api).read_namespaced_pod_log
    assert [read(pod.metadata.name, NS) for pod in pods(api)] == ["0 2 127.0.0.1 s3cret\n", "1 2 127.0.0.1 s3cret\n"]


def test_a_failure_restarts_all_as_often_as_is_allowed(
    server: ApiServer, api: client.ApiClient, tmp_path: Path
) -> None:
    """Twice in all, and then the job has failed with the container's exit code."""
    starts = tmp_path / "starts"
    create(api, job(f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(7)"))
    wait_until(lambda: conditions(server).get("Failed"))
    assert starts.read_text() == "xx"
    (pod,) = pods(api)
    assert pod.status.container_statuses[0].state.terminated.exit_code == 7


def test_a_deleted_job_s_processes_are_told_to_end(server: ApiServer, api: client.ApiClient, tmp_path: Path) -> None:
    """SIGTERM first, as the kubelet does."""
    told, started = tmp_path / "told", tmp_path / "started"
    handler = f"lambda *_: (open({str(told)!r}, 'w').close(), exit(0))"
    code = f"import signal, time; signal.signal(15, {handler}); open({str(started)!r}, 'w').close(); time.sleep(60)"
    create(api, job(code))
    wait_until(started.exists)
    delete(api)
    wait_until(told.exists)
