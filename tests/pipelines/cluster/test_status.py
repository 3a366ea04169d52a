import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from components.shared.errors import RetryableError
from pipelines.cluster import logs, runs
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.stages import is_stopped, stages
from pipelines.run.screen import Screen
from tests.fake_cluster import ApiServer, Fault, Json
from tests.pipelines.cluster.argo import Stage, details, driver_pod, number, pod
from tests.pipelines.conftest import Program

DONE = Stage("SUCCEEDED", 1, ended="2026-11-22T10:01:15Z")
FAILED = Stage("FAILED", 1, "2026-11-22T10:02:00Z", "2026-11-22T12:32:00Z")
FAILED_TWICE = replace(FAILED, attempts=2)
RUNNING = Stage("RUNNING", 1, "2026-11-22T10:02:00Z")
LEFT_OUT = Stage(None, started="2026-11-22T10:03:00Z", driver=None)
UNPREPARED = Stage(None, started="2026-11-22T10:03:00Z", driver="FAILED")
GONE = "its log is gone: Kubeflow has removed the pod, and this address has no archived log of it"
REMOVED = "train_sft: stopped by SIGTERM: the training job grpo-1-2 is removed"
RESUMES = "train_sft: the next run resumes from the checkpoint of step 221"
STEP = "train_grpo 216/400 steps  reward 0.25  accuracy 0.5  2:19 left"
QUEUED = "train_grpo: grpo-1-2 waits in the queue: position 3 in its ClusterQueue; Pending: 4 more needed"
WAITS = "train_grpo: waiting for the result of run 0f1e2d3c (process 24 on node-1), which does the same work in /work/x"
NOISE = 'time=2026 level=INFO\nI1122 10:20:00.02 14 registry.go:68] No plugins\n{\n    "train_grpo 1/1  "\n}\n'
BROKEN_OFF = "Could not get main container logs: Error: socket hang up"


@dataclass
class Run:
    """A run, and the commands that show it."""

    server: ApiServer
    id: str
    kubeflow: Kubeflow
    show: Program
    capsys: pytest.CaptureFixture[str]

    def tell(self, state: str, **stages: Stage) -> None:
        """Set how far the run is."""
        self.server.kfp.set_state(self.id, state)
        named = {name.replace("_", "-"): stage for name, stage in stages.items()}
        for name, stage in named.items():
            for attempt in range(stage.attempts):
                self.server.kfp.pods.setdefault(pod(name, attempt), None)
        self.row["run_details"] = {"task_details": details(named)}

    @property
    def row(self) -> Json:
        """The run as Kubeflow has it."""
        return self.server.kfp.runs[self.id]

    def print(self, stage: str, *attempts: str) -> None:
        """Set what the attempts at a stage have printed."""
        self.server.kfp.pods |= {pod(stage, number): text for number, text in enumerate(attempts)}

    def poll(self, *steps: Callable[[], None]) -> Iterator[Any]:
        """The run at each poll, with a step between polls and a clock that stands still."""
        polls = iter(steps)
        clock = SimpleNamespace(sleep=lambda _: next(polls)(), monotonic=lambda: 0.0)
        return logs.poll(self.kubeflow, self.id, clock)

    def wait(self, *steps: Callable[[], None], code: int, seconds: int = 0) -> tuple[list[str], list[str]]:
        """Wait for the run, with a step at each poll and so many seconds between looks at the clock."""
        polls: Iterator[Callable[[], None]] = iter(steps)
        clock = iter(range(0, 10**6, seconds or 1))
        screen = Screen(sys.stdout, sys.stderr)
        time = SimpleNamespace(sleep=lambda _: next(polls)(), monotonic=lambda: float(next(clock)))
        assert runs.wait(self.kubeflow, self.id, screen, time) == code
        out, error = self.capsys.readouterr()
        return out.splitlines(), [line.strip() for line in error.splitlines()]


@pytest.fixture(scope="module")
def spec(pipeline: Path) -> Json:
    """The pipeline as a run holds it."""
    pipeline_spec, platform_spec = yaml.safe_load_all(pipeline.read_text())
    return {"pipeline_spec": pipeline_spec, "platform_spec": platform_spec}


@pytest.fixture
def run(server: ApiServer, spec: Json, program: Program, capsys: pytest.CaptureFixture[str]) -> Run:
    """A run of it."""
    row = server.kfp.new(server.kfp.runs, "run_id", display_name="nightly", pipeline_spec=spec)
    server.kfp.set_state(row["run_id"], "PENDING")
    return Run(server, row["run_id"], Kubeflow(server.url), program, capsys)


