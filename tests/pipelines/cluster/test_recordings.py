import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

from pipelines.cluster import logs, runs
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.stages import FINISHED, stages
from pipelines.run.screen import Screen
from tests.fake_cluster import ApiServer
from tests.pipelines.cluster.argo import Stage, details
from tests.pipelines.cluster.recorded import RECORDINGS, Recorded

pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason=f"no recordings of a real Kubeflow Pipelines at {RECORDINGS}"
)
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
PREFLIGHT_FAILED = "smoke-20261122T100527Z"


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


def test_a_running_stage_shows_its_step(recorded: Recorded, server: ApiServer, kubeflow: Kubeflow) -> None:
    """From the recorded log of its second attempt, after a launcher and a training pod were deleted."""
    run_id = recorded.id_of("kill1")
    *_, server.kfp.runs[run_id], _ = recorded.runs[run_id]
    (line,) = logs.activity(kubeflow, kubeflow.run(run_id))
    assert line.startswith("train_grpo 216/400  reward 0  accuracy 0  ")
    assert line.endswith("  2:19 left")


@pytest.mark.slow
def test_every_moment_of_every_run_can_be_shown(recorded: Recorded, server: ApiServer, kubeflow: Kubeflow) -> None:
    """Before a stage begins, while they run, when one is cancelled, after a retry: stages are in order, each once."""
    for run_id, moments in recorded.runs.items():
        for moment in moments:
            server.kfp.runs[run_id] = moment
            run = kubeflow.run(run_id)
            assert runs.show(kubeflow, run)[0].startswith(f"{run.display_name}  {run_id}  ")
            known = [stage for stage in stages(run) if stage.state]
            assert len({stage.name for stage in known}) == len(known)
            begun = [stage.started for stage in known if stage.started]
            assert begun == sorted(begun)


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


def test_following_and_waiting_end_with_the_run(
    recorded: Recorded, server: ApiServer, kubeflow: Kubeflow, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its first recorded moment to the last; stages that were not reached never begin, lines come once."""
    run_id = recorded.id_of(PREFLIGHT_FAILED)

    def replay() -> SimpleNamespace:
        moments = iter(recorded.runs[run_id])
        server.kfp.runs[run_id] = next(moments)
        return SimpleNamespace(sleep=lambda _: server.kfp.runs.update({run_id: next(moments)}), monotonic=lambda: 0.0)

    assert runs.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr), replay()) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("[")] == ["[1/11] preflight", "[2/11] clean_up"]
    printed = list(logs.logs(kubeflow, logs.poll(kubeflow, run_id, replay()), "preflight"))
    assert printed[0] == "==> preflight <=="
    assert sum(line.startswith("error: preflight") for line in printed) == 1


def test_an_image_that_nodes_cannot_pull_is_named_with_the_reason(
    recorded: Recorded, server: ApiServer, kubeflow: Kubeflow
) -> None:
    """Of a run that was started on Kubeflow's page, from a version with images that no registry had."""
    run = kubeflow.run(recorded.id_of("from the form"))
    (preflight,) = [stage for stage in stages(run) if stage.title == "preflight"]
    (waiting,) = [pod for pod, events in server.kfp.events.items() if "BackOff" in str(events) and "-minimal-" in pod]
    server.kfp.events[preflight.pods[-1]] = server.kfp.events[waiting]
    line = runs.show(kubeflow, run)[-1]
    assert line.startswith(
        'preflight: image grpo-pipeline/python-light:dev cannot be pulled: Head "https://registry-1.'
    )
    assert line.endswith("no such host")


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


def test_a_run_whose_workflow_was_removed_is_told_from_one_that_runs(recorded: Recorded, kubeflow: Kubeflow) -> None:
    """Kubeflow calls both running; of one there is no pod left."""
    lost = [run_id for run_id in recorded.runs if logs.is_lost(kubeflow, kubeflow.run(run_id))]
    assert lost == [recorded.id_of(REMOVED)]


def test_logs_are_asked_for_where_argo_archived_them(recorded: Recorded, server: ApiServer, kubeflow: Kubeflow) -> None:
    """For each run whose Workflow was recorded, once its pods are gone."""
    for run_id in recorded.pods_of.keys() & recorded.runs.keys():
        run = kubeflow.run(run_id)
        keys = {key for key in recorded.archived[run_id] if "-system-container-impl-" in key}
        server.kfp.pods, server.kfp.artifacts = {}, {("minio", "mlpipeline", key): f"{key}\n" for key in keys}
        if run.state in FINISHED and keys:
            assert keys < set(logs.logs(kubeflow, [run], None))


def test_the_reason_of_a_failure_is_known_after_an_hour(
    recorded: Recorded, server: ApiServer, kubeflow: Kubeflow, pipeline: Path
) -> None:
    """As the address of the UI answered once pods and workflow were gone: from the archive, or from executor logs."""
    answers = {
        query["key"]: each["response"]
        for each in recorded.after_an_hour
        if "key" in (query := dict(parse_qsl(urlsplit(each["path"]).query)))
    }
    archived, executor_logs = answers
    spec, platform = yaml.safe_load_all(pipeline.read_text())
    row = server.kfp.new(server.kfp.runs, "run_id", display_name="retrain", created_at="2026-11-26T02:44:00Z")
    row["pipeline_spec"] = {"pipeline_spec": spec, "platform_spec": platform}
    failed = details({"preflight": Stage("FAILED", 1)}, archived.split("/")[2])
    server.kfp.set_state(row["run_id"], "FAILED")
    row["run_details"] = {"task_details": failed}
    server.kfp.artifacts = {("minio", "mlpipeline", archived): answers[archived]}
    reason = "error: preflight: code, data and config are those of team-policy@v0.0.1"
    assert runs.show(kubeflow, kubeflow.run(row["run_id"]))[-1].startswith(reason)
    (match,) = {each.group(3) for each in logs._EXECUTOR_LOGS.finditer(answers[archived])}
    assert f"{match}-0" == executor_logs
