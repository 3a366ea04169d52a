"""A step that is asked to stop, or killed, while its job runs."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from components.cluster.termination import Termination
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.cluster.launched import Launched
from tests.cluster.processes import ROOT, wait_until
from tests.fake_cluster import ApiServer, Fault, RealClock, kinds, script
from tests.pipelines.cluster.recorded import RECORDINGS


@pytest.fixture
def name(job: Launched) -> str:
    """The name of a job that runs, submitted by a step in the pod `launcher`."""
    job.play(script.Running(None))
    job.cluster.add_pod("launcher", job.cluster.add_workflow("run-1"))
    job.submit_and_die()
    name: str = job.trainjobs()[0]["metadata"]["name"]
    return name


def _stop(job: Launched, name: str) -> None:
    """Be asked to stop while the job runs."""
    pod = (job.server.namespace, "launcher")
    termination = Termination("train_grpo", job.server.namespace, name, pod=pod, work=job.root)
    with pytest.raises(SystemExit) as ended, termination.handled():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_stopped_step_deletes_its_job(job: Launched, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And prints that, with the checkpoint from which the next run resumes."""
    for step in (100, 200):
        (job.root / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    capfd.readouterr()
    _stop(job, name)
    assert job.trainjobs() == []
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"train_grpo: stopped by SIGTERM: the training job {name} is removed"
    assert second.startswith("train_grpo: the next run resumes from the checkpoint of step 200")


def test_failed_deletion_is_reported(job: Launched, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """After three attempts, with who removes the job now."""
    job.server.faults.add(Fault("DELETE", status=503, times=10))
    _stop(job, name)
    printed = capfd.readouterr().out
    assert f"the training job {name} could not be removed; the reaper will remove it" in printed
    assert "there is no checkpoint yet" in printed
    assert [request.method for request in job.server.requests].count("DELETE") == 3


@pytest.mark.parametrize("how", ["drain", "announce_eviction"])
def test_job_outlives_a_drained_node(job: Launched, name: str, capfd: pytest.CaptureFixture[str], how: str) -> None:
    """A lost pod takes its step with it; the next attempt of the step adopts the job."""
    getattr(job.cluster, how)("launcher")
    _stop(job, name)
    assert [each["metadata"]["name"] for each in job.trainjobs()] == [name]
    assert f"this pod is being deleted: the training job {name} goes on" in capfd.readouterr().out


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings at {RECORDINGS}")
@pytest.mark.parametrize(("line", "goes_on"), [(22, False), (23, True), (24, True), (47, True)])
def test_job_outlives_the_recorded_evictions_of_launchers(job: Launched, name: str, line: int, goes_on: bool) -> None:
    """As their pods were when they ran, were about to be evicted, were being evicted, and were being deleted."""
    event = json.loads((RECORDINGS / "third-trial/evicted-pods.jsonl").read_text().splitlines()[line])
    pod = event["object"]
    pod["metadata"] |= {"name": "launcher", "namespace": job.server.namespace, "ownerReferences": []}
    job.cluster.remove(kinds.PODS, "launcher")
    job.cluster.add(pod)
    _stop(job, name)
    assert [each["metadata"]["name"] for each in job.trainjobs()] == ([name] if goes_on else [])


@pytest.mark.parametrize("fault", [Fault("GET", "/pods", status=403), Fault("GET", "/pods", drop="before")])
def test_job_is_deleted_where_the_pod_cannot_be_read(job: Launched, name: str, fault: Fault) -> None:
    """GPUs that nobody uses cost more than a restart from a checkpoint."""
    job.cluster.drain("launcher")
    job.server.faults.add(fault)
    _stop(job, name)
    assert job.trainjobs() == []


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
config = ClusterConfig(image="gpu:1", mount=str(root))
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
def _running_step(server: ApiServer, folder: Path, path: str = "/log") -> Iterator["subprocess.Popen[bytes]"]:
    """A step that has made a request of this path: /log once it follows the log of its job."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: any(path in f"{each.method} {each.path}" for each in server.requests))
            yield process
        finally:
            process.kill()


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    assert process.wait(60) == 143


@pytest.mark.slow
def test_deletion_is_the_first_request_and_is_repeated(real_time: ApiServer, tmp_path: Path) -> None:
    """Kubeflow leaves a second; a deletion that fails is repeated at once."""
    with _running_step(real_time, tmp_path) as process:
        real_time.faults.add(Fault("DELETE", status=503), Fault("DELETE", drop="before"))
        before = len(real_time.requests)
        _terminate(process)
    # One that was under way when the signal came may have arrived before it.
    first = next(request for request in real_time.requests[before : before + 2] if request.method == "DELETE")
    assert first.object()["propagationPolicy"] == "Background"
    assert [request.method for request in real_time.requests].count("DELETE") == 3
    assert real_time.cluster.all(kinds.TRAIN_JOBS) == []


@pytest.mark.slow
def test_job_that_is_being_created_is_deleted_too(real_time: ApiServer, tmp_path: Path) -> None:
    """Also where the cluster creates it after its first deletion."""
    real_time.faults.add(Fault("POST", delay_s=0.2))
    with _running_step(real_time, tmp_path, "POST ") as process:
        _terminate(process)
    (creation,) = [request for request in real_time.requests if request.method == "POST"]
    wait_until(lambda: creation.status)
    assert real_time.cluster.all(kinds.TRAIN_JOBS) == []


@pytest.mark.slow
def test_last_lines_are_in_the_log_of_the_container(real_time: ApiServer, tmp_path: Path) -> None:
    """Kubeflow's launcher, which reads what a step prints, ends by the same signal."""
    (tmp_path / "container.log").write_text("before\n")
    with _running_step(real_time, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        _terminate(process)
    before, first, second = (tmp_path / "container.log").read_text().splitlines()
    assert before == "before"
    assert "stopped by SIGTERM" in first
    assert "checkpoint" in second
