import json
from datetime import timedelta

import pytest
from kubernetes import client

from components.cluster import kube, reaper
from components.cluster.kube import Json, RetryPolicy, TrainJobs, connect, is_transient
from components.cluster.reaper import reap
from components.shared.errors import PipelineError
from tests.cluster.launched import add_train_job, clock_of
from tests.fake_cluster import ApiServer, Fault, kinds

LONG_AGO = "2020-01-01T00:00:00+00:00"
OURS = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: "1"}


@pytest.mark.parametrize(
    "message",
    [
        'admission webhook "x.kueue.io" denied the request: Get "https://10.96.0.1:443": context deadline exceeded',
        'failed calling webhook "x": Post "https://trainer:443": connect: connection refused',
        'Internal error occurred: failed to call webhook: Post "https://trainer:443": connect: connection refused',
    ],
)
def test_unreachable_webhook_is_transient(message: str) -> None:
    """Although its status is that of a refusal."""
    error = client.ApiException(status=403, reason="reason")
    error.body = json.dumps({"kind": "Status", "message": message})
    assert is_transient(error)


def test_refusal_is_reported_at_once(server: ApiServer) -> None:
    """In the words of the cluster, after one request."""
    server.access.rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    jobs = TrainJobs(connect(), server.namespace)
    with pytest.raises(PipelineError, match=r"the cluster refuses to list training jobs: .*cannot list resource"):
        RetryPolicy(clock_of(server)).call("list training jobs", lambda: jobs.find({}))
    assert len(server.requests) == 1


def test_only_stale_jobs_of_this_project_are_reaped(server: ApiServer) -> None:
    """Without a heartbeat that can be read, and of others: left alone."""

    def add(name: str, age_s: float, labels: Json = OURS) -> None:
        beat = (server.clock.now() - timedelta(seconds=age_s)).isoformat()
        add_train_job(server, name, labels, {kube.HEARTBEAT: beat})

    add("stale", 601)
    add("alive", 599)
    add("foreign", 9000, {**OURS, kube.MANAGED_BY: "somebody"})
    add("no-run", 9000, {kube.MANAGED_BY: kube.PROJECT})
    add_train_job(server, "no-heartbeat", OURS)
    for beat in ("garbage", "2020-01-01T00:00:00"):
        add_train_job(server, f"unreadable-{len(beat)}", OURS, {kube.HEARTBEAT: beat})
    assert reap(connect(), server.namespace, server.clock.now(), server.clock.sleep) == ["stale"]
    assert "stale" not in {job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)}


def _add_stale(server: ApiServer) -> dict[str, str]:
    """Add a stale job; return its metadata."""
    return add_train_job(server, "stale", OURS, {kube.HEARTBEAT: LONG_AGO})


@pytest.mark.parametrize(
    ("labels", "is_reaped"),
    [
        ({kube.KFP_RUN_ID: "1"}, False),
        ({kube.KFP_RUN_ID: "1", kube.COMPLETED: "true"}, True),
        ({kube.KFP_RUN_ID: "2"}, True),
        (None, True),
    ],
)
def test_job_of_a_run_that_goes_on_is_left_to_be_adopted(
    server: ApiServer, labels: dict[str, str] | None, is_reaped: bool
) -> None:
    """Another attempt of its step may wait for a node for as long as training takes; a cluster may lack workflows."""
    _add_stale(server)
    if labels is None:
        server.cluster.uninstalled.add(kinds.WORKFLOWS)
    else:
        server.cluster.add_workflow("run", **labels)
    assert reap(connect(), server.namespace, server.clock.now(), server.clock.sleep) == (["stale"] if is_reaped else [])


def test_job_whose_heartbeat_is_renewed_meanwhile_is_not_reaped(server: ApiServer) -> None:
    """The deletion holds for the version that was stale."""
    metadata = _add_stale(server)
    server.faults.add(Fault("DELETE", status=409))
    assert reap(connect(), server.namespace, server.clock.now(), server.clock.sleep) == []
    deletion = next(request for request in server.requests if request.method == "DELETE").object()
    version = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    assert deletion["preconditions"] == version


def test_reaper_as_a_program(
    server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints what it has removed; where the cluster does not answer, one line and exit code 75."""
    monkeypatch.setattr(reaper, "_RENEWAL_S", 0)
    _add_stale(server)
    reaper.main()
    assert capsys.readouterr().out == "reaper: removed stale\n"
    server.faults.add(Fault(status=503))
    with pytest.raises(SystemExit, match="75"):
        reaper.main()
    assert capsys.readouterr().err.count("\n") == 1
