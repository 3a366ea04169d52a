"""The check of a cluster finds what does not hold, and nothing else: here on a fake one, which plays the runs."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kubernetes.client import CoreV1Api

from components.cluster import kube
from components.cluster.kube import Clock, TrainJobs
from components.preflight.config import load_params
from components.shared.environment import ENDPOINT_VARIABLES, KUBECONFIG_VARIABLE
from components.shared.results import Record, Result
from components.shared.work import locked_work
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.stages import FINISHED
from pipelines.run.screen import Screen
from tests.fake_cluster import ApiServer, Json, kinds
from tests.pipelines.cluster.argo import Stage, details, pod
from tests.pipelines.cluster.cluster_check import (
    LONG_STEPS,
    NO_QUEUE,
    ROOT,
    STEP,
    UPLOAD,
    Acceptance,
    Cluster,
    LocalRun,
    cleaning,
    forwarded,
    report,
)
from tests.pipelines.cluster.recorded import RECORDINGS

pytestmark = pytest.mark.slow
DIGEST = "0123456789abcdef" * 4
PAGE = "<!DOCTYPE html>\n<html><body>all fine</body></html>\n"
UPLOADED = {"validate_data": "data_page", "report": "report_page", "register": "registration_page"}
_TICK_S, _LASTS_S, _RESTART_S, _STEPS_PER_S = 1.0, 60.0, 30.0, 2


class Here(LocalRun):
    """A run on this machine that has ended."""

    def start(self, params: Path) -> None:
        """Check that the params can be run here."""
        assert not load_params(params).register.registry.startswith("/work")

    def digests(self) -> dict[str, str] | None:
        """Return the digests that the cluster should have registered."""
        return {"policy/weights": DIGEST}


@dataclass
class Training:
    """A run that is in GRPO: its job, and the launchers it has had."""

    run_id: str
    started_s: float
    first_step: int
    launchers: list[str] = field(default_factory=list)
    lost_s: float | None = None
    """Since when it has no launcher."""


class Player:
    """Plays the runs that are submitted, as Kubeflow and Argo would; `fault` is what goes wrong."""

    def __init__(self, server: ApiServer, fault: str) -> None:
        self._server, self._fault = server, fault
        self._started: dict[str, float] = {}
        self._training: dict[str, Training] = {}
        self._kept_step = 0
        self._fired = False
        server.clock.call_in(_TICK_S, self._tick)

    def _tick(self) -> None:
        kfp, now = self._server.kfp, self._server.clock.monotonic()
        for run_id, run in list(kfp.runs.items()):
            if run_id in self._started:
                self._go_on(run_id, run, now)
            else:
                self._started[run_id] = now
                kfp.set_state(run_id, "RUNNING")
        for schedule in list(kfp.recurring_runs.values()):
            if schedule["status"] == "ENABLED" and self._fault != "no schedule" and not self._fired:
                self._fired = True
                kfp.fire(schedule, "scheduled-1")
        for each in self._server.cluster.all(kinds.PODS):
            if each["metadata"]["name"].startswith("cluster-check-") and "status" not in each:
                self._server.cluster.store.replace({**each, "status": {"phase": "Succeeded"}})
        self._server.clock.call_in(_TICK_S, self._tick)

    def _go_on(self, run_id: str, run: Json, now: float) -> None:
        if run["state"] in ("CANCELING", *FINISHED):
            self._end_training(run_id)
            return
        values = run["runtime_config"]["parameters"]
        lasted = now - self._started[run_id]
        if NO_QUEUE in values.values():
            self._fail(run_id)
        elif LONG_STEPS in values.values():
            self._train(run_id, now)
        elif lasted > _LASTS_S:
            self._succeed(run_id)

    def _fail(self, run_id: str) -> None:
        text = f"error: no LocalQueue {NO_QUEUE}\n" if self._fault != "no reason" else "Error: exit status 1\n"
        self._show(run_id, preflight=Stage("FAILED", 1), logs={"preflight": text})
        self._server.kfp.set_state(run_id, "FAILED")

    def _succeed(self, run_id: str) -> None:
        digest = "f" * 64 if self._fault == "other bytes" else DIGEST
        files = dict.fromkeys(UPLOADED.items(), PAGE)
        files["register", "registration/digests.json"] = f'{{"policy/weights": "{digest}"}}'
        if self._fault == "half a page":
            files["report", "report_page"] = PAGE[:30]
        if self._fault == "a page with a script":
            files["report", "report_page"] = PAGE.replace("all fine", "<script>1</script>")
        logs = {stage: f"{stage}: done\n" for stage in UPLOADED}
        for (stage, name), content in files.items():
            key = f"v2/artifacts/{run_id}/{stage}/{name}"
            self._server.kfp.artifacts["minio", "mlpipeline", key] = content
            upload = f'uploadFile(localFilePath="/minio/mlpipeline/{key}", blobFilePath="{name}")'
            logs[stage] += f"I1122 10:12:41.846351      15 object_store.go:231] {upload}\n"
        done = Stage("SUCCEEDED", 1)
        if self._fault == "a red run":
            self._show(run_id, preflight=done, train_sft=Stage("FAILED", 1), logs={"train_sft": "error: bad\n"})
            self._server.kfp.set_state(run_id, "FAILED")
            return
        self._show(run_id, logs=logs, **dict.fromkeys(_stages(self._server.kfp.runs[run_id]), done))
        self._server.kfp.set_state(run_id, "SUCCEEDED")

    def _train(self, run_id: str, now: float) -> None:
        cluster = self._server.cluster
        training = self._training.get(run_id)
        if training is None:
            resumed = self._fault != "no checkpoint" and self._kept_step
            training = self._training[run_id] = Training(run_id, now, self._kept_step if resumed else 0)
            labels = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: run_id}
            self._add_job(f"grpo-{len(self._training)}", labels)
            self._launch(training)
        if training.launchers[-1] not in {each["metadata"]["name"] for each in cluster.all(kinds.PODS)}:
            training.lost_s = training.lost_s or now
            if self._fault == "job goes with its launcher":
                for job in cluster.all(kinds.TRAIN_JOBS):
                    cluster.remove(kinds.TRAIN_JOBS, job["metadata"]["name"])
                    self._add_job(job["metadata"]["name"], job["metadata"]["labels"])
            if self._fault == "no other attempt":
                self._server.kfp.set_state(run_id, "FAILED")
            elif now - training.lost_s > _RESTART_S:
                self._launch(training)
        self._kept_step = training.first_step + int((now - training.started_s) * _STEPS_PER_S)
        text = f"train_grpo {self._kept_step}/{LONG_STEPS}  reward 0.5\n"
        if self._fault == "interrupted" and training.lost_s:
            raise KeyboardInterrupt
        self._show(
            run_id,
            train_grpo=Stage("RUNNING", len(training.launchers)),
            logs={"train_grpo": text},
        )

    def _add_job(self, name: str, labels: dict[str, str]) -> None:
        reference = {"kind": "TrainingRuntime", "name": "grpo-torch"}
        job = {"apiVersion": f"{kube.GROUP}/{kube.VERSION}", "kind": "TrainJob", "spec": {"runtimeRef": reference}}
        self._server.cluster.add({**job, "metadata": {"name": name, "labels": dict(labels)}})

    def _launch(self, training: Training) -> None:
        name = f"launcher-{training.run_id}-{len(training.launchers)}"
        launcher = self._server.cluster.add_pod(name)
        labels = {"pipeline/runid": training.run_id, "grpo-pipeline/task": "train-grpo"}
        metadata = {**launcher["metadata"], "labels": labels}
        self._server.cluster.store.replace({**launcher, "metadata": metadata})
        training.launchers.append(name)

    def _end_training(self, run_id: str) -> None:
        training = self._training.get(run_id)
        if training:
            self._server.cluster.remove(kinds.PODS, training.launchers[-1])
        if training and self._fault == "a job that stays" and not self._server.cluster.all(kinds.TRAIN_JOBS):
            self._fault = ""
            self._add_job("grpo-1", {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: run_id})

    def _show(self, run_id: str, logs: dict[str, str], **stages: Stage) -> None:
        """Set how far a run is, and what the last attempts at its stages have printed."""
        named = {name.replace("_", "-"): stage for name, stage in stages.items()}
        self._server.kfp.runs[run_id]["run_details"] = {"task_details": details(named)}
        for stage, text in logs.items():
            name = stage.replace("_", "-")
            self._server.kfp.pods[pod(name, named[name].attempts - 1)] = text


def _stages(run: Json) -> list[str]:
    """Return the stages of the graph of a run."""
    spec = run["pipeline_spec"]["pipeline_spec"]
    components = spec["components"]
    tasks = [
        task for each in (spec["root"], *components.values()) for task in each.get("dag", {}).get("tasks", {}).items()
    ]
    return [name for name, task in tasks if "executorLabel" in components[task["componentRef"]["name"]]]


@pytest.fixture
def connected(server: ApiServer, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The fake cluster as the check sees it, with a clock that nobody waits for, and a graph that is compiled once."""
    monkeypatch.setattr("pipelines.cluster.submission.compiled", lambda *_: pipeline)
    time = Clock(server.clock.monotonic, server.clock.sleep, server.clock.now)
    api = kube.connect()
    jobs, pods = TrainJobs(api, "kubeflow"), CoreV1Api(api)
    return Cluster(Kubeflow(server.url), jobs, pods, load_params(ROOT / "params.yaml"), time)


