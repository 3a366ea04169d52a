import json
import os
import signal
from pathlib import Path

import pytest

from components.cluster import termination
from components.cluster.termination import Termination
from tests.cluster.launched import Launched
from tests.fake_cluster import Fault, kinds, script
from tests.pipelines.cluster.recorded import RECORDINGS, needs_recordings


@pytest.fixture
def name(job: Launched) -> str:
    """The name of a job that runs, submitted by a step in the pod `launcher`."""
    job.play(script.Running(None))
    job.cluster.add_pod("launcher", job.cluster.add_workflow("run-1"))
    job.submit_and_die()
    name: str = job.trainjobs()[0]["metadata"]["name"]
    return name


def _stop(job: Launched, name: str, pod: str | None = "launcher") -> None:
    """Be asked to stop while the job runs."""
    own = (job.server.namespace, pod) if pod else None
    handler = Termination("train_grpo", job.server.namespace, name, pod=own, work=job.root)
    with pytest.raises(SystemExit) as ended, handler.handled():
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


@needs_recordings
@pytest.mark.parametrize(("line", "goes_on"), [(22, False), (23, True), (24, True), (47, True)])
def test_job_outlives_the_recorded_evictions_of_launchers(
    job: Launched, name: str, capfd: pytest.CaptureFixture[str], line: int, goes_on: bool
) -> None:
    """As their pods were when they ran, were about to be evicted, were being evicted, and were being deleted."""
    event = json.loads((RECORDINGS / "third-trial/evicted-pods.jsonl").read_text().splitlines()[line])
    pod = event["object"]
    pod["metadata"] |= {"name": "launcher", "namespace": job.server.namespace, "ownerReferences": []}
    job.cluster.remove(kinds.PODS, "launcher")
    job.cluster.add(pod)
    _stop(job, name)
    assert [each["metadata"]["name"] for each in job.trainjobs()] == ([name] if goes_on else [])
    assert (f"this pod is being deleted: the training job {name} goes on" in capfd.readouterr().out) == goes_on


@pytest.mark.parametrize("fault", [Fault("GET", "/pods", status=403), Fault("GET", "/pods", drop="before")])
def test_job_is_deleted_where_the_pod_cannot_be_read(job: Launched, name: str, fault: Fault) -> None:
    """GPUs that nobody uses cost more than a restart from a checkpoint."""
    job.cluster.drain("launcher")
    job.server.faults.add(fault)
    _stop(job, name)
    assert job.trainjobs() == []


def test_last_lines_are_in_the_log_of_the_container(
    job: Launched, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kubeflow's launcher, which reads what a step prints, ends by the same signal."""
    monkeypatch.setattr(termination, "_CONTAINER_LOG", str(tmp_path / "container.log"))
    (tmp_path / "container.log").write_text("before\n")
    read, write = os.pipe()
    os.close(read)
    saved = os.dup(1)
    os.dup2(write, 1)
    try:
        _stop(job, name, pod=None)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(write)
    deletion = next(request for request in job.server.requests if request.method == "DELETE")
    assert deletion.object()["propagationPolicy"] == "Background"
    start, first, second = (tmp_path / "container.log").read_text().splitlines()
    assert (start, "stopped by SIGTERM" in first, "checkpoint" in second) == ("before", True, True)
