import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.cluster import logs, status
from pipelines.cluster.kubeflow import Kubeflow, connect, settings
from pipelines.cluster.stages import stages
from pipelines.run.screen import Screen
from tests.pipelines.cluster.argo import Stage, details
from tests.pipelines.cluster.replay import RECORDINGS, Recorded, Replay

pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason=f"no recordings of a real Kubeflow Pipelines at {RECORDINGS}"
)
STOPPED = "train_grpo: stopped from outside (SIGTERM)"
GONE = "its log is gone"
IN_USE = "train_sft: /work/grpo-pipeline/work/train_sft/f17f8681dbd87900: is in use by process 24"
FAILED = {
    "smoke-20261122T100527Z": ("preflight", "preflight: 2 to correct before this run can start"),
    "orig": ("train_sft", f"train_sft: {GONE}"),
    "kill1": ("train_grpo", STOPPED),
    "kill3": ("train_grpo", STOPPED),
    "two-nodes": ("preflight", f"preflight: {GONE}"),
    "two-nodes2": ("train_sft", IN_USE),
    "with-model-registry": ("preflight", f"preflight: {GONE}"),
}
"""The stage that failed at the end of each run in which one did, and the beginning of its reason."""
REMOVED = "nightlykqn8c-1-3542701879"
"""A run whose schedule was removed while it ran."""


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """What a real server answered."""
    return Recorded()


@pytest.fixture
def server(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    """A server that answers the same."""
    monkeypatch.setattr("kfp.Client._LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    with Replay(recorded) as server:
        monkeypatch.setenv("GRPO_PIPELINE_ENDPOINT", server.url)
        server.lost = (REMOVED,)
        yield server


@pytest.fixture
def kubeflow(server: Replay) -> Kubeflow:
    """The way to it."""
    return connect(settings({}, endpoint=server.url))


def id_of(recorded: Recorded, name: str) -> str:
    """The run of a name."""
    (run_id,) = (run_id for run_id, moments in recorded.runs().items() if moments[0]["display_name"] == name)
    return run_id


def at_its_end(recorded: Recorded, server: Replay, run_id: str) -> None:
    """Have the server answer with the last that it told about a run."""
    server.moments[run_id] = recorded.runs()[run_id][-1:]


def test_every_run_names_the_stage_that_failed_and_why(recorded: Recorded, server: Replay, kubeflow: Kubeflow) -> None:
    """In the stage's own words where its log can be read; stages that were not reached are no failures."""
    failed = {}
    for run_id in recorded.runs():
        at_its_end(recorded, server, run_id)
        run = kubeflow.run(run_id)
        failing = [stage.title for stage in stages(run) if stage.state == "FAILED"]
        reasons = [line for line in status.of_run(kubeflow, run) if line.startswith("error: ")]
        if failing or reasons:
            (stage,), (reason,) = failing, reasons
            failed[run.display_name] = (stage, reason)
    assert failed.keys() == FAILED.keys()
    for name, (stage, reason) in FAILED.items():
        assert failed[name][0] == stage
        assert failed[name][1].startswith(f"error: {reason}")


@pytest.mark.slow
def test_every_moment_of_every_run_can_be_shown(recorded: Recorded, server: Replay, kubeflow: Kubeflow) -> None:
    """Before a stage begins, while they run, when one is cancelled, after a retry: stages are in order, each once."""
    for run_id, moments in recorded.runs().items():
        for moment in moments:
            server.moments[run_id] = [moment]
            run = kubeflow.run(run_id)
            assert status.of_run(kubeflow, run)[0].startswith(f"{run.display_name}  {run_id}  ")
            known = stages(run)
            assert len({task.name for task in known}) == len(known)
            begun = [task.started for task in known if task.started]
            assert begun == sorted(begun)


def test_the_pods_of_every_stage_are_those_that_argo_made(
    recorded: Recorded, server: Replay, kubeflow: Kubeflow
) -> None:
    """All of them, retries, nested graphs and the exit hook included, for each run whose Workflow was kept."""
    compared = 0
    for run_id in recorded.runs():
        at_its_end(recorded, server, run_id)
        run = kubeflow.run(run_id)
        if run.state in ("SUCCEEDED", "FAILED") and run_id in recorded.pods_of:
            compared += 1
            made = {pod for pod in recorded.pods_of[run_id] if "-system-container-impl-" in pod}
            assert {pod for task in stages(run) for pod in task.pods} == made
    assert compared >= 5


def test_logs_are_read_at_the_address_of_the_ui(
    recorded: Recorded, server: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the attempt that has one; a run that has none to be read any more is told so."""
    run_id = id_of(recorded, "two-nodes2")
    assert main(["logs", run_id, "--stage", "train_sft"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "==> train_sft <=="
    assert any(line.startswith(f"error: {IN_USE}") for line in lines)
    run_id = id_of(recorded, "kill1")
    at_its_end(recorded, server, run_id)
    assert main(["logs", run_id, "--stage", "train_grpo"]) == 0
    out = capsys.readouterr().out
    assert "==> train_grpo, attempt 1 <==\n(its log is gone" in out
    assert "==> train_grpo, attempt 2 <==\n" in out
    assert "train_grpo: going on after step 149\n" in out
    assert main(["logs", id_of(recorded, "default-job")]) == 2
    assert "default-job: no log of any stage is available" in capsys.readouterr().err


def test_waiting_tells_the_same_reason(
    recorded: Recorded, server: Replay, kubeflow: Kubeflow, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first to the last that the server told about the run; stages that were not reached never begin."""
    run_id = id_of(recorded, "smoke-20261122T100527Z")
    assert status.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr), sleep=lambda _: None) == 1
    out, error = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("[")] == ["[1/11] preflight", "[2/11] clean_up"]
    lines = [line.strip() for line in error.splitlines()]
    assert lines[0] == "error: preflight: 2 to correct before this run can start"
    assert lines[1] == "namespace kubeflow has no TrainingRuntime grpo-torch; apply an overlay of k8s/"