FIRST, PAGES, BYTES = "the first run succeeds", "its pages open in the UI", "it registers the bytes of this machine"
FAILURE, LAUNCHER = "a failed run says why", "a run goes on without its launcher"
STOP, RESUME = "a stopped run frees its resources", "the same run goes on from its checkpoint"
SCHEDULE = "a schedule fires and can be removed"


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        ("", []),
        ("a red run", [FIRST, PAGES, BYTES]),
        ("half a page", [PAGES]),
        ("a page with a script", [PAGES]),
        ("other bytes", [BYTES]),
        ("no reason", [FAILURE]),
        ("job goes with its launcher", [LAUNCHER]),
        ("no other attempt", [LAUNCHER, STOP, RESUME]),
        ("a job that stays", [STOP]),
        ("no checkpoint", [RESUME]),
        ("no schedule", [SCHEDULE]),
    ],
)
def test_what_does_not_hold_is_found_and_nothing_else(
    server: ApiServer, connected: Cluster, tmp_path: Path, fault: str, missed: list[str]
) -> None:
    """Where all of it holds, nothing is left behind; otherwise nothing that runs."""
    Player(server, fault)
    acceptance = Acceptance(connected, Here(tmp_path), tmp_path)
    assert acceptance.run(Screen(sys.stdout, sys.stderr)) == (not missed)
    assert [row.title for row in acceptance.rows if not row.held] == missed, report(acceptance.rows)
    assert server.kfp.recurring_runs == {}
    assert {run["state"] for run in server.kfp.runs.values()} <= {"SUCCEEDED", "FAILED"}
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    long = load_params(tmp_path / "long.yaml")
    assert long.train_grpo.reward.max_steps_without_signal == 0, "it would end by itself"
    if not missed:
        assert (server.kfp.runs, server.kfp.experiments, server.cluster.all(kinds.PODS)) == ({}, {}, [])


