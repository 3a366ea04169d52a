"""The fake Kubeflow Pipelines against recordings."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_cluster import ApiServer
from tests.pipelines.cluster.recorded import Recorded, needs_recordings

API = "/apis/v2beta1/"
API_SERVER = {"apiServerCommitHash", "apiServerMultiUser", "apiServerTagName", "multi_user", "pipelineStore"}
"""What the UI server adds to its health when the API server has answered."""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster."""
    with ApiServer(namespace="kubeflow") as server:
        yield server


def call(server: ApiServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request; return status and body."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(server.url + path, data, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
            return answer.status, text if "/k8s/pod/logs" in path else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def check(fake: Any, real: Any) -> None:
    """Check that an answer has fields of the recorded one only, of the same types."""
    assert type(fake) is type(real)
    if isinstance(fake, dict):
        assert set(fake) <= set(real)
        for key in set(fake) - {"pipeline_spec", "runtime_config"}:
            check(fake[key], real[key])
    if isinstance(fake, list) and fake and real:
        check(fake[0], real[0])


NOT_ANSWERED = {
    f"GET {API}experiments ": "a proxy with no server behind it",
    "POST /apis/v2beta1/pipelines/upload": "a person's upload; the product creates a pipeline and uploads a version",
    "POST /apis/v2beta1/runs/:retry": "a person's Retry",
    "GET /apis/v1beta1/runs/": "the version of the API before",
    "GET /apis/v2beta1/runs//nodes/": "logs by the node, which no address has",
}
"""Beginnings of recorded requests that the fake does not know, without the ids in them, and why."""


@needs_recordings
def test_every_recorded_exchange_has_an_answer_of_its_shape(server: ApiServer) -> None:
    """Of the recorded status, with fields of the recorded types, where the cluster is as far as the recorded was."""
    recorded, kfp = Recorded(), server.kfp
    recorded.load(server)
    scheduled = {run_id: run[0] for run_id, run in recorded.runs.items() if "recurring_run_id" in run[0]}
    kfp.workflows |= dict.fromkeys(scheduled, "nightly")
    kfp.recurring_runs |= {run["recurring_run_id"]: {} for run in scheduled.values()}
    every = {each["experiment_id"]: each for each in recorded.answers(f"{API}experiments/")}
    listed = [pipeline for each in recorded.answers(f"{API}pipelines") for pipeline in each.get("pipelines", [])]
    kfp.pipelines |= {each["pipeline_id"]: each for each in listed}
    answered, skipped = 0, set()
    for each in recorded.exchanges:
        method, path, real = each["method"], each["path"], each["response"]
        start = f"{method} {re.sub('[0-9a-f]{8}-[0-9a-f-]{27}', '', path)} "
        unknown = next((known for known in NOT_ANSWERED if start.startswith(known)), None)
        if unknown:
            skipped.add(unknown)
            continue
        kfp.experiments.clear()
        if start != f"POST {API}experiments ":
            kfp.experiments |= every
        run_id = path.rpartition("/")[2].partition(":")[0]
        if f"{API}runs/" in path and method == "GET":
            kfp.runs[run_id] = real
        elif path.endswith(":terminate"):
            kfp.runs[run_id]["state"] = "RUNNING"
        status, fake = call(server, method, path, each["request"])
        assert (status, type(fake)) == (each["status"], type(real)), (path, fake)
        if real and "/k8s/pod" not in path:
            check({key: value for key, value in fake.items() if key not in API_SERVER}, real)
        answered += 1
    assert skipped == NOT_ANSWERED.keys(), "what need not be left out any more"
    assert answered >= 69