def test_following_ends_with_the_run(recorded: Recorded, server: Replay, kubeflow: Kubeflow) -> None:
    """Every line once, though the run is asked for again and again."""
    run_id = id_of(recorded, "smoke-20261122T100527Z")
    lines = list(logs.follow(kubeflow, run_id, "preflight", sleep=lambda _: None))
    assert lines[0] == "==> preflight <=="
    assert sum(line.startswith("error: preflight") for line in lines) == 1


def test_a_run_started_in_the_form_shows_its_stages(recorded: Recorded, server: Replay, kubeflow: Kubeflow) -> None:
    """It holds a reference to an uploaded version in place of a pipeline."""
    run = kubeflow.run(id_of(recorded, "from the form"))
    assert [(task.title, task.state) for task in stages(run)] == [("preflight", "RUNNING")]


def test_a_run_whose_workflow_was_removed_is_told_from_one_that_runs(
    recorded: Recorded, server: Replay, kubeflow: Kubeflow
) -> None:
    """Kubeflow calls both running; of one there is no pod left."""
    lost = [run_id for run_id in recorded.runs() if logs.is_lost(kubeflow, kubeflow.run(run_id))]
    assert lost == [id_of(recorded, REMOVED)]


def test_the_fake_server_tells_tasks_as_the_real_one(recorded: Recorded) -> None:
    """With the same fields: above all without the name of a pod."""
    real = recorded.runs()[id_of(recorded, "two-nodes2")][-1]["run_details"]["task_details"]
    fake = details({"train-grpo": Stage("FAILED", ["FAILED", "FAILED"]), "register": Stage(None, driver=None)})
    fields = {name for task in real for name in task}
    assert {name for task in fake for name in task} <= fields
    assert "pod_name" not in fields
    assert {tuple(child) for task in fake for child in task["child_tasks"]} == {("pod_name",)}