def test_run_that_found_nothing_new_is_told_from_one_that_trained(run: Run) -> None:
    """In the list of runs, and where one is shown with its reason."""
    run.row["runtime_config"] = {"parameters": {"skip_if_unchanged": True}}
    run.tell("SUCCEEDED", preflight=DONE, prepare_data=replace(DONE, state="SKIPPED", attempts=0), train_grpo=LEFT_OUT)
    reason = "preflight: code, data and config are those of policy@v0.0.1, the newest registered version"
    run.print("preflight", f"{reason}\n")
    assert " nightly  nothing new  " in run.show("status")[0][1]
    lines, _ = run.show("status", "nightly")
    assert lines[0].endswith("  nothing new")
    assert lines[-1] == reason
    run.tell("SUCCEEDED", preflight=DONE, prepare_data=DONE)
    assert " nightly  succeeded  " in run.show("status")[0][1]


def test_status_lists_runs_and_the_stages_of_one(run: Run) -> None:
    """By its id, the beginning of it, or its name; a stage that is retried is one stage."""
    run.tell("RUNNING", preflight=DONE, evaluate=DONE, train_grpo=RUNNING)
    header, row = run.show("status")[0]
    assert header.split() == ["run", "name", "state", "started", "(UTC)", "took"]
    assert row.split()[:3] == [run.id[:8], "nightly", "running"]
    for name in (run.id, run.id[:8], "nightly"):
        lines = run.show("status", name)[0][3:-2]
        assert [line.split("  ")[0] for line in lines] == ["stage", "preflight", "evaluate", "train_grpo"]
        assert "1 min 15 s" in lines[1]
    assert "error: weekly: no such run among the last 100" in run.show("status", "weekly", code=2)[1]
    assert "no such run; `grpo-pipeline status` lists them" in run.show("status", "0" * 36, code=2)[1]
    run.server.kfp.new(run.server.kfp.runs, "run_id", display_name="nightly")
    assert "nightly: could be" in run.show("status", "nightly", code=2)[1]


@pytest.mark.parametrize(
    ("stage", "texts", "reason"),
    [
        (FAILED_TWICE, ["error: a: first\n", "1\nerror: a: second\nF1122 10:06:03.1 16 main.go:1] x\n"], ["a: second"]),
        (FAILED, ["error: 2 to correct\nno runtime\n\nx\n"], ["2 to correct", "no runtime"]),
        (FAILED, ["error: no queue\nE1122 10:06:03.044119 16 launcher_v2.go:449] failed\n"], ["no queue"]),
        (
            FAILED,
            ["error: wrapped in\n  a pod, /a/path/is/c\n ut;\n  try\n"],
            ["wrapped in a pod, /a/path/is/cut; try"],
        ),
        (FAILED, ["error: a: lost\nF1122 10:36:09.1 m.go:130] failed: exit status 75\n"], ["a: lost", "this may pass"]),
        (FAILED, ["train_sft 216/400\nError: exit status 143\n"], ["train_sft: stopped from outside (SIGTERM)"]),
        (FAILED, [f"{REMOVED}\n{RESUMES}\ntime=2026 x\nError: exit status 143\n"], [REMOVED, RESUMES]),
        (FAILED, ["step 1\n"], ["train_sft ended without an error message; see `grpo-pipeline logs "]),
        (UNPREPARED, [], ["train_sft: could not be prepared: no such artifact"]),
        (Stage("FAILED"), [], ["train_sft: no pod of it has begun"]),
        (FAILED, [], [f"train_sft: {GONE}"]),
    ],
)
def test_the_reason_of_a_failure_is_shown(run: Run, stage: Stage, texts: list[str], reason: list[str]) -> None:
    """In the stage's own words where it left some: by `status`, and by `submit --wait`, which ends with 1."""
    run.tell("FAILED", preflight=DONE, train_sft=stage, register=LEFT_OUT)
    run.print("train-sft", *texts)
    run.server.kfp.pods[driver_pod("train-sft")] = "I1122 ok\nF1122 10:06:03.12      16 main.go:79] no such artifact\n"
    lines = run.show("status", run.id)[0]
    shown = lines[lines.index("") :][-len(reason) :]
    out, errors = run.wait(code=1)
    expected = [f"error: {reason[0]}", *reason[1:]]
    for found in (shown, errors):
        assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))
    assert ["train_sft", "failed"] in [line.split()[:2] for line in lines]
    assert out[-1] == f"failed  {run.server.url}/#/runs/details/{run.id}"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (f"train_grpo 9/400 steps  reward 0\n{STEP}\n", [STEP]),
        (f"{STEP}\n{QUEUED}\n", [STEP, QUEUED]),
        (f"{QUEUED}\n{STEP}\n", [STEP]),
        (f"{QUEUED}\n", [QUEUED]),
        (f"{WAITS}\n", [WAITS]),
        ("", []),
        (None, ["train_grpo: its pod has not printed anything yet"]),
    ],
)
def test_what_a_running_stage_does_is_shown(run: Run, printed: str | None, shown: list[str]) -> None:
    """In its own words, by `status` with one look at its log, and by `submit --wait` where it has changed."""
    run.tell("RUNNING", preflight=DONE, train_grpo=replace(RUNNING, attempts=2))
    text = None if printed is None else NOISE + printed + NOISE
    run.server.kfp.pods |= {pod("train-grpo", 0): "train_grpo 399/400 steps  reward 1\n", pod("train-grpo", 1): text}
    before = len(run.server.requests)
    assert [line for line in run.show("status", run.id)[0] if line.startswith("train_grpo")][1:] == shown
    paths = [request.path for request in run.server.requests[before:]]
    assert paths.count("/k8s/pod/logs") == 1
    end = [*[lambda: None] * 4, lambda: run.tell("SUCCEEDED", preflight=DONE, train_grpo=DONE)]
    out = run.wait(*end, code=0, seconds=20)[0]
    assert [line.strip() for line in out if line.strip() in shown] == shown


