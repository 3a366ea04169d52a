import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from components.cluster import kube, trainjob
from components.cluster.job import Job
from components.shared.work import OvertakenError, WorkFolder
from tests.cluster.launched import RESULT, KilledError, Launched, clock_of
from tests.fake_cluster import Change, kinds, script
from tests.fake_cluster.http import Request

NUM_REQUESTS = 24
"""More than it takes to submit a job, watch it for a while and remove it."""


def _at_request(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object], *, has_effect: bool) -> None:
    """Do something at one of this thread's requests: before it is sent, or once it has had its effect."""
    real, left = kube._Client.call_api, itertools.count(number, -1)

    def call_api(*arguments: Any, **options: Any) -> Any:
        is_now = threading.current_thread() is threading.main_thread() and next(left) == 0
        if is_now and not has_effect:
            act()
        try:
            return real(*arguments, **options)
        finally:
            if is_now and has_effect:
                act()

    monkeypatch.setattr(kube._Client, "call_api", call_api)


def _kill() -> None:
    raise KilledError


each_request = pytest.mark.parametrize("number", range(NUM_REQUESTS))


@pytest.mark.parametrize("has_effect", [False, True])
@each_request
def test_step_that_is_killed_at_any_request_is_repeated(
    job: Launched, monkeypatch: pytest.MonkeyPatch, number: int, has_effect: bool
) -> None:
    """Pods of one job at a time write to the folder of checkpoints, and a job that can go on is adopted."""

    def look(change: Change) -> None:
        if change.type == "ADDED" and change.kind == kinds.PODS:
            pods = job.cluster.all(kinds.PODS)
            assert len({pod["metadata"]["labels"][kube.JOB_SET] for pod in pods}) == 1

    job.server.store.listen(look)
    job.play(*job.success(script.Running(100)))
    with monkeypatch.context() as patched, suppress(KilledError):
        _at_request(patched, number, _kill, has_effect=has_effect)
        job.run()
        raise AssertionError("the step has ended before")
    job.server.clock.advance(30)
    assert job.run() == RESULT
    assert job.num_submissions() <= 2
    assert job.trainjobs() == job.cluster.all(kinds.PODS) == []


@pytest.mark.parametrize("has_effect", [False, True])
@each_request
def test_step_that_is_stopped_at_any_request_leaves_no_job(
    job: Launched, monkeypatch: pytest.MonkeyPatch, number: int, has_effect: bool
) -> None:
    """Not even one whose creation was under way."""
    job.play(*job.success(script.Running(100)))
    _at_request(monkeypatch, number, lambda: signal.raise_signal(signal.SIGTERM), has_effect=has_effect)
    with pytest.raises(SystemExit, match="143"):
        job.run()
    assert job.trainjobs() == []


def test_job_whose_creation_is_under_way_is_deleted_too(job: Launched) -> None:
    """The request to stop arrives once the other request was sent, and the job appears after its first deletion."""
    is_deleted = threading.Event()

    def before(request: Request) -> None:
        if request.method == "DELETE":
            is_deleted.set()
        if request.method == "POST":
            os.kill(os.getpid(), signal.SIGTERM)
            assert is_deleted.wait(60)
            time.sleep(0.05)

    job.server.before = before
    with pytest.raises(SystemExit, match="143"):
        job.run()
    assert [request.method for request in job.server.requests].count("DELETE") == 3
    assert job.trainjobs() == []


@pytest.mark.parametrize("disturbance", ["drain", "evict", "remove", "pause"])
def test_disturbed_training_goes_on(job: Launched, disturbance: str) -> None:
    """As the same job: its pods start anew, once Kueue admits it or the controllers are back."""
    job.cluster.add_runtime(max_restarts=1)
    job.changes.update(queue="research")

    def disturb() -> None:
        pod = job.cluster.all(kinds.PODS)[0]["metadata"]["name"]
        match disturbance:
            case "drain":
                job.cluster.drain(pod)
            case "evict":
                job.cluster.evict(pod)
            case "remove":
                job.cluster.remove(kinds.PODS, pod)
            case "pause":
                job.cluster.controllers_return_s = job.server.clock.monotonic() + 300

    job.play(script.Queued(30), script.Running(60), script.Do(disturb), script.Running(60), *job.success())
    assert job.run() == RESULT
    assert job.num_submissions() == 1
    assert job.trainjobs() == job.cluster.all(kinds.PODS) == []


@pytest.mark.parametrize(("until_s", "ending"), [(150, "stops"), (150, "finishes"), (230, "stops"), (1e9, "")])
def test_queued_job_leaves_its_folder_to_another_run(
    job: Launched, monkeypatch: pytest.MonkeyPatch, until_s: float, ending: str
) -> None:
    """Its pods begin once it has the folder again; it is removed if the other run goes on, or finishes the work."""
    mine = WorkFolder("train_grpo", job.root / job.work, "mine")
    others: list[WorkFolder] = []
    turns: list[str] = []
    monkeypatch.setattr(trainjob, "current_work", lambda: mine)

    def sleep(seconds: float) -> None:
        job.server.clock.advance(seconds)
        if job.server.clock.monotonic() > 120 and not others:  # it was preempted
            others.append(WorkFolder("train_grpo", job.root / job.work, "other"))
        if others and others[0].is_locked:
            assert Job.turn(job.job.folder) == ""
            if job.server.clock.monotonic() > until_s:
                if ending == "finishes":
                    (job.root / f"{job.work}.json").write_text("results")
                others[0].unlock()

    job.changes.update(queue="research")
    begin = script.Do(lambda: turns.append(Job.turn(job.job.folder)))
    first = (script.Queued(30), script.Running(60), begin, script.Preempted(100))
    job.play(*first, script.Running(100), begin, *job.success())
    clock = replace(clock_of(job.server), sleep=sleep)
    if ending != "stops":
        with pytest.raises(OvertakenError):
            job.run(clock)
    else:
        assert job.run(clock) == RESULT
        assert mine.is_locked
        assert turns == [job.records("trainjob.json")["metadata"]["name"]] * 2
    assert job.trainjobs() == []
