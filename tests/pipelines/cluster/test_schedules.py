import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster.schedules import check_cron, describe_cron, next_times
from tests.fake_cluster import ApiServer, Fault, Json
from tests.pipelines.cluster.argo import WORKFLOW, Stage, details, pod
from tests.pipelines.conftest import Program

MONDAY, LATER = "0 0 2 * * 1", "0 0 3 * * 1"
REGISTRY = ("registry=https://git.example.com/registry.git", "register.storage=s3://models/policies")


@pytest.fixture
def apply(program: Program, pipeline: Path) -> Program:
    """`grpo-pipeline schedule apply` for one pipeline."""
    return partial(program, "schedule", "apply", "--pipeline", str(pipeline))


def only(server: ApiServer) -> Json:
    """Return the one schedule there is."""
    (schedule,) = server.kfp.recurring_runs.values()
    return schedule


def fire(server: ApiServer) -> str:
    """Start a run of the schedule, which then trains; return its id."""
    schedule = next(each for each in server.kfp.recurring_runs.values() if each["status"] == "ENABLED")
    run_id = str(server.kfp.fire(schedule, WORKFLOW)["run_id"])
    server.kfp.runs[run_id]["run_details"] = {"task_details": details({"train-grpo": Stage("RUNNING", 1)})}
    server.kfp.pods[pod("train-grpo", 0)] = "step 1\n"
    return run_id


def test_a_schedule_is_created_once_for_a_name(server: ApiServer, apply: Program) -> None:
    """One run at a time, of missed times only the latest; a disabled one is enabled by applying it again."""
    lines, _ = apply("weekly", "--cron", MONDAY, "--set", "train_grpo.num_steps=9")
    created = only(server)
    assert (created["trigger"]["cron_schedule"]["cron"], created["status"]) == (MONDAY, "ENABLED")
    assert (created["no_catchup"], created["max_concurrency"]) == (True, "1")
    assert created["runtime_config"]["parameters"]["grpo_num_steps"] == 9
    about = r"pipeline.yaml at [0-9a-f]{12}(-dirty)?; changed: grpo_num_steps 9; At 02:00, only on Monday \(UTC\); "
    assert re.match(about, created["description"])
    assert lines[0] == "weekly  created: At 02:00, only on Monday (UTC)"
    assert len(lines) == 6
    assert all(line.startswith("    Mon ") and line.endswith("02:00:00 UTC") for line in lines[1:])
    assert apply("weekly", "--cron", MONDAY, "--set", "train_grpo.num_steps=9")[0][0].startswith("weekly  unchanged: ")
    assert only(server) is created
    created["status"] = "DISABLED"
    lines, _ = apply("weekly", "--cron", MONDAY, "--set", "train_grpo.num_steps=9")
    assert lines[0].startswith("weekly  enabled again, and at once if a time passed while it was disabled: ")
    assert created["status"] == "ENABLED"


def test_a_long_description_fits_kubeflows_database(server: ApiServer, apply: Program) -> None:
    """Only what is changed is shortened: the end is read again."""
    settings = [part for number in range(9) for part in ("--set", f"train_grpo.sampling.max_new_tokens={number + 50}")]
    settings += ["--set", f"data_revision={'long-' * 40}"]
    apply("weekly", "--cron", MONDAY, *settings)
    assert len(only(server)["description"]) <= 255
    assert apply("weekly", "--cron", MONDAY, *settings)[0][0].startswith("weekly  unchanged: ")


@pytest.mark.parametrize(
    ("settings", "expected"), [((), False), (REGISTRY, True), ((*REGISTRY, "skip_if_unchanged=false"), False)]
)
def test_scheduled_runs_end_if_nothing_is_new(server: ApiServer, apply: Program, settings: Any, expected: bool) -> None:
    """Where the registry is at a URL, at which the first task can look, unless it is set otherwise."""
    apply("weekly", "--cron", MONDAY, *(part for setting in settings for part in ("--set", setting)))
    assert only(server)["runtime_config"]["parameters"]["skip_if_unchanged"] is expected