def test_the_outcome_of_a_run_is_shown(run: Run) -> None:
    """The gate's figures and the version, as long as the logs of the stages that printed them exist."""
    verdict = "report: gate passed: grpo 95.5 % against 51.0 % of sft, p 0.0001"
    registered = "register: math@3 registered in /work/registry"
    run.tell("SUCCEEDED", preflight=DONE, report=DONE, register=DONE)
    assert run.show("status", run.id)[0][-1].startswith("register  ")
    run.print("report", f"{NOISE}{verdict}\n")
    run.print("register", f"{registered}\n{NOISE}")
    assert run.show("status", run.id)[0][-3:] == ["", verdict, registered]
    assert [line.strip() for line in run.wait(code=0)[0][-3:-1]] == [verdict, registered]


def test_a_run_that_fails_after_a_retry_was_not_stopped() -> None:
    """The history tells, in which Retry leaves an entry without a state."""
    stopped = [None, "CANCELING", "FAILED"]
    for states, expected in ((stopped, True), ([*stopped, "RUNNING", "FAILED"], False)):
        history = [SimpleNamespace(state=state) for state in states]
        assert is_stopped(SimpleNamespace(state="FAILED", state_history=history)) is expected


def test_a_run_whose_pipeline_version_was_deleted_says_so(run: Run, spec: Json) -> None:
    """A run that was started on Kubeflow's page refers to a version and holds no pipeline."""
    version = run.server.kfp.new(run.server.kfp.versions, "pipeline_version_id", pipeline_spec=spec)
    del run.row["pipeline_spec"]
    identity = version["pipeline_version_id"]
    run.row["pipeline_version_reference"] = {"pipeline_id": "grpo", "pipeline_version_id": identity}
    run.tell("FAILED", preflight=FAILED)
    run.print("preflight", "error: preflight: no runtime\n")
    assert run.show("status", run.id)[0][-1] == "error: preflight: no runtime"
    run.server.kfp.versions.clear()
    assert run.show("status", run.id)[0][-1].startswith("its stages are unknown")


def test_pods_follow_from_the_nodes_that_exist(spec: Json) -> None:
    """Before Kubeflow Pipelines 2.17, where only a task that has retries is wrapped in them."""
    root = "wf.root"
    first, second = (f"{root}.evaluate.executor({attempt})" for attempt in range(2))
    preflight = f"{root}.preflight.executor"
    parents = ["wf", root, f"{root}.preflight", f"{root}.evaluate"]
    nodes = [SimpleNamespace(pod_name=f"wf-{number(path)}") for path in (*parents, first, second, preflight)]
    details = SimpleNamespace(task_details=[SimpleNamespace(display_name="root", child_tasks=nodes)])
    known = stages(SimpleNamespace(pipeline_spec=spec, run_details=details))
    pods = {stage.name: stage.pods for stage in known}
    assert (known[0].name, known[-1].name) == ("preflight", "register")
    retried = "wf-metadata-0-2-retry-system-container-impl-"
    assert pods["evaluate"] == (f"{retried}{number(first)}", f"{retried}{number(second)}")
    assert pods["preflight"] == (f"wf-metadata-0-2-system-container-impl-{number(preflight)}",)


