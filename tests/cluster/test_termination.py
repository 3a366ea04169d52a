"""A step that is told to stop, or killed, while its job runs: a real process and its signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from components.cluster import kube
from components.cluster.kube import connect
from components.cluster.reaper import reap
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.fake_cluster import ApiServer, Fault, RealClock, kinds, script

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from components.cluster.config import ClusterConfig, ClusterStage, on_cluster
from components.cluster.launch import run_ranks
from components.cluster import termination
from tests.cluster.ranks import JobConfig, act
from components.cluster.config import ClusterConfig
from components.cluster.trainjob import termination
from components.shared.stage import exit_on_error
root = Path(sys.argv[1])
termination._CONTAINER_LOG = str(root / "container.log")
config = ClusterConfig(image="gpu:1", mount=str(root), delete="never")
cluster = ClusterStage(config, "0f1e2d3c", "train_grpo", root / "records")
job = JobConfig(ending="go_on", rank=0, seconds=0)
with exit_on_error("train_grpo"), on_cluster(cluster):
    run_ranks(act, job, {"folder": root}, num_processes=1, work=root / "work", grace_s=1)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster in real time, in which jobs run for ever."""
    with ApiServer(clock=RealClock(speed=20)) as server:
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        server.cluster.add_runtime("grpo-torch")
        server.cluster.play(script.Running(None, ("step 1",)))
        yield server


@contextmanager
def _step(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.005)
    return happened()


def _asked(server: ApiServer, method: str) -> bool:
    return any(request.method == method for request in server.requests)


def _runs(server: ApiServer) -> bool:
    """Whether the job's log is being followed: the step waits."""
    return any("/log" in request.path for request in server.requests)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_job_is_deleted_first(server: ApiServer, tmp_path: Path, number: int) -> None:
    """The first request after the signal deletes the job; then the step ends by that signal."""
    with _step(tmp_path) as process:
        assert _within(60, lambda: _runs(server))
        before = len(server.requests)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        first = server.requests[before]
    assert first.method == "DELETE"
    assert first.object()["propagationPolicy"] == "Background"
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


def test_a_deletion_that_fails_is_tried_again(server: ApiServer, tmp_path: Path) -> None:
    """At once: there is no time for more."""
    with _step(tmp_path) as process:
        assert _within(60, lambda: _runs(server))
        server.faults.add(Fault("DELETE", status=503), Fault("DELETE", drop="before"))
        process.terminate()
        assert process.wait(60) == 143
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    assert [request.method for request in server.requests].count("DELETE") == 3


def test_a_job_that_is_being_submitted_does_not_outlive_the_step(server: ApiServer, tmp_path: Path) -> None:
    """Where the cluster makes it after it was first told to delete it."""
    server.faults.add(Fault("POST", delay_s=0.2))
    with _step(tmp_path) as process:
        assert _within(60, lambda: _asked(server, "POST"))
        process.terminate()
        assert process.wait(60) == 143
    (made,) = [request for request in server.requests if request.method == "POST"]
    assert _within(60, lambda: bool(made.status))
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


def test_what_a_stopped_step_says_is_in_the_log_of_its_container(server: ApiServer, tmp_path: Path) -> None:
    """Kubeflow's launcher, which passes on what a step prints, ends by the same signal, at once."""
    (tmp_path / "container.log").write_text("before\n")
    with _step(tmp_path) as process:
        assert _within(60, lambda: _runs(server))
        assert process.stdout is not None
        process.stdout.close()
        process.terminate()
        assert process.wait(10) == 143
    before, first, second = (tmp_path / "container.log").read_text().splitlines()
    assert before == "before"
    assert "stopped by SIGTERM" in first
    assert "checkpoint" in second


def test_a_killed_step_leaves_a_job_for_the_reaper(server: ApiServer, tmp_path: Path) -> None:
    """It can do nothing itself; its job says how old its heartbeat may become, and has a deadline besides."""
    with _step(tmp_path) as process:
        assert _within(60, lambda: _runs(server))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(5)
    (job,) = server.cluster.all(kinds.TRAIN_JOBS)
    stale_after_s = float(job["metadata"]["annotations"][kube.STALE_AFTER_S])
    now = datetime.now(UTC)
    assert reap(connect(), "team", now + timedelta(seconds=stale_after_s - 120)) == []
    assert reap(connect(), "team", now + timedelta(seconds=stale_after_s + 1)) == [job["metadata"]["name"]]
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    assert job["spec"]["activeDeadlineSeconds"] > 0
