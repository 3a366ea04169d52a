"""What a step does with its job when it is told to stop, and what its log says of it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.cluster.termination import Termination
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.cluster.jobs import train_job
from tests.fake_cluster import ApiServer, Fault, kinds, script

JOB = "grpo-1"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with a training job that runs, and the pod of the step that waits for it."""
    with ApiServer() as server:
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        server.cluster.add_runtime("grpo-torch")
        server.cluster.play(script.Running(None))
        server.cluster.add(train_job(JOB, suspend=False))
        server.cluster.add_pod("launcher", server.cluster.add_workflow("run-1"))
        yield server


def _stop(server: ApiServer, work: Path, number: int = signal.SIGTERM) -> None:
    """Be told to stop while the job runs."""
    stopped = Termination("train_grpo", server.namespace, JOB, pod=(server.namespace, "launcher"), work=work)
    with pytest.raises(SystemExit) as ended, stopped.handled():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_job_goes_and_the_log_says_so(
    server: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """That the step was stopped, that the job is removed, and which checkpoint there is to go on from."""
    for step in (100, 200):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    _stop(server, tmp_path, number)
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"train_grpo: stopped by {number.name}: the training job {JOB} is removed"
    assert second.startswith("train_grpo: the next run goes on from the checkpoint of step 200")


def test_a_job_that_could_not_be_removed_is_named(
    server: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody is left to believe that its GPUs are free."""
    server.faults.add(Fault("DELETE", status=503, times=10))
    _stop(server, tmp_path)
    said = capfd.readouterr().out
    assert f"the training job {JOB} could not be removed; clean_up or the reaper will remove it" in said
    assert "there is no checkpoint yet" in said


def test_the_job_of_a_drained_node_waits_for_the_next_attempt(
    server: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pod that is deleted takes the step with it, and not the job."""
    server.cluster.drain("launcher")
    _stop(server, tmp_path)
    assert [job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)] == [JOB]
    assert f"this pod is being deleted: the training job {JOB} goes on" in capfd.readouterr().out


@pytest.mark.parametrize("fault", [Fault("GET", "/pods", status=403), Fault("GET", "/pods", drop="before")])
def test_the_job_goes_where_the_pod_cannot_be_looked_at(server: ApiServer, tmp_path: Path, fault: Fault) -> None:
    """GPUs that nobody waits for cost more than a restart from a checkpoint."""
    server.cluster.drain("launcher")
    server.faults.add(fault)
    _stop(server, tmp_path)
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