@pytest.mark.parametrize("change", [["--cron", LATER], ["--cron", MONDAY, "--set", "train_grpo.num_steps=9"]])
def test_a_changed_schedule_replaces_the_previous_one(server: ApiServer, apply: Program, change: list[str]) -> None:
    """The new one is created before the old one is deleted; an interrupted change is finished by the next call."""
    apply("weekly", "--cron", MONDAY)
    before = only(server)["recurring_run_id"]
    server.faults.add(Fault("DELETE", "/recurringruns/", status=500))
    apply("weekly", *change, code=75)
    assert len(server.kfp.recurring_runs) == 2
    assert apply("weekly", *change)[0][0].startswith("weekly  unchanged: ")
    assert only(server)["recurring_run_id"] != before
    writes = [(each.method, each.path) for each in server.requests if each.method != "GET"]
    assert writes[-4:] == [
        ("POST", "/apis/v2beta1/recurringruns"),
        ("POST", f"/apis/v2beta1/recurringruns/{before}:disable"),
        ("DELETE", f"/apis/v2beta1/recurringruns/{before}"),
        ("DELETE", f"/apis/v2beta1/recurringruns/{before}"),
    ]


def test_a_schedule_is_created_again_after_an_upgrade(server: ApiServer, apply: Program, program: Program) -> None:
    """Kubeflow runs what it compiled when the schedule was created; a server that does not tell changes nothing."""
    server.kfp.version = "2.16.1"
    apply("weekly", "--cron", MONDAY)
    before = only(server)["recurring_run_id"]
    assert program("schedule", "list")[0][1].endswith("  2.16.1")
    server.kfp.version = "unknown"
    assert apply("weekly", "--cron", MONDAY)[0][0].startswith("weekly  unchanged: ")
    server.kfp.version, server.kfp.has_ui = "2.17.0", False
    assert program("schedule", "list")[0][1].endswith("  2.16.1, now 2.17.0: apply it again")
    lines, _ = apply("weekly", "--cron", MONDAY)
    assert lines[0].startswith("weekly  created again, compiled by Kubeflow Pipelines 2.17.0: At 02:00")
    assert only(server)["recurring_run_id"] != before
    assert program("schedule", "list")[0][1].endswith("  2.17.0")
    assert apply("weekly", "--cron", MONDAY)[0][0].startswith("weekly  unchanged: ")


def test_a_schedule_made_on_the_page_is_not_replaced(server: ApiServer, apply: Program, program: Program) -> None:
    """By its name there, with a cron expression or a period; by its id where several have the name."""
    apply("weekly", "--cron", MONDAY)
    only(server)["description"] = "made by hand"
    _, error = apply("weekly", "--cron", MONDAY, code=2)
    assert "weekly: grpo-pipeline did not create the schedule of this name" in error
    period = {"periodic_schedule": {"interval_second": "3600"}}
    other = {**only(server), "recurring_run_id": "other", "trigger": period}
    server.kfp.recurring_runs["other"] = other
    lines, _ = program("schedule", "list")
    assert sorted("every 3,600 s" in line for line in lines[1:]) == [False, True]
    assert all(line.endswith("Kubeflow's page") for line in lines[1:])
    assert sorted("At 02:00, only on Monday (UTC)" in line for line in lines[1:]) == [False, True]
    _, error = program("schedule", "remove", "weekly", code=2)
    assert "weekly: several schedules have this name; give the id of one: " in error
    assert program("schedule", "remove", "other")[0] == ["other  removed"]
    assert program("schedule", "remove", "weekly")[0] == ["weekly  removed"]
    assert server.kfp.recurring_runs == {}


def test_runs_of_a_schedule_are_found_by_its_name(server: ApiServer, apply: Program, program: Program) -> None:
    """The newest: Kubeflow gives them names that nobody can guess. A run's name may be cut short as well."""
    apply("weekly", "--cron", MONDAY)
    fire(server)
    server.clock.advance(60)
    newest = fire(server)
    assert newest in program("status", "weekly")[0][0]
    only(server)["display_name"] = "another"
    server.kfp.runs[newest]["display_name"] = "by-hand-20261126"
    assert newest in program("status", "by-hand")[0][0]


def test_schedules_are_listed_and_removed(server: ApiServer, apply: Program, program: Program) -> None:
    """All of them, also where they fill more than a page."""
    for number in range(101):
        server.kfp.recurring_runs[f"other-{number}"] = {"recurring_run_id": f"other-{number}", "display_name": "last"}
    apply("weekly", "--cron", MONDAY)
    apply("daily", "--cron", "0 30 1 * * *")
    lines, _ = program("schedule", "list")
    assert [line.split()[:2] for line in (lines[1], lines[-1])] == [["daily", "enabled"], ["weekly", "enabled"]]
    assert len(lines) == 104
    assert "At 01:30, every day (UTC)" in lines[1]
    program("schedule", "remove", "daily")
    for number in range(101):
        del server.kfp.recurring_runs[f"other-{number}"]
    assert "daily: no such schedule; there are weekly" in program("schedule", "remove", "daily", code=2)[1]


