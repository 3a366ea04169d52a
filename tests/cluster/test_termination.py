"""A step that is asked to stop, or killed, while its job runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from components.cluster import kube
from components.cluster.kube import connect
from components.cluster.reaper import reap
from components.cluster.termination import Termination
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.cluster.launched import MakeJob
from tests.cluster.processes import ROOT, wait_until
from tests.fake_cluster import ApiServer, Fault, RealClock, kinds, script


@pytest.fixture
def job(server: ApiServer, make_job: MakeJob) -> str:
    """The name of a job that runs, submitted by a step in the pod `launcher`."""
    server.cluster.play(script.Running(None))
    server.cluster.add_pod("launcher", server.cluster.add_workflow("run-1"))
    job = make_job()
    job.submit_and_die()
    name: str = job.trainjobs()[0]["metadata"]["name"]
    return name


def _stop(server: ApiServer, name: str, work: Path, number: int = signal.SIGTERM) -> None:
    """Be asked to stop while the job runs."""
    pod = (server.namespace, "launcher")
    with (
        pytest.raises(SystemExit) as ended,
        Termination("train_grpo", server.namespace, name, pod=pod, work=work).handled(),
    ):
        signal.raise_signal(number)
    assert ended.value.code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_step_deletes_its_job(
    server: ApiServer, job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """And prints that, with the checkpoint from which the next run goes on."""
    for step in (100, 200):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    capfd.readouterr()
    _stop(server, job, tmp_path, number)
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"train_grpo: stopped by {number.name}: the training job {job} is removed"
    assert second.startswith("train_grpo: the next run resumes from the checkpoint of step 200")


def test_failed_deletion_is_reported(
    server: ApiServer, job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After three attempts, with who removes the job now."""
    server.faults.add(Fault("DELETE", status=503, times=10))
    _stop(server, job, tmp_path)
    printed = capfd.readouterr().out
    assert f"the training job {job} could not be removed; clean_up or the reaper will remove it" in printed
    assert "there is no checkpoint yet" in printed
    assert [request.method for request in server.requests].count("DELETE") == 3


def test_job_outlives_a_drained_node(
    server: ApiServer, job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A deleted pod takes its step with it; the next attempt of the step adopts the job."""
    server.cluster.drain("launcher")
    _stop(server, job, tmp_path)
    assert [each["metadata"]["name"] for each in server.cluster.all(kinds.TRAIN_JOBS)] == [job]
    assert f"this pod is being deleted: the training job {job} goes on" in capfd.readouterr().out


@pytest.mark.parametrize("fault", [Fault("GET", "/pods", status=403), Fault("GET", "/pods", drop="before")])
def test_job_is_deleted_where_the_pod_cannot_be_read(server: ApiServer, job: str, tmp_path: Path, fault: Fault) -> None:
    """GPUs that nobody uses cost more than a restart from a checkpoint."""
    server.cluster.drain("launcher")
    server.faults.add(fault)
    _stop(server, job, tmp_path)
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


PROGRAM = """
import sys
from pathlib import Path
from components.cluster import termination
from components.cluster.config import ClusterConfig, ClusterStage, on_cluster
from components.cluster.launch import run_ranks
from components.shared.stage import exit_on_error
from tests.cluster.ranks import JobConfig, act
root = Path(sys.argv[1])
termination._CONTAINER_LOG = str(root / "container.log")
config = ClusterConfig(image="gpu:1", mount=str(root), delete="never")
stage = ClusterStage(config, "0f1e2d3c", "train_grpo", root / "records")
job = JobConfig(ending="go_on", rank=0, seconds=0)
with exit_on_error("train_grpo"), on_cluster(stage):
    run_ranks(act, job, {"folder": root}, num_processes=1, work=root / "work", grace_s=1)
"""


@pytest.fixture
def real_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
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


def _wait_until_running(server: ApiServer) -> None:
    """Wait until the step follows the log of its job."""
    wait_until(lambda: any("/log" in request.path for request in server.requests))


@pytest.mark.slow
def test_deletion_is_the_first_request_and_is_repeated(real_time: ApiServer, tmp_path: Path) -> None:
    """Kubeflow leaves a second; a deletion that fails is repeated at once."""
    with _step(tmp_path) as process:
        _wait_until_running(real_time)
        real_time.faults.add(Fault("DELETE", status=503), Fault("DELETE", drop="before"))
        before = len(real_time.requests)
        process.terminate()
        assert process.wait(60) == 143
    first = real_time.requests[before]
    assert (first.method, first.object()["propagationPolicy"]) == ("DELETE", "Background")
    assert [request.method for request in real_time.requests].count("DELETE") == 3
    assert real_time.cluster.all(kinds.TRAIN_JOBS) == []


@pytest.mark.slow
def test_job_that_is_being_created_is_deleted_too(real_time: ApiServer, tmp_path: Path) -> None:
    """Also where the cluster creates it after its first deletion."""
    real_time.faults.add(Fault("POST", delay_s=0.2))
    with _step(tmp_path) as process:
        wait_until(lambda: any(request.method == "POST" for request in real_time.requests))
        process.terminate()
        assert process.wait(60) == 143
    (creation,) = [request for request in real_time.requests if request.method == "POST"]
    wait_until(lambda: creation.status)
    assert real_time.cluster.all(kinds.TRAIN_JOBS) == []


@pytest.mark.slow
def test_last_lines_are_in_the_log_of_the_container(real_time: ApiServer, tmp_path: Path) -> None:
    """Kubeflow's launcher, which reads what a step prints, ends by the same signal."""
    (tmp_path / "container.log").write_text("before\n")
    with _step(tmp_path) as process:
        _wait_until_running(real_time)
        assert process.stdout is not None
        process.stdout.close()
        process.terminate()
        assert process.wait(60) == 143
    before, first, second = (tmp_path / "container.log").read_text().splitlines()
    assert before == "before"
    assert "stopped by SIGTERM" in first
    assert "checkpoint" in second


@pytest.mark.slow
def test_job_of_a_killed_step_is_reaped(real_time: ApiServer, tmp_path: Path) -> None:
    """Once its heartbeat is stale; it has a deadline, too."""
    with _step(tmp_path) as process:
        _wait_until_running(real_time)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    (job,) = real_time.cluster.all(kinds.TRAIN_JOBS)
    stale_after_s = float(job["metadata"]["annotations"][kube.STALE_AFTER_S])
    beat = datetime.fromisoformat(job["metadata"]["annotations"][kube.HEARTBEAT])
    assert reap(connect(), "team", beat + timedelta(seconds=stale_after_s - 1)) == []
    assert reap(connect(), "team", beat + timedelta(seconds=stale_after_s + 1)) == [job["metadata"]["name"]]
    assert job["spec"]["activeDeadlineSeconds"] > 0
