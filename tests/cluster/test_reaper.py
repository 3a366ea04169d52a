"""What removes jobs that nobody waits for."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from components.cluster import kube
from components.cluster.kube import connect, own_namespace
from components.cluster.reaper import delete_run, reap
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.cluster.launched import RUN_ID
from tests.fake_cluster import ApiServer, Fault, kinds, script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with jobs that run for ever."""
    with ApiServer() as server:
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        server.cluster.add_runtime("grpo-torch")
        server.cluster.play(script.Running(None))
        yield server


def _add(server: ApiServer, name: str, *, labels: dict[str, str] | None = None, **annotations: str) -> None:
    ours = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: RUN_ID, kube.STAGE: "train-grpo"}
    reference = {"apiGroup": kube.GROUP, "kind": "TrainingRuntime", "name": "grpo-torch"}
    job: dict[str, Any] = {
        "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "labels": ours if labels is None else labels,
            "annotations": {f"grpo-pipeline/{key.replace('_', '-')}": value for key, value in annotations.items()},
        },
        "spec": {"runtimeRef": reference, "suspend": False, "managedBy": "trainer.kubeflow.org/trainjob-controller"},
    }
    server.cluster.add(job)


def _left(server: ApiServer) -> set[str]:
    return {job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)}


def _ago(server: ApiServer, seconds: float) -> str:
    return (server.clock.now() - timedelta(seconds=seconds)).isoformat()


def test_only_our_stale_jobs_are_reaped(server: ApiServer) -> None:
    """By what each job says of itself: no heartbeat, no age that can be read, other people's: left alone."""
    foreign = {"app.kubernetes.io/managed-by": "somebody"}
    _add(server, "stale", heartbeat=_ago(server, 601), stale_after_s="600")
    _add(server, "alive", heartbeat=_ago(server, 599), stale_after_s="600")
    _add(server, "patient", heartbeat=_ago(server, 5000), stale_after_s="6000")
    _add(server, "kept")
    _add(server, "odd", heartbeat="yesterday", stale_after_s="600")
    _add(server, "naive", heartbeat="2025-01-01T00:00:00", stale_after_s="600")
    _add(server, "foreign", labels=foreign, heartbeat=_ago(server, 9000), stale_after_s="600")
    _add(server, "no-run", labels={kube.MANAGED_BY: kube.PROJECT}, heartbeat=_ago(server, 9000), stale_after_s="600")
    assert reap(connect(), own_namespace(), server.clock.now()) == ["stale"]
    assert _left(server) == {"alive", "patient", "kept", "odd", "naive", "foreign", "no-run"}


def test_a_heart_that_beats_again_meanwhile_saves_the_job(server: ApiServer) -> None:
    """What was looked at is what is deleted, or nothing."""
    _add(server, "revived", heartbeat=_ago(server, 601), stale_after_s="600")
    server.faults.add(Fault("DELETE", status=409))
    assert reap(connect(), own_namespace(), server.clock.now()) == []
    deletion = next(request for request in server.requests if request.method == "DELETE").object()
    (job,) = server.cluster.all(kinds.TRAIN_JOBS)
    assert deletion["preconditions"] == {
        "uid": job["metadata"]["uid"],
        "resourceVersion": job["metadata"]["resourceVersion"],
    }


def test_a_run_is_cleaned_up_by_its_label(server: ApiServer) -> None:
    """Whatever state its jobs are in; those of other runs stay."""
    other = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: "another", kube.STAGE: "train-grpo"}
    _add(server, "sft")
    _add(server, "grpo", heartbeat=_ago(server, 1), stale_after_s="600")
    _add(server, "other", labels=other)
    assert delete_run(connect(), own_namespace(), RUN_ID) == ["grpo", "sft"]
    assert delete_run(connect(), own_namespace(), RUN_ID) == []
    assert _left(server) == {"other"}


@pytest.mark.slow
def test_the_reaper_as_a_program(server: ApiServer) -> None:
    """As the cluster runs it: it says what it removed; where it cannot look it says so and is to be run again."""
    _add(server, "stale", heartbeat="2020-01-01T00:00:00+00:00", stale_after_s="600")
    command = [sys.executable, "-m", "components.cluster.reaper"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "reaper: removed stale\n"
    assert _left(server) == set()
    server.faults.add(Fault(status=503))
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 75
    assert failed.stderr.count("\n") == 1
