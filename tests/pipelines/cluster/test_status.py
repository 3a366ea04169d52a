import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from components.shared.errors import PipelineError, RetryableError
from pipelines.cli import main
from pipelines.cluster import logs, status
from pipelines.cluster.kubeflow import Kubeflow, connect, settings
from pipelines.run.screen import Screen
from tests.fake_cluster import ApiServer, Fault, Json
from tests.pipelines.cluster.argo import Stage, details, driver_pod, pod

DONE = Stage("SUCCEEDED", ["SUCCEEDED"], ended="2026-11-22T10:01:15Z")
FAILED = Stage("FAILED", ["FAILED", "FAILED"], "2026-11-22T10:02:00Z", "2026-11-22T12:32:00Z")
RUNNING = Stage("RUNNING", ["RUNNING"], "2026-11-22T10:02:00Z")
CACHED = Stage("SUCCEEDED", ended="2026-11-22T10:00:00Z")
LEFT_OUT = Stage(None, started="2026-11-22T10:03:00Z", driver=None)
UNPREPARED = Stage(None, started="2026-11-22T10:03:00Z", driver="FAILED")


@pytest.fixture(scope="module")
def spec(pipeline: Path) -> Json:
    """The pipeline as a run holds it."""
    pipeline_spec, platform_spec = yaml.safe_load_all(pipeline.read_text())
    return {"pipeline_spec": pipeline_spec, "platform_spec": platform_spec}


@pytest.fixture
def run_id(server: ApiServer, spec: Json) -> str:
    """A run of it."""
    run = server.kfp.new(server.kfp.runs, "run_id", display_name="nightly", pipeline_spec=spec)
    server.kfp.set_state(run["run_id"], "PENDING")
    return str(run["run_id"])


@pytest.fixture
def kubeflow(server: ApiServer) -> Kubeflow:
    """The way to it."""
    return connect(settings({}, endpoint=server.url))


def tell(server: ApiServer, run_id: str, state: str, **stages: Stage) -> None:
    """Have a run be as far as this."""
    server.kfp.set_state(run_id, state)
    named = {name.replace("_", "-"): stage for name, stage in stages.items()}
    for name, stage in named.items():
        for attempt in range(len(stage.attempts)):
            server.kfp.pods.setdefault(pod(name, attempt), None)
    server.kfp.runs[run_id]["run_details"] = {"task_details": details(named)}


