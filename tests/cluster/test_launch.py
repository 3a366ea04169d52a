import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pytest

from components.cluster import kube
from components.cluster.trainjob import run_on_cluster
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from tests.cluster.launched import RESULT, RUN_ID, Launched, launched
from tests.fake_cluster import ApiServer, Change, Fault, kinds, runtime, script


class Make(Protocol):
    """Makes a job for the test's cluster."""

    def __call__(self, **changes: Any) -> Launched:
        """With these settings of the cluster."""
        ...


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster with the runtime."""
    with ApiServer() as server:
        yield server


@pytest.fixture
def make(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that makes a job for it."""
    return lambda **changes: launched(server, tmp_path / "volume", monkeypatch, **changes)


def test_a_job_that_goes_well(make: Make, server: ApiServer, capfd: pytest.CaptureFixture[str]) -> None:
    """Its log and phases are in the step's, its result and outputs are the call's, and it is removed."""
    job = make()
    server.cluster.play(*job.goes_well())
    assert job.run() == RESULT
    assert (job.root / "policy" / "weights").read_text() == "learned"
    lines = capfd.readouterr().out.splitlines()
    name = next(request for request in server.requests if request.method == "POST").object()["metadata"]["name"]
    assert [line for line in lines if line.startswith("step")] == ["step 1", "step 2"]
    assert [line for line in lines if name in line][:4] == [
        f"train_grpo: submitted {name}",
        f"train_grpo: {name} waits for its pods to run",
        f"train_grpo: {name} runs",
        f"train_grpo: {name} is complete",
    ]
    assert job.trainjobs() == []
    assert server.cluster.all(kinds.PODS) == []


def test_fields_that_the_cluster_does_not_know_are_refused(make: Make, server: ApiServer) -> None:
    """An older Trainer would drop the patches of pods without a word, and with them volume and GPUs."""
    job = make()
    server.cluster.play(*job.goes_well())
    job.run()
    (submission,) = [request for request in server.requests if request.method == "POST"]
    assert submission.query["fieldValidation"] == "Strict"


def test_what_is_kept_of_a_job(make: Make, server: ApiServer) -> None:
    """Manifest, pods, events, logs and what the ranks said outlive it."""
    job = make()
    server.cluster.play(*job.goes_well())
    job.run()
    assert job.records("trainjob.json")["metadata"]["labels"][kube.RUN_ID] == RUN_ID
    assert len(job.records("pods.json")) == 2
    assert {"Scheduled", "Started"} <= {event["reason"] for event in job.records("events.json")}
    assert job.records("rank-0.log") == "step 1\nstep 2\n"
    assert job.records("rank-1.json") == {"result": RESULT, "exit_code": 0}