def test_logs_are_printed_under_the_title_of_their_stage(run: Run) -> None:
    """All attempts at it, drivers left out."""
    run.tell("FAILED", evaluate=DONE, train_grpo=FAILED_TWICE)
    run.print("evaluate", "evaluated\n")
    run.print("train-grpo", "one\n", f"two\nthree\n{BROKEN_OFF}")
    attempts = ["==> train_grpo, attempt 1 <==", "one", "==> train_grpo, attempt 2 <==", "two", "three"]
    assert run.show("logs", run.id, "--stage", "train_grpo")[0] == attempts
    assert run.show("logs", run.id, "--stage", "evaluate")[0] == ["==> evaluate <==", "evaluated"]
    assert "trian: no such stage; there are" in run.show("logs", run.id, "--stage", "trian", code=2)[1]


def test_an_attempt_without_an_archived_log_has_its_executor_logs(run: Run) -> None:
    """One for each attempt, at an address that every attempt prints with its inputs."""
    run.tell("RUNNING", train_grpo=replace(RUNNING, attempts=2))
    run.print("train-grpo", "", '        "uri": "minio://bucket/v2/grpo/1/train-grpo/2/executor-logs-1"\ntwo\n')
    run.server.kfp.pods[pod("train-grpo", 0)] = None
    assert f"({GONE})" in run.show("logs", run.id)[0]
    run.server.kfp.artifacts["minio", "bucket", "v2/grpo/1/train-grpo/2/executor-logs-0"] = "one\n"
    lines = run.show("logs", run.id, "--stage", "train_grpo")[0]
    assert lines[:2] == ["==> train_grpo, attempt 1 <==", "one"]
    assert lines[-1] == "two"


def test_logs_without_anything_to_show_fail_and_say_why(run: Run) -> None:
    """Where an installation does not archive logs; an error of the server alone does not count as a log."""
    run.tell("FAILED", preflight=Stage("SUCCEEDED"), train_grpo=FAILED, register=LEFT_OUT)
    lines, error = run.show("logs", run.id, code=2)
    cached = ["==> preflight <==", "(not run: the cache has its outputs)"]
    assert lines == [*cached, "==> train_grpo <==", f"({GONE})"]
    assert error == "error: nightly: no log of any stage is available\n"
    assert "(not reached)" in run.show("logs", run.id, "--stage", "register", code=2)[0]
    run.show("logs", run.id, "--stage", "register", "-f", code=2)
    run.print("train-grpo", BROKEN_OFF)
    run.show("logs", run.id, code=2)


PULLING = {"type": "Normal", "reason": "Pulling", "message": 'Pulling image "grpo:1"'}
NO_SECRET = {"reason": "FailedToRetrieveImagePullSecret", "message": "Unable to retrieve some image pull secrets" * 9}
REFUSED = {
    "reason": "Failed",
    "message": 'Failed to pull image "grpo:1": rpc error: code = Unknown desc = failed to pull and unpack image "grpo:1'
    '": failed to resolve reference "grpo:1": failed to do request: Head "https://ghcr.io/v2": no such host',
}
PULLED = {"type": "Normal", "reason": "Pulled", "message": 'Successfully pulled image "grpo:1" in 2s'}
OVERDUE = {"type": "Normal", "reason": "DeadlineExceeded", "message": "Pod was active on the node longer than ..."}
NOT_PULLED = 'image grpo:1 cannot be pulled: Head "https://ghcr.io/v2": no such host'


@pytest.mark.parametrize(
    ("events", "printed", "now", "at_the_end"),
    [
        ([PULLING], None, "image grpo:1 is being pulled", "image grpo:1 was not pulled in the time of the stage; pull"),
        ([PULLING, NO_SECRET, REFUSED, PULLING, OVERDUE], None, NOT_PULLED, NOT_PULLED),
        ([PULLING, REFUSED], "", NOT_PULLED, NOT_PULLED),
        ([PULLING, REFUSED, PULLED], "error: no queue\n", None, "no queue"),
    ],
)
def test_an_image_that_is_not_there_is_named(
    run: Run, events: list[Json], printed: str | None, now: str | None, at_the_end: str
) -> None:
    """While its stage waits, by `status` and once by `submit --wait`; and as the reason of the failure."""
    place = pod("train-grpo", 0)
    run.tell("RUNNING", train_grpo=RUNNING)
    run.server.kfp.events[place], run.server.kfp.pods[place] = events, printed
    shown = run.show("status", run.id)[0][3:]
    assert shown[2:] == ([] if now is None else ["", f"train_grpo: {now}"])
    steps = [*([lambda: None] * 20), lambda: run.tell("FAILED", train_grpo=FAILED)]
    out, errors = run.wait(*steps, code=1)
    assert [line.strip() for line in out if "image" in line] == ([] if now is None else [f"train_grpo: {now}"])
    reason = at_the_end if now is None else f"train_grpo: {at_the_end}"
    assert errors[-1].startswith(f"error: {reason}")
    assert run.show("status", run.id)[0][-1].startswith(f"error: {reason}")