def test_status_lists_runs_and_the_stages_of_one(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its id, the beginning of it, or its name; a stage that is retried is one stage."""
    tell(server, run_id, "RUNNING", preflight=DONE, evaluate_2=DONE, train_grpo=RUNNING)
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "name", "state", "started", "(UTC)", "took"]
    assert lines[1].split()[:3] == [run_id[:8], "nightly", "running"]
    for name in (run_id, run_id[:8], "nightly"):
        assert main(["status", name]) == 0
    out = capsys.readouterr().out.split("\n\n")[-1]
    assert [line.split("  ")[0] for line in out.splitlines()] == ["stage", "preflight", "evaluate sft", "train_grpo"]
    assert "1 min 15 s" in out.splitlines()[1]


def test_status_says_why_a_stage_failed(server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the stage's own words, from its last attempt."""
    tell(server, run_id, "FAILED", preflight=DONE, train_grpo=FAILED)
    server.kfp.pods[pod("train-grpo", 0)] = "error: train_grpo: first\n"
    server.kfp.pods[pod("train-grpo", 1)] = (
        "step 1\nerror: train_grpo: out of memory on node 0 (OOMKilled)\nF1122 10:06:03.121720 16 main.go:130] exit\n"
    )
    assert main(["status", run_id]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "error: train_grpo: out of memory on node 0 (OOMKilled)"
    assert "2 h 30 min" in out


def test_a_run_that_is_not_there_is_said_to_be_none(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether by name or by a whole id; nothing is guessed where two have the same name."""
    assert main(["status", "weekly"]) == 2
    assert capsys.readouterr().err.startswith("error: weekly: no such run among the last 100")
    assert main(["status", "0" * 36]) == 2
    assert "no such run; `grpo-pipeline status` lists them" in capsys.readouterr().err


def test_logs_are_printed_under_the_title_of_their_stage(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All attempts at it, drivers left out; a stage may be named as in the graph or as on the page."""
    tell(server, run_id, "FAILED", evaluate_2=DONE, train_grpo=FAILED)
    server.kfp.pods |= {
        pod("evaluate-2", 0): "evaluated\n",
        pod("train-grpo", 0): "one\n",
        pod("train-grpo", 1): "two\nthree\n",
    }
    assert main(["logs", run_id, "--stage", "train_grpo"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "==> train_grpo, attempt 1 <==",
        "one",
        "==> train_grpo, attempt 2 <==",
        "two",
        "three",
    ]
    assert main(["logs", run_id, "--stage", "evaluate sft"]) == 0
    assert capsys.readouterr().out.splitlines() == ["==> evaluate sft <==", "evaluated"]
    assert main(["logs", run_id, "--stage", "trian"]) == 2
    assert "trian: no such stage; there are" in capsys.readouterr().err


def test_a_failure_of_several_lines_is_told_whole(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Preflight lists what to correct; what Kubeflow prints after it is left out."""
    tell(server, run_id, "FAILED", preflight=Stage("FAILED", ["FAILED"]), train_grpo=LEFT_OUT)
    server.kfp.pods[pod("preflight", 0)] = (
        "error: preflight: 2 to correct\nno runtime\nno queue\nE1122 10:06:03.044119 16 launcher_v2.go:449] failed\n"
    )
    assert main(["status", run_id]) == 0
    assert capsys.readouterr().out.endswith("\n\nerror: preflight: 2 to correct\nno runtime\nno queue\n")


def test_stages_that_did_not_run_are_shown_as_such(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One whose outputs the cache had, and one that was left out after a failure: neither took any time."""
    tell(server, run_id, "FAILED", prepare_data=CACHED, train_sft=FAILED, train_grpo=LEFT_OUT)
    assert main(["status", run_id]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.split("\n\n")[1].splitlines()]
    shown = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert shown["prepare_data"] == ["cached", "2026-11-22 10:00", "-"]
    assert shown["train_grpo"] == ["not reached", "-", "-"]
    assert rows[-1][0] == "train_grpo"


def test_a_stage_that_could_not_be_prepared_has_failed(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own container was never reached; the reason is in the last words of its driver."""
    tell(server, run_id, "FAILED", preflight=DONE, train_sft=UNPREPARED)
    server.kfp.pods[driver_pod("train-sft")] = "I1122 ok\nF1122 10:06:03.121720      16 main.go:79] no such artifact\n"
    assert main(["status", run_id]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "error: train_sft: could not be prepared: no such artifact"
    assert ["train_sft", "failed"] in [line.split()[:2] for line in out.splitlines()]


def test_a_run_after_a_retry_is_shown(
    server: ApiServer, run_id: str, kubeflow: Kubeflow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its history then has an entry without a state."""
    tell(server, run_id, "RUNNING", preflight=DONE, train_grpo=RUNNING)
    server.kfp.runs[run_id]["state_history"].insert(0, {"update_time": "2026-11-22T10:00:00Z"})
    assert main(["status", run_id]) == 0
    assert main(["status"]) == 0
    assert "nightly" in capsys.readouterr().out
    server.kfp.set_state(run_id, "FAILED")
    assert status.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr)) == 1


def test_a_run_of_an_uploaded_pipeline_shows_its_stages(
    server: ApiServer, run_id: str, spec: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a run refers to a version and holds no pipeline; once the version is deleted, that is said."""
    version = server.kfp.new(server.kfp.versions, "pipeline_version_id", pipeline_id="grpo", pipeline_spec=spec)
    run = server.kfp.runs[run_id]
    del run["pipeline_spec"]
    reference = {"pipeline_id": "grpo", "pipeline_version_id": version["pipeline_version_id"]}
    run["pipeline_version_reference"] = reference
    tell(server, run_id, "FAILED", preflight=Stage("FAILED", ["FAILED"]))
    server.kfp.pods[pod("preflight", 0)] = "error: preflight: no runtime\n"
    assert main(["status", run_id]) == 0
    assert capsys.readouterr().out.endswith("error: preflight: no runtime\n")
    server.kfp.versions.clear()
    assert main(["status", run_id]) == 0
    assert "its stages are unknown" in capsys.readouterr().out


def test_a_log_that_is_gone_is_said_to_be(server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Kubeflow removes a run's pods after an hour; `logs` that has nothing to show is no success."""
    tell(server, run_id, "FAILED", preflight=CACHED, train_grpo=FAILED, register=LEFT_OUT)
    server.kfp.pods.clear()
    gone = "its log is gone: Kubeflow has removed the pod, and the log was not archived"
    assert main(["status", run_id]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"error: train_grpo: {gone}"
    assert main(["logs", run_id]) == 2
    out, error = capsys.readouterr()
    assert out.splitlines() == [
        *("==> preflight <==", "(not run: the cache has its outputs)"),
        *("==> train_grpo, attempt 1 <==", f"({gone})", "==> train_grpo, attempt 2 <==", f"({gone})"),
    ]
    assert error == "error: nightly: no log of any stage is available\n"
    assert main(["logs", run_id, "--stage", "register", "-f"]) == 2
    assert main(["logs", run_id, "--stage", "register"]) == 2
    assert "(not reached)" in capsys.readouterr().out


def test_what_keeps_a_pod_from_starting_is_told(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `logs` while it waits, and as the reason once its stage has failed; optional secrets are no reason."""
    tell(server, run_id, "RUNNING", train_grpo=RUNNING)
    assert main(["logs", run_id]) == 2
    assert "(its pod has not printed anything yet)" in capsys.readouterr().out
    server.kfp.events[pod("train-grpo", 0)] = [
        {
            "reason": "FailedToRetrieveImagePullSecret",
            "message": "Unable to retrieve some image pull secrets (a, b)",
        },
        {"reason": "Failed", "message": 'Failed to pull image "grpo:dev": not found'},
        {"reason": "Failed", "message": "Error: ImagePullBackOff"},
    ]
    assert main(["logs", run_id]) == 2
    reason = 'its pod printed nothing: Failed to pull image "grpo:dev": not found'
    assert f"({reason})" in capsys.readouterr().out
    tell(server, run_id, "FAILED", train_grpo=Stage("FAILED", ["FAILED"]))
    assert main(["status", run_id]) == 0
    assert capsys.readouterr().out.endswith(f"error: train_grpo: {reason}\n")


def test_a_log_that_breaks_off_is_shown_as_far_as_it_goes(server: ApiServer, run_id: str, kubeflow: Kubeflow) -> None:
    """The server then adds its own error under the status of a success; alone, that is no log."""
    tell(server, run_id, "FAILED", train_grpo=Stage("FAILED", ["FAILED"]))
    server.kfp.pods[pod("train-grpo", 0)] = "step 1\nCould not get main container logs: Error: socket hang up"
    assert list(logs.logs(kubeflow, kubeflow.run(run_id), None)) == ["==> train_grpo <==", "step 1"]
    server.kfp.pods[pod("train-grpo", 0)] = "Could not get main container logs: Error: socket hang up"
    with pytest.raises(PipelineError, match="no log of any stage"):
        list(logs.logs(kubeflow, kubeflow.run(run_id), None))


def test_inside_a_cluster_logs_come_from_kubernetes(
    server: ApiServer, run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The address there is that of the API server, which has none; without Kubernetes the UI's is asked for."""
    tell(server, run_id, "FAILED", train_sft=FAILED)
    server.kfp.has_ui = False
    assert main(["logs", run_id]) == 2
    assert "(its log is gone" in capsys.readouterr().out
    made = server.cluster.add_pod(pod("train-sft", 1))
    server.cluster.print(made, "step 1", "error: train_sft: out of memory")
    assert main(["status", run_id]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "error: train_sft: out of memory"
    monkeypatch.setenv("GRPO_PIPELINE_KUBECONFIG", "/nowhere")
    assert main(["logs", run_id]) == 2
    assert capsys.readouterr().err == f"error: {server.url}: has no /k8s/pod/logs; pass the address of the UI\n"


def test_a_stage_that_was_stopped_is_told_from_one_that_broke(
    server: ApiServer, run_id: str, kubeflow: Kubeflow, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no error of its own; its container ended by SIGTERM."""
    tell(server, run_id, "FAILED", train_grpo=Stage("FAILED", ["FAILED"]))
    server.kfp.pods[pod("train-grpo", 0)] = "train_grpo 216/400\nError: exit status 143\n"
    assert main(["status", run_id]) == 0
    assert "error: train_grpo: stopped from outside (SIGTERM)" in capsys.readouterr().out
    server.kfp.runs[run_id]["state_history"].insert(1, {"state": "CANCELING"})
    assert status.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr)) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("stopped  ")


def test_following_prints_each_line_once_and_ends_with_the_run(
    server: ApiServer, run_id: str, kubeflow: Kubeflow
) -> None:
    """A line that is being written waits for its end; a log that cannot be had for a moment is asked for again."""
    train = pod("train-grpo", 0)
    steps: Iterator[Callable[[], None]] = iter(
        [
            lambda: tell(server, run_id, "RUNNING", train_grpo=RUNNING),
            lambda: server.kfp.pods.update({train: "step 1\nste"}),
            lambda: server.faults.add(Fault("GET", "/log", status=503, times=1)),
            lambda: server.kfp.pods.update({train: "step 1\nstep 2\n"}),
            lambda: server.kfp.pods.update({train: "step 1\nstep 2\nlast words"}),
            lambda: tell(server, run_id, "SUCCEEDED", train_grpo=DONE),
        ]
    )
    lines = list(logs.follow(kubeflow, run_id, None, sleep=lambda _: next(steps)()))
    assert lines == ["==> train_grpo <==", "step 1", "step 2", "last words"]


def test_waiting_tells_a_run_as_plain_lines(
    server: ApiServer, run_id: str, kubeflow: Kubeflow, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line when a stage begins and one when it ends, each once, whatever the server does meanwhile."""
    steps: Iterator[Callable[[], None]] = iter(
        [
            lambda: tell(server, run_id, "RUNNING", preflight=RUNNING),
            lambda: server.faults.add(Fault("GET", "/runs/", status=503, times=2)),
            lambda: None,
            lambda: None,
            lambda: tell(server, run_id, "RUNNING", preflight=DONE, train_grpo=RUNNING),
            lambda: tell(server, run_id, "SUCCEEDED", preflight=DONE, train_grpo=DONE),
        ]
    )
    assert status.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr), sleep=lambda _: next(steps)()) == 0
    out, error = capsys.readouterr()
    assert out.splitlines() == [
        "[1/11] preflight",
        "      preflight done in 1 min 15 s",
        "[2/11] train_grpo",
        "      train_grpo done in 1 min 15 s",
        f"succeeded  {server.url}/#/runs/details/{run_id}",
    ]
    assert error.count("trying again") == 2


def test_a_terminal_shows_what_is_under_way(
    server: ApiServer,
    run_id: str,
    kubeflow: Kubeflow,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On one line that is drawn over, with the time; lines that stay make way for themselves."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    tell(server, run_id, "RUNNING", preflight=DONE, train_grpo=RUNNING)
    steps: Iterator[Callable[[], None]] = iter(
        [lambda: None, lambda: tell(server, run_id, "SUCCEEDED", preflight=DONE, train_grpo=DONE)]
    )
    seconds = iter(range(0, 1000, 10))
    screen = Screen(sys.stdout, sys.stderr)
    assert status.wait(kubeflow, run_id, screen, sleep=lambda _: next(steps)(), now=lambda: float(next(seconds))) == 0
    out = capsys.readouterr().out
    assert "\r\x1b[K      train_grpo  20.0 s\r\x1b[K      train_grpo  40.0 s\r\x1b[K      train_grpo done" in out


def test_waiting_for_a_run_that_fails_says_why_and_is_no_success(
    server: ApiServer, run_id: str, kubeflow: Kubeflow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the stage's own words or where to look for them, and the page."""
    tell(server, run_id, "FAILED", prepare_data=CACHED, train_sft=FAILED, train_grpo=FAILED, register=LEFT_OUT)
    server.kfp.pods[pod("train-sft", 1)] = "error: train_sft: out of memory\nlower the batch\nF1122 10:06:03 exit\n"
    server.kfp.pods[pod("train-grpo", 1)] = "step 1\n"
    assert status.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr)) == 1
    out, error = capsys.readouterr()
    assert error.splitlines() == [
        "      error: train_sft: out of memory",
        "      lower the batch",
        f"      error: train_grpo ended without an error message; see `grpo-pipeline logs {run_id} --stage train_grpo`",
    ]
    assert "prepare_data not run: the cache has its outputs" in out
    assert "register" not in out
    assert out.splitlines()[-1].startswith("failed  ")


def test_waiting_gives_up_when_nothing_answers(server: ApiServer, run_id: str, kubeflow: Kubeflow) -> None:
    """After ten minutes without an answer, with the code that says to try again."""
    server.faults.add(Fault("GET", "/runs/", status=503, times=1000))
    clock = iter(range(0, 10_000, 100))
    with pytest.raises(RetryableError):
        status.wait(
            kubeflow, run_id, Screen(sys.stdout, sys.stderr), sleep=lambda _: None, now=lambda: float(next(clock))
        )
