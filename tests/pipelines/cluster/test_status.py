import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.shared.errors import RetryableError
from pipelines.cli import main
from pipelines.cluster import logs, wait
from pipelines.cluster.connection import connect, settings
from pipelines.cluster.runs import Cluster
from pipelines.screen import Screen
from tests.cluster.api_server import ApiServer, Fault
from tests.pipelines.cluster.argo import Stage, details, pod

DONE = Stage("SUCCEEDED", ["SUCCEEDED"], ended="2026-11-22T10:01:15Z")
FAILED = Stage("FAILED", ["FAILED", "FAILED"], "2026-11-22T10:02:00Z", "2026-11-22T12:32:00Z")
RUNNING = Stage("RUNNING", ["RUNNING"], "2026-11-22T10:02:00Z")


@pytest.fixture
def run_id(server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A run that was submitted."""
    assert main(["submit", "--pipeline", str(pipeline), "--name", "nightly"]) == 0
    capsys.readouterr()
    (run,) = server.kfp.runs
    return run


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    """The way to it."""
    return Cluster(connect(settings({}, endpoint=server.url)), server.url, None)


def tell(server: ApiServer, run_id: str, state: str, **stages: Stage) -> None:
    """Have a run be as far as this."""
    server.kfp.set_state(run_id, state)
    named = {name.replace("_", "-"): stage for name, stage in stages.items()}
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
    assert [line.split("  ")[0] for line in out.splitlines()] == ["stage", "evaluate sft", "preflight", "train_grpo"]
    assert "1 min 15 s" in out.splitlines()[2]


def test_status_says_why_a_stage_failed(server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the stage's own words, from its last attempt."""
    tell(server, run_id, "FAILED", preflight=DONE, train_grpo=FAILED)
    server.kfp.logs[run_id, pod("train-grpo", 0)] = "error: train_grpo: first\n"
    server.kfp.logs[run_id, pod("train-grpo", 1)] = (
        "step 1\nerror: train_grpo: out of memory on node 0 (OOMKilled)\nF1122 exit\n"
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
    server.kfp.logs |= {
        (run_id, pod("evaluate-2", 0)): "evaluated\n",
        (run_id, pod("train-grpo", 0)): "one\n",
        (run_id, pod("train-grpo", 1)): "two\nthree\n",
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


def test_a_pod_that_has_not_begun_has_no_log_and_that_is_said(
    server: ApiServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image that is still pulled is no error of the command."""
    tell(server, run_id, "RUNNING", train_grpo=RUNNING)
    assert main(["logs", run_id]) == 0
    assert "is waiting to start: ContainerCreating" in capsys.readouterr().out


def test_following_prints_each_line_once_and_ends_with_the_run(
    server: ApiServer, run_id: str, cluster: Cluster
) -> None:
    """A line that is being written waits for its end; a log that cannot be had for a moment is asked for again."""
    train = pod("train-grpo", 0)
    steps: Iterator[Callable[[], None]] = iter(
        [
            lambda: tell(server, run_id, "RUNNING", train_grpo=RUNNING),
            lambda: server.kfp.logs.update({(run_id, train): "step 1\nste"}),
            lambda: server.faults.add(Fault("GET", "/log", status=503, times=1)),
            lambda: server.kfp.logs.update({(run_id, train): "step 1\nstep 2\n"}),
            lambda: server.kfp.logs.update({(run_id, train): "step 1\nstep 2\nlast words"}),
            lambda: tell(server, run_id, "SUCCEEDED", train_grpo=DONE),
        ]
    )
    lines = list(logs.follow(cluster, run_id, None, sleep=lambda _: next(steps)()))
    assert lines == ["==> train_grpo <==", "step 1", "step 2", "last words"]


def test_waiting_tells_a_run_as_plain_lines(
    server: ApiServer, run_id: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
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
    assert wait.wait(cluster, run_id, Screen(sys.stdout, sys.stderr), sleep=lambda _: next(steps)()) == 0
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
    cluster: Cluster,
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
    assert wait.wait(cluster, run_id, screen, sleep=lambda _: next(steps)(), now=lambda: float(next(seconds))) == 0
    out = capsys.readouterr().out
    assert "\r\x1b[K      train_grpo  20.0 s\r\x1b[K      train_grpo  40.0 s\r\x1b[K      train_grpo done" in out


def test_waiting_for_a_run_that_fails_says_why_and_is_no_success(
    server: ApiServer, run_id: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the stage's own words, and the page."""
    tell(server, run_id, "FAILED", preflight=DONE, train_grpo=FAILED)
    assert wait.wait(cluster, run_id, Screen(sys.stdout, sys.stderr)) == 1
    out, error = capsys.readouterr()
    assert f"train_grpo ended without a word; `grpo-pipeline logs {run_id} --stage train_grpo`" in error
    assert out.splitlines()[-1].startswith("failed  ")


def test_waiting_gives_up_when_nothing_answers(server: ApiServer, run_id: str, cluster: Cluster) -> None:
    """After ten minutes without an answer, with the code that says to try again."""
    server.faults.add(Fault("GET", "/runs/", status=503, times=1000))
    clock = iter(range(0, 10_000, 100))
    with pytest.raises(RetryableError):
        wait.wait(cluster, run_id, Screen(sys.stdout, sys.stderr), sleep=lambda _: None, now=lambda: float(next(clock)))
