import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.cluster import logs, runs
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.stages import FINISHED, stages
from tests.fake_cluster import ApiServer
from tests.pipelines.cluster.recorded import Recorded, needs_recordings

pytestmark = needs_recordings
STOPPED = "train_grpo: stopped from outside (SIGTERM)"
GONE = "its log is gone"
IN_USE = "train_sft: /work/grpo-pipeline/work/train_sft/f17f8681dbd87900: is in use by process 24"
REMOVED = "nightlykqn8c-1-3542701879"
"""A run whose schedule was removed while it ran."""
LOST = "no pod of the run exists any more"
SILENT = "its pod has not printed anything yet"
LAST_LINES = {
    "smoke-20261122T100527Z": ("failed", "error: preflight: 2 to correct before this run can start"),
    "orig": ("canceling", f"error: train_sft: {GONE}"),
    "small1": ("succeeded", ""),
    "kill1": ("stopped", f"error: {STOPPED}: the run was stopped"),
    "waited": ("succeeded", ""),
    "kill2": ("running", f"train_grpo: {SILENT}"),
    "kill3": ("failed", f"error: {STOPPED}: the stage ran out of time"),
    "two-nodes": ("failed", f"error: preflight: {GONE}"),
    REMOVED: ("running", LOST),
    "queued": ("running", f"train_sft: {SILENT}"),
    "two-nodes2": ("failed", f"error: {IN_USE}"),
    "queued2": ("running", f"evaluate sft: {SILENT}"),
    "two-nodes3": ("running", ""),
    "from the form": ("running", f"preflight: {SILENT}"),
    "default-job": ("succeeded", ""),
    "queued-two-nodes": ("succeeded", ""),
    "with-model-registry": ("failed", f"error: preflight: {GONE}"),
}
"""The state of each run as it was last, and the beginning of the lines below its stages."""
STAGES = {
    "small1": {"prepare_data": "cached", "train_grpo": "succeeded"},
    "kill1": {"prepare_data": "cached", "train_grpo": "failed (attempt 2)", "report": "not reached"},
    "waited": {"validate_data": "cached", "train_sft": "succeeded", "register": "succeeded"},
    "from the form": {"preflight": "running"},
}
"""What some of them say of stages."""


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """What a real server answered."""
    return Recorded()


@pytest.fixture
def kubeflow(server: ApiServer, recorded: Recorded) -> Kubeflow:
    """A connection to a server that answers the same."""
    recorded.load(server)
    server.kfp.pods = {pod: text for pod, text in server.kfp.pods.items() if not pod.startswith(REMOVED)}
    return Kubeflow(server.url)


def test_every_run_says_what_has_become_of_it(recorded: Recorded, kubeflow: Kubeflow) -> None:
    """Failed, stopped, after Retry, of a version, of a schedule: in the stage's own words where its log is there."""
    lines = {}
    for run_id in recorded.runs:
        run = kubeflow.run(run_id)
        title, _, *table = runs.show(kubeflow, run)
        blank = [number for number, line in enumerate(table) if not line][1:]
        below = table[blank[0] + 1] if blank else ""
        lines[run.display_name] = (title.split("  ")[-1], below)
        rows = {
            row[0].strip(): row[1].strip() for row in (re.split(r"  +", line, maxsplit=2) for line in table) if row[1:]
        }
        expected = STAGES.get(run.display_name, {})
        assert {stage: rows[stage] for stage in expected} == expected
        assert ("may pass" in table[-1]) == (run.display_name == "two-nodes2")
    assert lines.keys() == LAST_LINES.keys()
    for name, (state, below) in LAST_LINES.items():
        assert lines[name][0] == state
        assert lines[name][1].startswith(below)
        assert bool(lines[name][1]) == bool(below)


def test_the_pods_of_every_stage_are_those_that_argo_made(recorded: Recorded, kubeflow: Kubeflow) -> None:
    """All of them, retries, nested graphs and the exit hook included, for each run whose Workflow was recorded."""
    compared = 0
    for run_id in recorded.runs:
        run = kubeflow.run(run_id)
        if run.state in ("SUCCEEDED", "FAILED") and run_id in recorded.pods_of:
            compared += 1
            made = {pod for pod in recorded.pods_of[run_id] if "-system-container-impl-" in pod}
            assert {pod for stage in stages(run) for pod in stage.pods} == made
    assert compared >= 5


def test_logs_leave_out_what_kubeflow_reports(recorded: Recorded, server: ApiServer, kubeflow: Kubeflow) -> None:
    """Hundreds of lines about inputs and outputs, also where the log is followed as it grows."""
    run_id = recorded.id_of("small1")
    *before, ended = recorded.runs[run_id]
    details = [(moment, task) for moment in before for task in moment["run_details"]["task_details"]]
    running = next(
        moment for moment, task in details if (task.get("display_name"), task.get("state")) == ("train-sft", "RUNNING")
    )
    ((pod, text),) = ((pod, text) for pod, text in server.kfp.pods.items() if text and pod in recorded.pods_of[run_id])

    def growing() -> Iterator[Any]:
        server.kfp.runs[run_id] = running
        for size in range(0, len(text), 97):
            server.kfp.pods[pod] = text[:size]
            yield kubeflow.run(run_id)
        server.kfp.runs[run_id], server.kfp.pods[pod] = ended, text
        yield kubeflow.run(run_id)

    followed = list(logs.logs(kubeflow, growing(), "train_sft"))
    assert followed == list(logs.logs(kubeflow, [kubeflow.run(run_id)], "train_sft"))
    heading, first, *_, last = followed
    assert (heading, first) == ("==> train_sft <==", "train_sft: submitted grpo-98034d0d-aa35fe25")
    assert len(followed) == 10
    assert last.startswith("W1122 ")


def test_logs_are_asked_for_where_argo_archived_them(recorded: Recorded, server: ApiServer, kubeflow: Kubeflow) -> None:
    """For each run whose Workflow was recorded, once its pods are gone."""
    for run_id in recorded.pods_of.keys() & recorded.runs.keys():
        run = kubeflow.run(run_id)
        keys = {key for key in recorded.archived[run_id] if "-system-container-impl-" in key}
        server.kfp.pods, server.kfp.artifacts = {}, {("minio", "mlpipeline", key): f"{key}\n" for key in keys}
        if run.state in FINISHED and keys:
            assert keys < set(logs.logs(kubeflow, [run], None))


API = "/apis/v2beta1/"
API_SERVER = {"apiServerCommitHash", "apiServerMultiUser", "apiServerTagName", "multi_user", "pipelineStore"}
"""What the UI server adds to its health when the API server has answered."""


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