def test_a_schedule_with_an_unfinished_run_is_removed_later(
    server: ApiServer, apply: Program, program: Program
) -> None:
    """Kubeflow would delete the run with it. It starts no more runs, and goes once the last one has ended.

    Kubeflow takes a run whose workflow somebody has deleted for running for ever: it does not keep its schedule.
    """
    apply("weekly", "--cron", MONDAY)
    ended, run_id = fire(server), fire(server)
    server.kfp.set_state(ended, "SUCCEEDED")
    _, error = program("schedule", "remove", "weekly", code=75)
    assert "weekly: disabled but not removed" in error
    assert run_id in error
    assert ended not in error
    assert only(server)["status"] == "DISABLED"
    assert server.kfp.pods
    server.kfp.pods.clear()
    assert program("schedule", "remove", "weekly")[0] == ["weekly  removed"]
    assert server.kfp.recurring_runs == {}


def test_a_schedule_removed_now_takes_its_run_with_it(server: ApiServer, apply: Program, program: Program) -> None:
    """The run is ended first; Kubeflow never learns that it has, and `status` says so."""
    apply("weekly", "--cron", MONDAY)
    run_id = fire(server)
    lines, _ = program("schedule", "remove", "weekly", "--now")
    assert (lines[0], lines[-1]) == (f"{WORKFLOW}  stopping", "weekly  removed")
    assert (server.kfp.recurring_runs, server.kfp.pods) == ({}, {})
    lines, _ = program("status", run_id)
    assert lines[0] == f"{WORKFLOW}  {run_id}  canceling"
    assert lines[-1].startswith("no pod of the run exists any more")


def test_a_change_waits_for_an_unfinished_run_of_the_previous_schedule(server: ApiServer, apply: Program) -> None:
    """The new schedule is in force at once; the old one is disabled, and goes once its run has ended."""
    apply("weekly", "--cron", MONDAY)
    run_id = fire(server)
    assert run_id in apply("weekly", "--cron", LATER)[1]
    assert sorted(each["status"] for each in server.kfp.recurring_runs.values()) == ["DISABLED", "ENABLED"]
    assert server.kfp.pods
    server.kfp.set_state(run_id, "SUCCEEDED")
    assert run_id not in apply("weekly", "--cron", LATER)[1]
    assert only(server)["trigger"]["cron_schedule"]["cron"] == LATER


@pytest.mark.parametrize(
    ("text", "meaning", "first"),
    [
        ("0 0 2 * * 1", "At 02:00, only on Monday (UTC)", "Mon 2026-11-23 02:00:00 UTC"),
        ("30 15 2,14 * * *", "At 30 seconds past the minute, at 15 minutes", "Sun 2026-11-22 14:15:30 UTC"),
        ("0 0 0 1 */3 ?", "At 00:00, on day 1 of the month, every 3 months (UTC)", "Fri 2027-01-01"),
    ],
)
def test_a_schedule_is_described_in_words_and_times(text: str, meaning: str, first: str) -> None:
    """Six fields with seconds first, in UTC; a time that is now is over."""
    check_cron(text)
    assert describe_cron(text).startswith(meaning)
    times = next_times(text, datetime(2026, 11, 22, 12, 0, tzinfo=UTC))
    assert times[0].startswith(first)
    assert len(set(times)) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 10 * * *", 'write "0 10 10 * * *"'),
        ("@daily", 'day-of-week, such as "0 0 2 * * 1"'),
        ("* 0 2 * * *", "the first field is the second and must be one number, such as 0"),
        ("0 60 2 * * *", "out of range"),
        ("0 0 2 31 FEB *", "never fires"),
        ("0 0 2 1 * MON", "a day of month and a day of week would fire on either; leave one at *"),
    ],
)
def test_a_doubtful_expression_reaches_no_server(server: ApiServer, apply: Program, text: str, message: str) -> None:
    """Kubeflow takes five fields for six without the last; nothing here is guessed."""
    _, error = apply("weekly", "--cron", text, code=2)
    assert error.startswith(f'error: cron "{text}": ')
    assert message in error
    assert server.requests == []