def test_an_interrupted_check_ends_its_runs(server: ApiServer, connected: Cluster, tmp_path: Path) -> None:
    """Here in mid-training; they can still be looked at."""
    Player(server, "interrupted")
    with pytest.raises(KeyboardInterrupt):
        Acceptance(connected, Here(tmp_path), tmp_path).run(Screen(sys.stdout, sys.stderr))
    assert len(server.kfp.runs) == 3
    assert {run["state"] for run in server.kfp.runs.values()} <= FINISHED
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


def test_only_what_the_check_made_is_removed_from_the_volume(tmp_path: Path) -> None:
    """Its registry, runs, unfinished work and results; another run's stay."""
    ours, theirs = "11111111-ours", "22222222-theirs"
    for name, run_id, seed in (("cluster-check-1", ours, 123456789), ("cluster-check-2", theirs, 1234567890)):
        root = tmp_path / "grpo-pipeline"
        for folder in (tmp_path / name / "registry", root / run_id / "train_sft/reference"):
            folder.mkdir(parents=True)
        fingerprint = {"config": {"seed": seed}, "inputs": {}, "code": ""}
        work = locked_work(root / "work", "train_grpo", fingerprint)
        with suppress(KeyboardInterrupt), work as unfinished:
            (unfinished.folder / "checkpoint").touch()
            raise KeyboardInterrupt
        outputs = {"reference": root / run_id / "train_sft/reference"}
        Record(root / "work", "train_sft", fingerprint).add(Result.of(run_id, outputs, seconds=1.0, metrics={}))
    script = cleaning(str(tmp_path), "cluster-check-1", 123456789, [ours])
    subprocess.run(["sh", "-c", script], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster-check-2", "grpo-pipeline"]
    assert sorted(path.name for path in (tmp_path / "grpo-pipeline").iterdir()) == [theirs, "work"]
    left = sorted(path for path in (tmp_path / "grpo-pipeline/work").glob("*/*") if not path.name.startswith("."))
    assert [path.parent.name for path in left] == ["train_grpo", "train_sft"]
    assert all("1234567890" in path.read_text() or theirs in path.read_text() for path in left if path.is_file())


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"{RECORDINGS} is not here")
def test_lines_that_are_read_are_those_of_real_logs() -> None:
    """Where Kubeflow's launcher puts a file, and how far GRPO is."""
    trained = UPLOAD.findall((RECORDINGS / "logs/train_sft-succeeded.txt").read_text())
    assert {source for source, *_ in trained} == {"minio"}
    assert any(key.endswith("/training/curves.csv") for *_, key in trained)
    steps = list(map(int, STEP.findall((RECORDINGS / "logs/train_grpo-terminated.txt").read_text())))
    assert (steps[0], steps[-1]) == (85, 216)


