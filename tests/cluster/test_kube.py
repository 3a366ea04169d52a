"""Calls of the API server: which are repeated, and which jobs are removed."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from components.cluster import kube
from components.cluster.kube import RetryPolicy, TrainJobs, UnavailableError, connect, is_transient, own_namespace
from components.cluster.reaper import delete_run, reap
from components.shared.errors import PipelineError
from tests.cluster.launched import RUN_ID, clock_of
from tests.fake_cluster import ApiServer, Fault, kinds, script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("statuses", "transient"),
    [((401, 408, 409, 410, 429, 500, 502, 503, 504), True), ((400, 403, 404, 405, 422), False)],
)
def test_transient_statuses(statuses: tuple[int, ...], transient: bool) -> None:
    """A token that is being replaced, a lost race or a busy server; not a mistake or a missing permission."""
    assert [is_transient(_error(status, "no")) for status in statuses] == [transient] * len(statuses)


@pytest.mark.parametrize(
    "message",
    [
        'admission webhook "x.kueue.io" denied the request: Get "https://10.96.0.1:443": context deadline exceeded',
        'failed calling webhook "x": failed to call webhook: Post "https://trainer:443": connect: connection refused',
    ],
)
def test_unreachable_webhook_is_transient(message: str) -> None:
    """Whatever status it has."""
    assert is_transient(_error(403, message))
    assert is_transient(_error(400, message))


def _error(status: int, message: str) -> client.ApiException:
    error = client.ApiException(status=status, reason="reason")
    error.body = json.dumps({"kind": "Status", "message": message})
    return error


@pytest.mark.parametrize(("after_s", "succeeds"), [(60, True), (10_000, False)])
def test_late_token_is_waited_for(server: ApiServer, tmp_path: Path, after_s: float, succeeds: bool) -> None:
    """The kubelet replaces tokens of pods within minutes; one that never comes is reported in the end."""
    jobs = TrainJobs(connect(), server.namespace)
    server.access.rotate()

    def sleep(seconds: float) -> None:
        server.clock.advance(seconds)
        if server.clock.monotonic() >= after_s:
            server.kubeconfig(tmp_path / "kubeconfig")

    retries = RetryPolicy(replace(clock_of(server), sleep=sleep))
    if succeeds:
        assert retries.call("list training jobs", lambda: jobs.find({})) == []
    else:
        with pytest.raises(UnavailableError, match=r"did not list training jobs within 900 s: .*401"):
            retries.call("list training jobs", lambda: jobs.find({}))


def test_refusal_is_reported_at_once(server: ApiServer) -> None:
    """In the words of the cluster, after one request."""
    server.access.rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    jobs = TrainJobs(connect(), server.namespace)
    with pytest.raises(PipelineError, match=r"the cluster refuses to list training jobs: .*cannot list resource"):
        RetryPolicy(clock_of(server)).call("list training jobs", lambda: jobs.find({}))
    assert len(server.requests) == 1


def _add(server: ApiServer, name: str, *, labels: dict[str, str] | None = None, **annotations: str) -> None:
    ours = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: RUN_ID, kube.STAGE: "train-grpo"}
    job: dict[str, Any] = {
        "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "labels": ours if labels is None else labels,
            "annotations": {f"grpo-pipeline/{key.replace('_', '-')}": value for key, value in annotations.items()},
        },
        "spec": {
            "runtimeRef": {"apiGroup": kube.GROUP, "kind": "TrainingRuntime", "name": "grpo-torch"},
            "suspend": False,
            "managedBy": "trainer.kubeflow.org/trainjob-controller",
        },
    }
    server.cluster.play(script.Running(None))
    server.cluster.add(job)


def _left(server: ApiServer) -> set[str]:
    return {job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)}


def test_only_stale_jobs_of_this_project_are_reaped(server: ApiServer) -> None:
    """By the annotations of each job; without a heartbeat or a readable age, and of others: left alone."""

    def ago(seconds: float) -> str:
        return (server.clock.now() - timedelta(seconds=seconds)).isoformat()

    ours, foreign = {kube.MANAGED_BY: kube.PROJECT}, {kube.MANAGED_BY: "somebody"}
    _add(server, "stale", heartbeat=ago(601), stale_after_s="600")
    _add(server, "alive", heartbeat=ago(599), stale_after_s="600")
    _add(server, "stale-later", heartbeat=ago(5000), stale_after_s="6000")
    _add(server, "no-heartbeat")
    _add(server, "unreadable", heartbeat="yesterday", stale_after_s="600")
    _add(server, "no-time-zone", heartbeat="2025-01-01T00:00:00", stale_after_s="600")
    _add(server, "foreign", labels=foreign, heartbeat=ago(9000), stale_after_s="600")
    _add(server, "no-run", labels=ours, heartbeat=ago(9000), stale_after_s="600")
    before = _left(server)
    assert reap(connect(), own_namespace(), server.clock.now()) == ["stale"]
    assert _left(server) == before - {"stale"}


def test_job_whose_heartbeat_is_renewed_meanwhile_is_not_reaped(server: ApiServer) -> None:
    """The deletion holds for the version that was stale."""
    _add(server, "revived", heartbeat="2020-01-01T00:00:00+00:00", stale_after_s="600")
    server.faults.add(Fault("DELETE", status=409))
    assert reap(connect(), own_namespace(), server.clock.now()) == []
    deletion = next(request for request in server.requests if request.method == "DELETE").object()
    metadata = server.cluster.all(kinds.TRAIN_JOBS)[0]["metadata"]
    version = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    assert deletion["preconditions"] == version


def test_jobs_of_a_run_are_deleted(server: ApiServer) -> None:
    """With or without a heartbeat; those of other runs stay."""
    other = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: "another", kube.STAGE: "train-grpo"}
    _add(server, "sft")
    _add(server, "grpo", heartbeat=server.clock.now().isoformat(), stale_after_s="600")
    _add(server, "other", labels=other)
    assert delete_run(connect(), own_namespace(), RUN_ID) == ["grpo", "sft"]
    assert delete_run(connect(), own_namespace(), RUN_ID) == []
    assert _left(server) == {"other"}


@pytest.mark.slow
def test_reaper_as_a_program(server: ApiServer) -> None:
    """It prints what it has removed; where the cluster does not answer, one line and exit code 75."""
    _add(server, "stale", heartbeat="2020-01-01T00:00:00+00:00", stale_after_s="600")
    command = [sys.executable, "-m", "components.cluster.reaper"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "reaper: removed stale\n"
    assert _left(server) == set()
    server.faults.add(Fault(status=503))
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 75
    assert failed.stderr.count("\n") == 1
