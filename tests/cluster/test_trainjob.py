import re
import shutil
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from components.cluster import kube
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from tests.cluster.launched import RESULT, RUN_ID, Launched, clock_of
from tests.fake_cluster import Change, Fault, kinds, script


def test_successful_job(job: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """Log, phases, result and outputs are those of the step; records stay, and the cluster is empty."""
    job.play(*job.success())
    assert job.run() == RESULT
    assert (job.root / "policy" / "weights").read_text() == "learned"
    (submission,) = [request for request in job.server.requests if request.method == "POST"]
    assert submission.query["fieldValidation"] == "Strict", "an older Trainer would drop patches: volume and GPUs"
    name = submission.object()["metadata"]["name"]
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step 1", "step 2"]
    assert [line for line in lines if name in line][:4] == [
        f"train_grpo: submitted {name}",
        f"train_grpo: {name} is waiting for its pods",
        f"train_grpo: {name} runs",
        f"train_grpo: {name} is complete",
    ]
    assert job.trainjobs() == job.cluster.all(kinds.PODS) == []
    assert job.records("trainjob.json")["metadata"]["labels"][kube.RUN_ID] == RUN_ID
    assert len(job.records("pods.json")) == 2
    assert {"Scheduled", "Started"} <= {event["reason"] for event in job.records("events.json")}
    assert job.records("rank-0.log") == "step 1\nstep 2\n"
    assert job.records("rank-1.json") == {"result": RESULT, "exit_code": 0}


_TOO_LARGE = (
    "insufficient quota for cpu in flavor x, podsets requests (0) + current podset request (5) > maximum capacity (4)"
)


@pytest.mark.parametrize(
    ("message", "is_final"),
    [
        ("LocalQueue research doesn't exist", True),
        (f"couldn't assign flavors to pod set node: {_TOO_LARGE}", True),
        ("couldn't assign flavors to pod set node: resource nvidia.com/gpu unavailable in ClusterQueue", True),
        (f"{_TOO_LARGE}, insufficient unused quota for cpu in flavor y, 4 more needed", False),
    ],
)
def test_a_queue_that_never_admits_the_job_ends_the_run(job: Launched, message: str, is_final: bool) -> None:
    """As soon as Kueue says so: waiting for a day changes nothing. A flavor that is only in use may be free later."""
    job.changes.update(queue="research", queue_timeout_s=300)
    job.play(script.Queued(None, message))
    final = rf"{re.escape(message)}; name another queue \(cluster.queue\), or ask for less$"
    with pytest.raises(PipelineError, match=final if is_final else "not admitted by the queue within 300 s"):
        job.run()


def test_what_a_queued_job_waits_for_is_printed_every_few_minutes_at_most(
    job: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its position and Kueue's reasons, where they have changed; a preemption too."""
    jobs = [f"other-{number}" for number in range(20)]
    spec = {"active": True, "queueName": "theirs", "podSets": []}
    kind = {"apiVersion": kinds.WORKLOADS.api_version, "kind": kinds.WORKLOADS.name}
    job.cluster.add(*({**kind, "metadata": {"name": name}, "spec": spec} for name in jobs))

    def leave(seconds: float) -> None:
        job.server.clock.advance(seconds)
        if jobs and job.server.clock.monotonic() > 20 * (21 - len(jobs)):
            job.cluster.remove(kinds.WORKLOADS, jobs.pop())

    job.changes.update(queue="research")
    job.play(script.Queued(600), script.Running(60), *job.success(script.Preempted(60)))
    assert job.run(replace(clock_of(job.server), sleep=leave)) == RESULT
    assert job.num_submissions() == 1
    waits = [line.split(": ", 2)[2] for line in capfd.readouterr().out.splitlines() if "waits in the queue: " in line]
    short = f"Pending: {script.Queued().message}"
    *before, preempted = waits
    assert [wait.partition("; ")[2] for wait in before] == [short] * 4
    places = [int(wait.split()[1]) for wait in before]
    assert places == sorted(places, reverse=True)
    assert len(set(places)) == 4
    assert f"{short}; Preempted: Preempted to accommodate a workload" in preempted


FAILURES: dict[str, tuple[script.Step, type[PipelineError], str]] = {
    "queue": (script.Queued(None), RetryableError, r"not admitted .* within 300 s \(cluster.queue_timeout_s\)"),
    "no-node": (script.Unschedulable(None), RetryableError, r"not all pods run .* \(cluster.start_timeout_s\): .*gpu"),
    "no-image": (script.PullBackOff(None), PipelineError, "ImagePullBackOff: .*python-gpu:1.*is cluster.image right"),
    "memory": (script.OUT_OF_MEMORY, PipelineError, "ran out of memory.*memory_per_node_gib"),
    "node-lost": (script.NodeLost(1), RetryableError, "jobset failed"),
    "no-results": (script.Complete(), RetryableError, "not every rank has left a result"),
    "stalled": (script.Running(None, ("step 1",)), RetryableError, "nothing was printed for 1200 s"),
    "deadline": (script.Running(None, ("step 1",)), PipelineError, "ran for longer than cluster.training_timeout_s"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failure_is_named(job: Launched, name: str) -> None:
    """In one line, with an exit code that says whether to try again; nothing stays in the cluster."""
    step, error, message = FAILURES[name]
    job.changes.update({"queue": "research", "queue_timeout_s": 300} if name == "queue" else {})
    job.changes.update({"training_timeout_s": 600} if name == "deadline" else {})
    job.play(step)
    with pytest.raises(error, match=message) as raised:
        job.run()
    assert isinstance(raised.value, RetryableError) == (error is RetryableError)
    assert "\n" not in str(raised.value)
    assert job.trainjobs() == []
    assert job.records("trainjob.json")


def test_error_of_a_rank_is_that_of_the_step(job: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """Rather than the exit code of its pod; the end of the pod's log is printed."""
    job.changes.update(max_restarts=2)
    report = script.Do(lambda: job.fail(1, "the data are no data", 2))
    job.play(script.Running(5), report, script.Failed(2, lines=("Traceback: no data",), rank=1))
    with pytest.raises(PipelineError, match=r"^the data are no data$"):
        job.run()
    assert "Traceback: no data" in capfd.readouterr().out
    assert job.num_submissions() == 1, "a restart would not cure it"


def test_failure_after_all_ranks_have_succeeded_is_ignored(job: Launched) -> None:
    """For example a node that is lost while a pod is torn down."""
    job.play(script.Running(5), script.Do(job.succeed), script.NodeLost(1))
    assert job.run() == RESULT


@pytest.mark.parametrize("ending", [script.Failed(75), script.Running(None, ("step 1",))])
def test_job_is_submitted_again_after_transient_failures(
    job: Launched, ending: script.Step, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that hangs is removed first, as it would be adopted; training goes on from its checkpoint."""
    job.changes.update(max_restarts=2, stall_timeout_s=120)
    job.play(script.Running(5), script.Do(lambda: job.play(*job.success())), ending)
    assert job.run() == RESULT
    assert job.num_submissions() == 2
    assert [path.name for path in sorted(job.stage.records.iterdir())] == ["attempt-1", "attempt-2"]
    assert "trying again with grpo-" in capfd.readouterr().out


def test_retries_are_limited(job: Launched) -> None:
    """To max_restarts, also where somebody deletes the job each time."""
    job.changes.update(max_restarts=2)
    delete = script.Do(lambda: job.cluster.remove(kinds.TRAIN_JOBS, job.trainjobs()[0]["metadata"]["name"]))
    job.play(script.Running(50), delete)
    with pytest.raises(RetriesExhaustedError, match="somebody has deleted the training job"):
        job.run()
    assert job.num_submissions() == 3


def test_running_job_is_adopted(
    job: Launched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A lost node takes the step's pod; the next attempt adopts the job, which belongs to the run, and goes on."""
    job.play(*job.success(script.Running(1200)))
    workflow = job.cluster.add_workflow("run-1", **{kube.KFP_RUN_ID: job.run_id})
    _enter_pod(job, monkeypatch, "launcher-1", workflow)
    job.submit_and_die()
    (before,) = job.trainjobs()
    (owner,) = before["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Workflow", workflow["metadata"]["uid"])
    job.server.clock.advance(1000)
    _enter_pod(job, monkeypatch, "launcher-2", workflow)
    assert job.run() == RESULT
    assert "exists already and is adopted" in capfd.readouterr().out
    assert job.num_submissions() == 1
    assert job.records("trainjob.json")["metadata"]["uid"] == before["metadata"]["uid"]


@pytest.mark.parametrize("namespace", ["", "gpus"])
def test_job_without_an_owner(job: Launched, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    """Where nothing controls the step's pod; or in another namespace, whose owners Kubernetes takes for deleted."""
    _enter_pod(job, monkeypatch, "launcher", job.cluster.add_workflow("run-1") if namespace else None)
    job.cluster.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpus"}})
    job.cluster.add_runtime(namespace="gpus")
    job.changes.update(namespace=namespace)
    job.play(*job.success())
    assert job.run() == RESULT
    metadata = job.records("trainjob.json")["metadata"]
    assert metadata["namespace"] == (namespace or job.server.namespace)
    assert "ownerReferences" not in metadata


def test_results_of_an_earlier_attempt_are_used(job: Launched) -> None:
    """Where the step was killed and its job succeeded; without its outputs the job is run again."""
    job.play(*job.success())
    job.submit_and_die()
    job.server.clock.advance(60)
    assert job.run() == RESULT
    assert (job.root / "policy" / "weights").read_text() == "learned"
    assert job.num_submissions() == 1
    assert job.trainjobs() == []
    shutil.rmtree(job.root / "policy")  # it was moved by a step that was killed before its outputs were published
    assert job.run() == RESULT
    assert job.num_submissions() == 2


@pytest.mark.parametrize(
    "before", ["failed", "has other settings", "is removed", "is of another run", "is removed with its run"]
)
def test_two_jobs_never_share_a_folder_of_checkpoints(job: Launched, before: str) -> None:
    """A job is created once nothing is left of the job before, and of its pods."""
    failed = before == "failed"
    job.play(*((script.Running(5), script.Failed(75)) if failed else (script.Running(None),)))
    job.submit_and_die()
    job.server.clock.advance(60)
    (old,) = job.trainjobs()
    left: list[str] = []

    def look(change: Change) -> None:
        if change.type == "ADDED" and change.kind == kinds.TRAIN_JOBS:
            found = [*job.cluster.all(kinds.TRAIN_JOBS), *job.cluster.all(kinds.PODS)]
            left.extend(each["metadata"]["name"] for each in found if each["metadata"]["uid"] != _uid(change.after))

    job.server.store.listen(look)
    other = job if failed or before == "is removed" else replace(job, changes={**job.changes, "cpu_per_node": 7})
    if "run" in before:
        other = replace(other, run_id="another-run")
    if "is removed" in before:
        job.cluster.remove(kinds.TRAIN_JOBS, old["metadata"]["name"])
    job.play(*other.success())
    assert other.run() == RESULT
    assert left == []
    assert other.records("trainjob.json")["metadata"]["uid"] != _uid(old)


@pytest.mark.parametrize(
    ("running_s", "message"), [(200, f"is adopted from run name of {RUN_ID}"), (5, "has succeeded before")]
)
def test_job_of_another_run_with_the_same_work_is_adopted(
    job: Launched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], running_s: float, message: str
) -> None:
    """Its step is lost, and this one has the lock: training goes on, now for this run, or its result is taken."""
    _enter_pod(job, monkeypatch, "launcher-1", job.cluster.add_workflow("run-1"))
    job.play(*job.success(script.Running(running_s)))
    job.submit_and_die()
    job.server.clock.advance(60)
    other = replace(job, run_id="another-run", inputs="copies")
    _enter_pod(other, monkeypatch, "launcher-2", job.cluster.add_workflow("run-2"))
    assert other.run() == RESULT
    assert message in capfd.readouterr().out
    assert job.num_submissions() == 1
    if running_s > 60:
        adopted = other.records("trainjob.json")["metadata"]
        assert adopted["labels"][kube.RUN_ID] == "another-run"
        assert [each["name"] for each in adopted["ownerReferences"]] == ["run-2"]


@pytest.mark.parametrize(("path", "times", "lasts_s"), [("/trainjobs/", 36, 1100), ("/trainjobs", 46, 940)])
def test_job_outlives_a_long_absence_of_the_api_server(
    job: Launched, capfd: pytest.CaptureFixture[str], path: str, times: int, lasts_s: int
) -> None:
    """The step waits for it a second time, and adopts the job that has run on, or takes its results."""
    job.changes.update(max_restarts=1)
    away = script.Do(lambda: job.server.faults.add(Fault("GET", path, status=503, times=times)))
    job.play(*job.success(script.Running(60), away, script.Running(lasts_s, ("step 1",))))
    assert job.run() == RESULT
    assert re.search(r"within 900 s.*trying again with grpo-", capfd.readouterr().out)
    assert job.num_submissions() == 1


def test_a_training_that_prints_goes_on_with_its_heartbeat(job: Launched) -> None:
    """However long it takes, beside a job of other work; the heartbeat is renewed at least every minute."""
    other = replace(job, run_id="another-run", work="other-work")
    job.play(script.Running(None))
    other.submit_and_die()
    job.changes.update(stall_timeout_s=120)
    job.play(script.Running(5 * 120, tuple(f"step {number}" for number in range(40))), *job.success())
    job.run()
    assert [each["metadata"]["labels"][kube.RUN_ID] for each in job.trainjobs()] == ["another-run"]
    beats = [each.time for each in job.server.requests if each.method == "PATCH" and each.status == 200]
    assert len(beats) >= 12
    assert max(later - earlier for earlier, later in pairwise(beats)) <= 60


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, retry_after_s=2, times=5),
        Fault(drop="before", times=8),
        Fault("POST", drop="after"),
        Fault("DELETE", drop="after", times=2),
        Fault("GET", "/log", status=403, times=100_000),
        Fault("GET", "/events", status=500, times=50),
        Fault("PATCH", status=500, times=50),
    ],
)
def test_transient_faults_change_nothing(job: Launched, fault: Fault) -> None:
    """A successful job succeeds, and nothing stays in the cluster."""
    job.play(*job.success(script.Running(120, tuple(f"line {number}" for number in range(30)))))
    job.server.faults.add(fault)
    assert job.run() == RESULT
    assert job.trainjobs() == []


def _enter_pod(job: Launched, monkeypatch: pytest.MonkeyPatch, name: str, workflow: dict[str, Any] | None) -> None:
    """Be in a pod of the cluster, as Kubeflow Pipelines tells its steps."""
    monkeypatch.setenv("KFP_POD_NAME", name)
    job.cluster.add_pod(name, workflow)


def _uid(document: dict[str, Any]) -> str:
    uid: str = document["metadata"]["uid"]
    return uid