def test_runs_can_be_kept(server: ApiServer, connected: Cluster, tmp_path: Path) -> None:
    """To be looked at: five with that of the schedule, all ended."""
    Player(server, "")
    acceptance = Acceptance(connected, Here(tmp_path), tmp_path, keep=True)
    assert acceptance.run(Screen(sys.stdout, sys.stderr))
    assert f"the cluster {server.url}, namespace kubeflow" in acceptance.plan(server.url)[0]
    assert report(acceptance.rows)[-1].startswith("9 of 9 checks held")
    assert len(server.kfp.runs) == 5
    assert {run["state"] for run in server.kfp.runs.values()} <= FINISHED


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "error: no registry has images :dev; set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints"),
        ({KUBECONFIG_VARIABLE: "nowhere"}, "error: no cluster is configured: "),
        ({KUBECONFIG_VARIABLE: "stopped"}, "error: the cluster of kubectl, http://127.0.0.1:9, cannot be reached: "),
        ({ENDPOINT_VARIABLES[0]: "http://127.0.0.1:9"}, "error: http://127.0.0.1:9: cannot be reached ("),
        ({ENDPOINT_VARIABLES[0]: ""}, "error: kubectl cannot forward a port to service/ml-pipeline-ui "),
    ],
    ids=["no images", "no cluster", "no answer", "no Kubeflow", "no service"],
)
def test_nothing_is_tried_where_nothing_can_be(
    server: ApiServer, tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    """One line, exit code 2, and no run."""
    kubectl(tmp_path, 'echo "services ml-pipeline-ui not found" >&2; exit 1')
    (tmp_path / "stopped").write_text((tmp_path / "kubeconfig").read_text().replace(server.url, "http://127.0.0.1:9"))
    if KUBECONFIG_VARIABLE in variables:
        variables = {KUBECONFIG_VARIABLE: str(tmp_path / variables[KUBECONFIG_VARIABLE])}
    images = {"IMAGE_REGISTRY": "registry.example.com", "IMAGE_TAG": "0123abc"} if variables else {}
    command = [sys.executable, "-m", "tests.pipelines.cluster.cluster_check"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **images, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert server.kfp.runs == {}


def test_kubectl_forwards_a_port_where_no_address_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as the check lasts."""
    kubectl(tmp_path, f'echo $$ > {tmp_path}/pid; echo "Forwarding from 127.0.0.1:4711 -> 3000"; exec sleep 600')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with forwarded(None) as address:
        assert address == "http://127.0.0.1:4711"
        process = Path("/proc") / (tmp_path / "pid").read_text().strip()
        assert process.exists()
    assert not process.exists()
    with forwarded("https://kubeflow.example.com") as address:
        assert address == "https://kubeflow.example.com"


def kubectl(folder: Path, script: str) -> None:
    """Put a program that stands in for kubectl into a folder."""
    (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "kubectl").chmod(0o755)