def test_a_queued_and_preempted_job_is_waited_for(
    make: Make, server: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Suspended at first, suspended again while it runs: each time it waits in the queue, and nothing is given up."""
    job = make(queue="research")
    server.cluster.play(script.Queued(1800), script.Running(60), *job.goes_well(script.Preempted(3000)))
    assert job.run() == RESULT
    said = [line.split(" ", 2)[2] for line in capfd.readouterr().out.splitlines() if "train_grpo: grpo-" in line]
    assert [each for each in said if "pods" not in each] == [
        "waits in the queue",
        "runs",
        "waits in the queue again",
        "runs again",
        "is complete",
    ]


@pytest.mark.parametrize(
    ("changes", "steps", "error", "message"),
    [
        pytest.param(
            {"queue": "research"},
            (script.Queued(None),),
            RetryableError,
            r"not admitted by the queue within 3600 s \(cluster.queue_timeout_s\)",
            id="queue",
        ),
        pytest.param(
            {},
            (script.Unschedulable(None),),
            RetryableError,
            r"not all pods run within 900 s \(cluster.start_timeout_s\): .*Insufficient nvidia.com/gpu",
            id="no node",
        ),
        pytest.param(
            {},
            (script.PullBackOff(None),),
            PipelineError,
            "ImagePullBackOff: .*python-gpu:1.*is cluster.image right",
            id="no image",
        ),
        pytest.param({}, (script.OUT_OF_MEMORY,), PipelineError, "ran out of memory.*memory_per_node_gib", id="memory"),
        pytest.param({}, (script.NCCL_HANGS,), RetryableError, "Watchdog caught collective operation", id="nccl"),
        pytest.param(
            {},
            (script.Failed(2, lines=("no such option",)),),
            PipelineError,
            "ended with exit code 2",
            id="exit code 2",
        ),
        pytest.param({}, (script.Failed(75),), RetryableError, "ended with exit code 75", id="exit code 75"),
        pytest.param({}, (script.Failed(143),), RetryableError, "ended with exit code 143", id="told to stop"),
        pytest.param({}, (script.NodeLost(1),), RetryableError, "jobset failed", id="node lost"),
        pytest.param(
            {"training_timeout_s": 600},
            (script.Running(None, ("step 1",)),),
            PipelineError,
            "ran for longer than cluster.training_timeout_s",
            id="deadline",
        ),
        pytest.param(
            {}, (script.Running(None, ("step 1",)),), RetryableError, "nothing was printed for 1200 s", id="stalled"
        ),
    ],
)
def test_what_goes_wrong_is_named(
    make: Make,
    server: ApiServer,
    changes: dict[str, Any],
    steps: tuple[script.Step, ...],
    error: type[Exception],
    message: str,
) -> None:
    """One line with the cause; the error says whether to try again; nothing is left in the cluster."""
    job = make(**changes)
    server.cluster.play(*steps)
    with pytest.raises(error, match=message) as raised:
        job.run()
    assert type(raised.value) is error or isinstance(raised.value, RetryableError)
    assert "\n" not in str(raised.value)
    assert job.trainjobs() == []
    assert job.records("trainjob.json")


def test_what_a_rank_says_is_the_cause(make: Make, server: ApiServer, capfd: pytest.CaptureFixture[str]) -> None:
    """Not the exit code of its pod; the end of its pod's log is printed."""
    job = make()
    failed = script.Failed(2, lines=("Traceback: the data are no data",), rank=1)
    complain = script.Do(lambda: job.fail(rank=1, error="the data are no data", exit_code=2))
    server.cluster.play(script.Running(5), complain, failed)
    with pytest.raises(PipelineError, match=r"^the data are no data$"):
        job.run()
    assert "Traceback: the data are no data" in capfd.readouterr().out


def test_a_rank_that_was_killed_is_named(make: Make, server: ApiServer) -> None:
    """With its signal, and that the job may go on."""
    job = make()
    server.cluster.play(script.Running(5), script.Do(lambda: job.fail(rank=1, exit_code=-9)), script.Failed(137))
    with pytest.raises(RetryableError, match="rank 1 was killed by SIGKILL"):
        job.run()


def test_a_complete_job_without_results_is_no_success(make: Make, server: ApiServer) -> None:
    """Whatever the cluster says, what counts is what every rank has left."""
    job = make()
    server.cluster.play(script.Running(5), script.Complete())
    with pytest.raises(RetryableError, match="is complete, but not every rank has left a result"):
        job.run()


def test_a_failure_after_all_ranks_have_ended_well_is_none(make: Make, server: ApiServer) -> None:
    """A node that is lost while a pod is torn down costs nothing."""
    job = make()
    server.cluster.play(script.Running(5), script.Do(job.work), script.NodeLost(1))
    assert job.run() == RESULT


def test_a_job_that_may_go_on_is_submitted_again(make: Make, server: ApiServer) -> None:
    """As often as the settings allow, with all that was kept of each attempt."""
    job = make(max_restarts=2)
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            server.cluster.play(*job.goes_well())

    server.cluster.play(script.Running(5), script.Do(turn), script.Failed(75))
    assert job.run() == RESULT
    assert len(turns) == 2
    assert [path.name for path in sorted(job.cluster.records.iterdir())] == ["attempt-1", "attempt-2", "attempt-3"]


def test_a_job_that_hangs_is_submitted_again(make: Make, server: ApiServer) -> None:
    """It is removed first, or it would be taken over as it is."""
    job = make(max_restarts=1)
    turns: list[None] = []

    def turn() -> None:
        turns.append(None)
        server.cluster.play(*job.goes_well())

    server.cluster.play(script.Do(turn), script.Running(None, ("step 1",)))
    assert job.run() == RESULT
    assert len(turns) == 1
    assert len([request for request in server.requests if request.method == "POST"]) == 2


def test_a_mistake_is_not_made_twice(make: Make, server: ApiServer) -> None:
    """What no restart would cure is not tried again."""
    job = make(max_restarts=2)
    server.cluster.play(script.Running(5), script.Failed(2))
    with pytest.raises(PipelineError):
        job.run()
    assert len([request for request in server.requests if request.method == "POST"]) == 1


def test_a_running_job_is_adopted(make: Make, server: ApiServer, capfd: pytest.CaptureFixture[str]) -> None:
    """A step that is run again while its job still runs goes on watching it, as its new owner."""
    job = make()
    server.cluster.play(*job.goes_well(script.Running(300)))
    submit_and_die(job, server)
    (running,) = job.trainjobs()
    server.clock.advance(100)
    assert job.run() == RESULT
    assert "exists already and is adopted" in capfd.readouterr().out
    assert len([request for request in server.requests if request.method == "POST"]) == 1
    assert job.records("trainjob.json")["metadata"]["uid"] == running["metadata"]["uid"]


def test_a_job_belongs_to_the_run_and_outlives_the_pod_of_its_step(
    make: Make, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is lost takes the pod of the step; the next attempt adopts the job, which has not been restarted."""
    job = make()
    server.cluster.play(*job.goes_well(script.Running(300)))
    workflow = server.cluster.add_workflow("run-1")
    enter_pod(server, monkeypatch, "launcher-1", workflow)
    submit_and_die(job, server)
    (before,) = job.trainjobs()
    (owner,) = before["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Workflow", workflow["metadata"]["uid"])
    server.cluster.remove(kinds.PODS, "launcher-1")
    server.clock.advance(100)
    enter_pod(server, monkeypatch, "launcher-2", workflow)
    assert job.run() == RESULT
    assert job.records("trainjob.json")["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_job_goes_with_its_run(make: Make, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting the workflow of a run, by hand or after its time to live, removes what the run has made."""
    job = make()
    server.cluster.play(script.Running(None))
    enter_pod(server, monkeypatch, "launcher-1", server.cluster.add_workflow("run-1"))
    submit_and_die(job, server)
    server.cluster.remove(kinds.WORKFLOWS, "run-1")
    server.clock.advance(5)
    assert job.trainjobs() == []


def test_an_adopted_job_belongs_to_the_new_run(make: Make, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that Kubeflow tries again after its workflow has gone has another workflow, but the same id."""
    job = make()
    server.cluster.play(*job.goes_well(script.Running(300)))
    for name in ("run-1", "run-2"):
        enter_pod(server, monkeypatch, f"launcher-of-{name}", server.cluster.add_workflow(name))
        submit_and_die(job, server)
        assert [each["name"] for each in job.trainjobs()[0]["metadata"]["ownerReferences"]] == [name]


def test_a_job_of_a_pod_that_nothing_controls_has_no_owner(
    make: Make, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat alone says for how long somebody waits for it."""
    enter_pod(server, monkeypatch, "by-hand", None)
    job = make()
    server.cluster.play(*job.goes_well())
    assert job.run() == RESULT
    assert "ownerReferences" not in job.records("trainjob.json")["metadata"]


def test_a_job_in_another_namespace_has_no_owner(
    make: Make, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster would take the owner for one that is gone, and remove the job at once."""
    enter_pod(server, monkeypatch, "launcher", server.cluster.add_workflow("run-1"))
    server.cluster.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpus"}})
    there = runtime("grpo-torch")
    server.cluster.add({**there, "metadata": {**there["metadata"], "namespace": "gpus"}})
    job = make(namespace="gpus")
    server.cluster.play(*job.goes_well())
    assert job.run() == RESULT
    assert job.records("trainjob.json")["metadata"]["namespace"] == "gpus"
    assert "ownerReferences" not in job.records("trainjob.json")["metadata"]


def test_a_job_that_has_ended_is_not_adopted(make: Make, server: ApiServer) -> None:
    """It is removed and submitted anew: training goes on from its newest checkpoint."""
    job = make(max_restarts=0)
    server.cluster.play(script.Running(5), script.Failed(75))
    submit_and_die(job, server)
    server.clock.advance(60)
    server.cluster.play(*job.goes_well())
    assert job.run() == RESULT


def test_a_finished_job_is_not_run_again(make: Make, server: ApiServer) -> None:
    """Where the step was killed between its job's end and its own, what the ranks made is taken as it is."""
    job = make()
    server.cluster.play(*job.goes_well())
    submit_and_die(job, server)
    server.clock.advance(60)
    assert job.run() == RESULT
    assert (job.root / "policy" / "weights").read_text() == "learned"
    assert len([request for request in server.requests if request.method == "POST"]) == 1
    assert job.trainjobs() == []


def test_a_finished_job_without_its_outputs_is_run_again(make: Make, server: ApiServer) -> None:
    """They were moved by a step that was killed before they stood."""
    job = make()
    server.cluster.play(*job.goes_well())
    job.run()
    shutil.rmtree(job.root / "policy")
    assert job.run() == RESULT
    assert (job.root / "policy" / "weights").read_text() == "learned"


def test_another_job_of_the_same_stage_gives_way(make: Make, server: ApiServer) -> None:
    """Two would write the same checkpoints: what an attempt with other settings has left is removed first."""
    job = make()
    server.cluster.play(script.Running(None))
    submit_and_die(job, server)
    other = make_other(job, cpu_per_node=3)
    server.cluster.play(*other.goes_well())
    assert other.run() == RESULT
    assert other.trainjobs() == []


@pytest.mark.parametrize("before", ["has ended", "has other settings", "is of another run"])
def test_no_two_jobs_of_a_stage_are_there_at_once(make: Make, server: ApiServer, before: str) -> None:
    """Their pods would write one folder of checkpoints: a job is made when nothing is left of the one before."""
    job = make()
    is_over = before == "has ended"
    server.cluster.play(*((script.Running(5), script.Failed(75)) if is_over else (script.Running(None),)))
    submit_and_die(job, server)
    server.clock.advance(60)
    (old,) = job.trainjobs()
    there: list[str] = []

    def look(change: Change) -> None:
        if change.type == "ADDED" and change.kind == kinds.TRAIN_JOBS:
            found = [*server.cluster.all(kinds.TRAIN_JOBS), *server.cluster.all(kinds.PODS)]
            there.extend(each["metadata"]["name"] for each in found if each["metadata"]["uid"] != _uid(change.after))

    server.store.listen(look)
    other = job if is_over else make_other(job, cpu_per_node=3)
    if before == "is of another run":
        other = replace(job, run_id="ffffffff-0000-4000-8000-000000000000")
    server.cluster.play(*other.goes_well())
    assert other.run() == RESULT
    assert there == []
    assert other.records("trainjob.json")["metadata"]["uid"] != _uid(old)


@pytest.mark.parametrize(
    ("delete", "well", "left"),
    [("always", True, 0), ("always", False, 0), ("on_success", True, 0), ("on_success", False, 1), ("never", True, 1)],
)
def test_what_becomes_of_an_ended_job(make: Make, server: ApiServer, delete: str, well: bool, left: int) -> None:
    """As the settings say; one that is left has no heartbeat, so that the reaper leaves it too."""
    job = make(delete=delete)
    server.cluster.play(*(job.goes_well() if well else (script.Failed(2),)))
    if well:
        job.run()
    else:
        with pytest.raises(PipelineError):
            job.run()
    assert len(job.trainjobs()) == left
    assert all(kube.HEARTBEAT not in each["metadata"]["annotations"] for each in job.trainjobs())


def test_a_job_that_has_not_ended_is_never_left(make: Make, server: ApiServer) -> None:
    """It would start once there is room, with nobody there."""
    job = make(delete="never", queue="research", queue_timeout_s=60)
    server.cluster.play(script.Queued(None))
    with pytest.raises(RetryableError, match="not admitted by the queue"):
        job.run()
    assert job.trainjobs() == []


def test_a_job_that_was_deleted_is_submitted_again(
    make: Make, server: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training goes on from its checkpoint: who wants a run to end ends the run. The log tells of it."""
    job = make(max_restarts=1)

    def delete() -> None:
        server.cluster.play(*job.goes_well())
        server.cluster.remove(kinds.TRAIN_JOBS, job.trainjobs()[0]["metadata"]["name"])

    server.cluster.play(script.Running(50), script.Do(delete))
    assert job.run() == RESULT
    assert "somebody has deleted the training job; trying again with grpo-" in capfd.readouterr().out


def test_a_job_that_is_deleted_again_and_again_is_given_up(make: Make, server: ApiServer) -> None:
    """As often as the settings allow, and not for ever."""
    job = make(max_restarts=2)
    delete = script.Do(lambda: server.cluster.remove(kinds.TRAIN_JOBS, job.trainjobs()[0]["metadata"]["name"]))
    server.cluster.play(script.Running(50), delete)
    with pytest.raises(RetriesExhaustedError, match="somebody has deleted the training job"):
        job.run()
    assert len([request for request in server.requests if request.method == "POST"]) == 3


@pytest.mark.parametrize(("path", "times", "lasts_s"), [("/trainjobs/", 36, 1100), ("/trainjobs", 46, 940)])
def test_an_api_server_that_is_away_for_long_costs_no_training(
    make: Make, server: ApiServer, capfd: pytest.CaptureFixture[str], path: str, times: int, lasts_s: int
) -> None:
    """The step waits for it a second time, and adopts the job, which has gone on meanwhile, or takes its result."""
    job = make(max_restarts=1)
    away = script.Do(lambda: server.faults.add(Fault("GET", path, status=503, times=times)))
    server.cluster.play(*job.goes_well(script.Running(60), away, script.Running(lasts_s, ("step 1",))))
    assert job.run() == RESULT
    said = capfd.readouterr().out
    assert "within 900 s" in said
    assert "trying again with grpo-" in said
    assert len([request for request in server.requests if request.method == "POST"]) == 1


def test_the_heart_beats(make: Make, server: ApiServer) -> None:
    """While the job waits and runs, never more than a minute apart."""
    job = make()
    server.cluster.play(*job.goes_well(script.Running(600)))
    job.run()
    beats = [each.time for each in server.requests if each.method == "PATCH" and each.status == 200]
    assert len(beats) >= 12
    assert max(later - earlier for earlier, later in pairwise(beats)) <= 60


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault(status=429, retry_after_s=2, times=5)], id="throttled"),
        pytest.param([Fault(status=503, times=8)], id="restarted"),
        pytest.param([Fault(drop="before", times=8)], id="connections lost"),
        pytest.param([Fault("GET", "/trainjobs/", status=410, times=3)], id="expired"),
        pytest.param([Fault("POST", drop="after")], id="submitted, and the answer lost"),
        pytest.param([Fault("POST", status=500, effect=True)], id="submitted, and an error answered"),
        pytest.param([Fault("DELETE", drop="after", times=2)], id="deleted, and the answer lost"),
        pytest.param([Fault("GET", "/log", drop="before", times=50)], id="log out of reach"),
        pytest.param([Fault("GET", "/log", cut_after=40, times=3)], id="log cut off"),
        pytest.param([Fault("GET", "/events", status=500, times=50)], id="no events"),
        pytest.param([Fault("PATCH", status=500, times=50)], id="no heartbeats"),
    ],
)
def test_a_cluster_that_stumbles(make: Make, server: ApiServer, faults: list[Fault]) -> None:
    """Nothing of it makes a success a failure, or leaves anything behind."""
    job = make()
    server.cluster.play(*job.goes_well(script.Running(120, tuple(f"line {number}" for number in range(30)))))
    server.faults.add(*faults)
    assert job.run() == RESULT
    assert job.trainjobs() == []


def test_a_new_token_is_taken_up(make: Make, server: ApiServer) -> None:
    """Tokens of pods are replaced while they run."""
    job = make()

    def rotate() -> None:
        server.access.rotate()
        server.kubeconfig(job.root / "kubeconfig")

    server.cluster.play(*job.goes_well(script.Running(50), script.Do(rotate)))
    assert job.run() == RESULT
    assert job.trainjobs() == []


def test_what_is_not_allowed_is_said_at_once(make: Make, server: ApiServer) -> None:
    """With the cluster's own words."""
    job = make()
    server.access.rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    with pytest.raises(PipelineError, match=r"refuses to list training jobs: .*cannot list resource"):
        job.run()


def test_a_cluster_that_does_not_answer_is_given_up(make: Make, server: ApiServer) -> None:
    """In its time, and named."""
    job = make()
    server.faults.add(Fault(status=503, times=10_000))
    with pytest.raises(RetryableError, match="the API server did not list training jobs within 900 s"):
        job.run()


def enter_pod(server: ApiServer, monkeypatch: pytest.MonkeyPatch, name: str, workflow: dict[str, Any] | None) -> None:
    """Be in a pod of the cluster, as Kubeflow Pipelines tells its steps."""
    monkeypatch.setenv("KFP_POD_NAME", name)
    monkeypatch.setenv("KFP_POD_UID", server.cluster.add_pod(name, workflow)["metadata"]["uid"])


class KilledError(BaseException):
    """Nothing handles it."""


class DyingClock:
    """A clock that ends the step when it first waits between two looks at its job."""

    def __init__(self, server: ApiServer) -> None:
        self.monotonic, self.now, self._advance = server.clock.monotonic, server.clock.now, server.clock.advance

    def sleep(self, seconds: float) -> None:
        """Let time pass, or end."""
        if seconds == 10:
            raise KilledError
        self._advance(seconds)


def submit_and_die(job: Launched, server: ApiServer) -> None:
    """A step that is killed outright once its job runs."""
    (job.root / "policy").mkdir(exist_ok=True)
    with pytest.raises(KilledError):
        run_on_cluster(job.job, job.cluster, DyingClock(server))


def _uid(document: dict[str, Any]) -> str:
    uid: str = document["metadata"]["uid"]
    return uid


def make_other(job: Launched, **changes: Any) -> Launched:
    """The same job with other settings."""
    return Launched(job.server, job.root, {**job.changes, **changes})