def test_inside_a_cluster_logs_and_events_come_from_kubernetes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address there is that of the API server, which has none; without Kubernetes the UI's is asked for."""
    run.tell("FAILED", train_sft=FAILED)
    run.server.kfp.has_ui = False
    assert f"({GONE})" in run.show("logs", run.id, code=2)[0]
    about = {"kind": "Pod", "name": pod("train-sft", 0), "namespace": "kubeflow", "uid": "1"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "a", "namespace": "kubeflow"}}
    run.server.cluster.add({**event, "involvedObject": about, "type": "Warning", **REFUSED})
    assert f"({NOT_PULLED})" in run.show("logs", run.id, code=2)[0]
    made = run.server.cluster.add_pod(pod("train-sft", 0))
    run.server.cluster.print(made, "step 1", "error: train_sft: out of memory")
    assert run.show("status", run.id)[0][-1] == "error: train_sft: out of memory"
    monkeypatch.setenv("GRPO_PIPELINE_KUBECONFIG", "/nowhere")
    error = f"error: {run.server.url}: has no /k8s/pod/logs; pass the address of the UI\n"
    assert run.show("logs", run.id, code=2)[1] == error


def test_following_prints_each_line_once_and_ends_with_the_run(run: Run) -> None:
    """A line that is being written waits for its end; a log that is not available now is asked for again."""
    moments = run.poll(
        lambda: run.tell("RUNNING", train_grpo=RUNNING),
        lambda: run.print("train-grpo", "step 1\nste"),
        lambda: run.server.faults.add(Fault("GET", "/log", status=503)),
        lambda: run.print("train-grpo", "step 1\nstep 2\n"),
        lambda: run.print("train-grpo", "step 1\nstep 2\nlast words"),
        lambda: run.tell("SUCCEEDED", train_grpo=DONE),
    )
    assert list(logs.logs(run.kubeflow, moments, None)) == ["==> train_grpo <==", "step 1", "step 2", "last words"]


def test_waiting_shows_each_stage_when_it_begins_and_ends(run: Run) -> None:
    """Once each, also where the server does not answer for a while."""
    out, errors = run.wait(
        lambda: run.tell("RUNNING", preflight=RUNNING),
        lambda: run.server.faults.add(Fault("GET", "/runs/", status=503, times=2)),
        lambda: None,
        lambda: None,
        lambda: run.tell("RUNNING", preflight=DONE, train_grpo=RUNNING),
        lambda: run.tell("RUNNING", preflight=DONE, train_grpo=replace(RUNNING, attempts=2)),
        lambda: run.tell("SUCCEEDED", preflight=DONE, train_grpo=replace(DONE, attempts=2)),
        code=0,
    )
    assert out == [
        "[1/8] preflight",
        "      preflight done in 1 min 15 s",
        "[2/8] train_grpo",
        "      train_grpo attempt 2",
        "      train_grpo done in 1 min 15 s",
        f"succeeded  {run.server.url}/#/runs/details/{run.id}",
    ]
    assert sum(line.endswith("trying again") for line in errors) == 2


def test_waiting_gives_up_after_ten_minutes_without_an_answer(run: Run) -> None:
    """With the code that says to try again."""
    run.server.faults.add(Fault("GET", "/runs/", status=503, times=1000))
    with pytest.raises(RetryableError):
        run.wait(*[lambda: None] * 100, code=0, seconds=100)


def test_a_run_without_pods_is_not_waited_for(run: Run) -> None:
    """Somebody deleted its workflow: Kubeflow takes it for running for ever."""
    run.tell("RUNNING", train_grpo=RUNNING)
    run.server.kfp.pods.clear()
    assert run.show("status", run.id)[0][-1].startswith("no pod of the run exists any more")
    with pytest.raises(logs.LostRunError, match="no pod of the run exists any more"):
        run.wait(*[lambda: None] * 20, code=1)
    with pytest.raises(logs.LostRunError):
        list(run.poll(*[lambda: None] * 20))
