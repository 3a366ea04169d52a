import sys
from pathlib import Path

import pytest

from components.shared.errors import PipelineError
from pipelines.cli import main
from pipelines.cluster import logs, status
from pipelines.cluster.kubeflow import connect, settings
from pipelines.run.screen import Screen
from tests.fake_cluster import ApiServer, Fault, Json
from tests.pipelines.cluster.argo import WORKFLOW, Stage, details, pod

MONDAY = "0 0 2 * * 1"


@pytest.fixture
def apply(server: ApiServer, pipeline: Path) -> "Apply":
    """`grpo-pipeline schedule apply weekly` with a cron and more."""
    return Apply(pipeline)


class Apply:
    """The command, for one pipeline."""

    def __init__(self, pipeline: Path) -> None:
        self.pipeline = pipeline

    def __call__(self, *more: str, cron: str = MONDAY, name: str = "weekly") -> int:
        """Run it."""
        return main(["schedule", "apply", name, "--cron", cron, "--pipeline", str(self.pipeline), *more])


def only(server: ApiServer) -> Json:
    """The one schedule there is."""
    (schedule,) = server.kfp.recurring_runs.values()
    return schedule


def test_a_schedule_is_made_once_for_a_name(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never two runs at once, of missed times only the latest; its times are said in words and dates."""
    assert apply("--set", "train_grpo.num_steps=9") == 0
    made = only(server)
    assert (made["trigger"]["cron_schedule"]["cron"], made["status"]) == (MONDAY, "ENABLED")
    assert (made["no_catchup"], int(made["max_concurrency"])) == (True, 1)
    assert made["runtime_config"]["parameters"]["train_grpo_num_steps"] == 9
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "weekly  created: At 02:00, only on Monday (UTC)"
    assert len(lines) == 6
    assert all(line.startswith("    Mon ") and line.endswith("02:00:00 UTC") for line in lines[1:])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), False),
        (("register_registry=https://git.example.com/registry.git",), True),
        (("register_registry=https://git.example.com/registry.git", "skip_if_unchanged=false"), False),
    ],
)
def test_scheduled_runs_end_at_once_where_nothing_is_new(
    server: ApiServer, apply: Apply, settings: tuple[str, ...], expected: bool
) -> None:
    """Where the registry is at a URL, at which the first task can look, and nobody says otherwise."""
    assert apply(*(part for setting in settings for part in ("--set", setting))) == 0
    assert only(server)["runtime_config"]["parameters"]["skip_if_unchanged"] is expected


def test_the_same_again_changes_nothing(server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]) -> None:
    """The same object stays, and that is said."""
    apply()
    before = only(server)["recurring_run_id"]
    capsys.readouterr()
    assert apply() == 0
    assert capsys.readouterr().out.startswith("weekly  unchanged: ")
    assert only(server)["recurring_run_id"] == before


@pytest.mark.parametrize("change", [{"cron": "0 0 3 * * 1"}, {"more": ("--set", "train_grpo.num_steps=9")}])
def test_something_else_takes_the_place_of_what_was_there(
    server: ApiServer, apply: Apply, change: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The new one is made before the old one goes: there is no moment without."""
    apply()
    before = only(server)["recurring_run_id"]
    asked = len(server.requests)
    capsys.readouterr()
    assert apply(*change.get("more", ()), cron=change.get("cron", MONDAY)) == 0
    assert capsys.readouterr().out.startswith("weekly  changed: ")
    assert only(server)["recurring_run_id"] != before
    told = [(each.method, each.path) for each in server.requests[asked:] if each.method != "GET"]
    assert told[-3:] == [
        ("POST", "/apis/v2beta1/recurringruns"),
        ("POST", f"/apis/v2beta1/recurringruns/{before}:disable"),
        ("DELETE", f"/apis/v2beta1/recurringruns/{before}"),
    ]


def test_a_change_that_was_interrupted_is_finished_by_the_next(server: ApiServer, apply: Apply) -> None:
    """Two of a name are left where removing the old one failed; one is left after the next apply."""
    apply()
    server.faults.add(Fault("DELETE", "/recurringruns/", status=500, times=1))
    assert apply(cron="0 0 3 * * 1") == 75
    assert len(server.kfp.recurring_runs) == 2
    assert apply(cron="0 0 3 * * 1") == 0
    assert only(server)["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1"


def test_a_schedule_that_was_switched_off_is_switched_on(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is applied is what is asked for."""
    apply()
    only(server)["status"] = "DISABLED"
    capsys.readouterr()
    assert apply() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("weekly  enabled again: ")
    assert lines[1] == "    at once, if a time passed while it was disabled"
    assert only(server)["status"] == "ENABLED"


def test_schedules_of_others_are_left_alone(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the same name that was made in the page is not taken over, listed or removed."""
    apply()
    only(server)["description"] = "made by hand"
    assert apply() == 2
    assert "weekly: grpo-pipeline did not create the schedule of this name" in capsys.readouterr().err
    assert main(["schedule", "remove", "weekly"]) == 2
    assert main(["schedule", "list"]) == 0
    assert capsys.readouterr().out == "no schedules; `grpo-pipeline schedule apply` creates one\n"
    assert len(server.kfp.recurring_runs) == 1


def test_schedules_are_listed_with_their_next_time_and_removed(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them, also where they fill more than a page."""
    for number in range(101):
        server.kfp.recurring_runs[f"other-{number}"] = {"recurring_run_id": f"other-{number}", "display_name": "other"}
    apply(name="weekly")
    apply(name="daily", cron="0 30 1 * * *")
    capsys.readouterr()
    assert main(["schedule", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["daily", "enabled"], ["weekly", "enabled"]]
    assert "At 01:30, every day (UTC)" in lines[1]
    assert main(["schedule", "remove", "daily"]) == 0
    assert main(["schedule", "remove", "daily"]) == 2
    assert "daily: no such schedule; there are weekly" in capsys.readouterr().err


def fire(server: ApiServer) -> str:
    """Have the schedule start a run, which then trains; returns its id."""
    schedule = next(each for each in server.kfp.recurring_runs.values() if each["status"] == "ENABLED")
    run_id = str(server.kfp.fire(schedule, WORKFLOW)["run_id"])
    server.kfp.runs[run_id]["run_details"] = {"task_details": details({"train-grpo": Stage("RUNNING", ["RUNNING"])})}
    server.kfp.pods[pod("train-grpo", 0)] = "step 1\n"
    return run_id


def test_a_schedule_is_not_removed_under_a_run_of_its_own(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubeflow would delete the run with it. It starts no more runs, and goes once the last one has ended."""
    apply()
    ended, run_id = fire(server), fire(server)
    server.kfp.set_state(ended, "SUCCEEDED")
    capsys.readouterr()
    assert main(["schedule", "remove", "weekly"]) == 75
    error = capsys.readouterr().err
    assert "weekly: disabled but not removed" in error
    assert run_id in error
    assert ended not in error
    assert only(server)["status"] == "DISABLED"
    assert server.kfp.pods
    server.kfp.set_state(run_id, "FAILED")
    assert main(["schedule", "remove", "weekly"]) == 0
    assert capsys.readouterr().out == "weekly  removed\n"
    assert server.kfp.recurring_runs == {}


def test_a_run_of_which_nothing_is_left_keeps_no_schedule(server: ApiServer, apply: Apply) -> None:
    """Somebody deleted its workflow; Kubeflow takes it for running for ever."""
    apply()
    fire(server)
    server.kfp.pods.clear()
    assert main(["schedule", "remove", "weekly"]) == 0
    assert server.kfp.recurring_runs == {}


def test_a_run_of_which_nothing_is_left_is_not_waited_for(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubeflow says that it runs, and would for ever."""
    apply()
    run_id = fire(server)
    server.kfp.pods.clear()
    kubeflow = connect(settings({}, endpoint=server.url))
    assert status.wait(kubeflow, run_id, Screen(sys.stdout, sys.stderr), sleep=lambda _: None) == 1
    assert "no pod of the run exists any more" in capsys.readouterr().err
    with pytest.raises(PipelineError, match="no pod of the run exists any more"):
        list(logs.follow(kubeflow, run_id, None, sleep=lambda _: None))


def test_a_schedule_that_is_removed_now_takes_its_run_with_it(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is ended first; Kubeflow never learns that it has, and `status` says so."""
    apply()
    run_id = fire(server)
    capsys.readouterr()
    assert main(["status", run_id]) == 0
    assert "no pod of the run exists any more" not in capsys.readouterr().out
    assert main(["schedule", "remove", "weekly", "--now"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (out[0], out[-1]) == (f"{WORKFLOW}  stopping", "weekly  removed")
    assert (server.kfp.recurring_runs, server.kfp.pods) == ({}, {})
    server.clock.advance(3600)
    assert main(["status", run_id]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{WORKFLOW}  {run_id}  canceling"
    assert out[-1].startswith("no pod of the run exists any more")


def test_a_change_waits_for_the_run_of_what_was_there(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new schedule is in force at once; the old one is disabled, and goes once its run has ended."""
    apply()
    run_id = fire(server)
    capsys.readouterr()
    assert apply(cron="0 0 3 * * 1") == 0
    assert run_id in capsys.readouterr().err
    assert sorted(each["status"] for each in server.kfp.recurring_runs.values()) == ["DISABLED", "ENABLED"]
    assert server.kfp.pods
    server.kfp.set_state(run_id, "SUCCEEDED")
    assert apply(cron="0 0 3 * * 1") == 0
    assert run_id not in capsys.readouterr().err
    assert only(server)["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1"


def test_a_cron_that_means_something_else_reaches_no_server(
    server: ApiServer, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubeflow would take five fields and start runs every minute."""
    assert apply(cron="0 2 * * 1") == 2
    assert 'what other crons write with these five is "0 0 2 * * 1"' in capsys.readouterr().err
    assert server.requests == []
