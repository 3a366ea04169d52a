"""A user's acceptance test: `make cluster-check` tries on the cluster of kubectl what the documentation promises.

Everything is done as a user does it: with `grpo-pipeline`, by deleting a pod, by opening pages at the UI's address. The
checks are tried one after the other, each within its own time, whatever the ones before have found. Runs are of the
smoke preset, with a random seed, so that none takes the result of an earlier one.
"""

import argparse
import io
import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import kube
from components.cluster.kube import Json, TrainJobs
from components.preflight.config import Params, load_params
from components.register.registry import POLICY
from components.register.snapshot import DIGESTS_FILE
from components.report.formatting import duration
from components.shared import lineage
from components.shared.deployment import MOUNT, DeploymentConfig
from components.shared.environment import CA_VARIABLE, ENDPOINT_VARIABLES, NAMESPACE_VARIABLE, TOKEN_FILE_VARIABLES
from components.shared.errors import PipelineError, RetryableError
from pipelines.cli import main as grpo_pipeline
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.runs import in_words
from pipelines.cluster.stages import CACHED, FINISHED, stages
from pipelines.run.screen import Screen, Style
from pipelines.tables import aligned

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "params/smoke.yaml"
NO_QUEUE = "cluster-check-no-such-queue"
LONG_STEPS, EVERY_STEPS = 20_000, 5
"""Steps of the run that is disturbed, whose end nobody waits for, and steps between two of its checkpoints."""
STEPS_BEFORE, STEPS_AFTER = 40, 20
"""Steps of that run until its launcher is deleted, and steps after which it has gone on."""
_POLL_S = 5.0
_UI = ("kubeflow", "service/ml-pipeline-ui")
STEP = re.compile(r"^train_grpo (\d+)/\d+ ", re.MULTILINE)
_RUN_ID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b")
UPLOAD = re.compile(r'uploadFile\(localFilePath="/(\w+)/([^/"]+)/([^"]+)"')
"""How Kubeflow logs that it copies a file to the object store: source, bucket and key of the UI's artifact address."""
_NOT_SELF_CONTAINED = re.compile(r"<script|<(?:img|link|iframe)\b[^>]*?(?:src|href)\s*=\s*[\"']?(?:https?:)?//", re.I)
_Answer = TypeVar("_Answer")


class MissedError(Exception):
    """Something did not hold; the message is one line."""


class Row(NamedTuple):
    """What came of a check."""

    title: str
    held: bool
    took_s: float
    evidence: str


class Acceptance:
    """The checks of one cluster, and what they leave for one another, in a folder of params files.

    Its name is that of the experiment, the schedule and the folder on the volume, and begins the names of runs.
    """

    def __init__(self, kubeflow: Kubeflow, jobs: TrainJobs, params: Params, folder: Path, *, keep: bool) -> None:
        self.name = f"cluster-check-{secrets.token_hex(3)}"
        self.rows: list[Row] = []
        self._kubeflow, self._jobs, self._pods = kubeflow, jobs, client.CoreV1Api(kube.connect())
        self._params, self._folder, self._keep = params, folder, keep  # of the params `deployment` and `cluster` hold
        self._seed = random.randrange(10**8, 10**9)
        self._runs: list[str] = []
        self._first = self._long = ""
        self._last_step = 0
        self._deadline = 0.0

    def plan(self) -> str:
        """Return what is going to be done, and where."""
        host, deployment = self._pods.api_client.configuration.host, self._params.deployment
        return f"""\
{self.name}: the cluster {host}, namespace {self._jobs.namespace}, Kubeflow at {self._kubeflow.endpoint}
images: {deployment.image_light}, {deployment.image_gpu}
submits four runs of the smoke preset without GPUs and a schedule, one after the other, deletes one
of the launchers, and trains the same on this machine
removes its runs, schedule, versions and checkpoints at the end, unless something did not hold
"""

    def run(self, screen: Screen) -> bool:
        """Try everything, clean up, and return whether all of it held."""
        seed, params = {"seed": self._seed}, self._params
        cluster = params.cluster.model_dump(mode="json", exclude_unset=True, exclude={"gpu_type"})
        common = {
            **{"extends": str(SMOKE), "prepare_data": seed, "train_sft": seed, "train_grpo": seed},
            **{"cluster": {**cluster, "nodes": 1, "gpus_per_node": 0}},
            **{"deployment": params.deployment.model_dump(mode="json")},
        }
        self._write("smoke", {**common, "register": {"registry": f"{MOUNT}/{self.name}/registry"}})
        # Once all completions are equally short there is nothing left to learn: it trains on all the same.
        reward = {"max_steps_without_signal": 0}
        grpo = {"num_steps": LONG_STEPS, "checkpoint": {"every_steps": EVERY_STEPS}, "reward": reward}
        self._write("long", {"extends": str(self._path("smoke")), "train_grpo": grpo})
        here = {"registry": str(self._folder / "registry")}
        self._local = self._start_here(self._write("here", {"extends": str(self._path("smoke")), "register": here}))
        checks: list[tuple[str, float, Callable[[], str]]] = [
            ("the first run succeeds", 30, self._first_run),
            ("its pages open in the UI", 2, self._pages),
            ("it registers the bytes of this machine", 15, self._same_bytes),
            ("a failed run says why", 10, self._failure),
            ("a run goes on without its launcher", 30, self._launcher),
            ("a stopped run frees its resources", 5, self._stop),
            ("a new run goes on from the checkpoint of a stopped one", 20, self._resume),
            ("a schedule fires and can be removed", 10, self._schedule),
            ("it cleans up after itself", 10, self._clean_up),
        ]
        try:
            for number, (title, minutes, check) in enumerate(checks, start=1):
                screen.header(number, len(checks), title)
                started = time.monotonic()
                self._deadline = started + 60 * minutes
                held, evidence = self._try(check)
                self.rows.append(Row(title, held, time.monotonic() - started, evidence))
                screen.detail(evidence, Style.GREEN if held else Style.RED)
        except KeyboardInterrupt:
            screen.show("interrupted: ending the runs")
            self._deadline = time.monotonic() + 300
            self._end_everything()
            raise
        finally:
            self._local.terminate()
            self._local.wait()
        return all(row.held for row in self.rows)

    def _try(self, check: Callable[[], str]) -> tuple[bool, str]:
        try:
            return True, check()
        except Exception as error:  # whatever it is, what comes after it is tried, and the runs are ended
            kind = "" if isinstance(error, MissedError | PipelineError) else f"{type(error).__name__}: "
            return False, f"{kind}{' '.join(str(error).split())}"

    def _start_here(self, params: Path) -> subprocess.Popen[bytes]:
        """Start the smoke run on this machine, on CPUs as on the cluster, while the cluster works."""
        code = "import sys; from pipelines.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "run", "--params", str(params)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=self._folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _digests_here(self) -> dict[str, str] | None:
        """Return the digest of each file of the policy that this machine registered, or None while the run goes on."""
        if self._local.poll() is None:
            return None
        if self._local.returncode:
            last = (self._folder / "log").read_text(errors="replace").split("\n")[-2:]
            raise MissedError(f"the run on this machine failed: {' '.join(last).strip()}")
        return of_policy((self._folder / "registry" / DIGESTS_FILE).read_text())

    def _first_run(self) -> str:
        run_id = self._submit("first", "smoke")
        run = self._until("the run ends", partial(self._ended, run_id))
        unfinished = [each.title for each in stages(run) if each.state not in ("SUCCEEDED", CACHED)]
        if run.state != "SUCCEEDED" or unfinished:
            raise MissedError(self._why(run_id))
        self._first = run_id
        return f"{len(stages(run))} stages; {self._kubeflow.url(run_id)}"

    def _pages(self) -> str:
        sizes = []
        for stage in ("validate_data", "report", "register"):
            pages = [self._fetch(file) for file in self._uploaded(stage) if file[2].endswith(("_page", ".html"))]
            if not pages:
                raise MissedError(f"{stage} has uploaded no page")
            for page in pages:
                text = page.strip().lower()
                if not (text.startswith("<!doctype html") and text.endswith("</html>")):
                    raise MissedError(f"the page of {stage} is not whole: it begins with {page[:60]!r}")
                if _NOT_SELF_CONTAINED.search(page):
                    raise MissedError(f"the page of {stage} has a script, or needs something that is elsewhere")
            sizes.append(f"{stage} {len(pages[0]) / 1000:.0f} kB")
        return ", ".join(sizes)

    def _same_bytes(self) -> str:
        listed = [file for file in self._uploaded("register") if file[2].endswith(f"/{DIGESTS_FILE}")]
        if not listed:
            raise MissedError(f"register has uploaded no {DIGESTS_FILE}")
        there = of_policy(self._fetch(listed[0]))
        here = self._until("the run on this machine ends", self._digests_here)
        if differing := sorted(path for path in {**there, **here} if there.get(path) != here.get(path)):
            raise MissedError(f"{', '.join(differing)} registered by the cluster and by this machine differ")
        return f"{len(here)} files of the policy"

    def _failure(self) -> str:
        run_id = self._submit("failure", "smoke", "--set", f"cluster.queue={NO_QUEUE}")
        run = self._until("the run ends", partial(self._ended, run_id))
        others = [each for each in stages(run) if each.name != "preflight"]
        begun = [each.title for each in others if each.state in {"RUNNING", *FINISHED}]
        if run.state == "SUCCEEDED" or begun or self._jobs_of(run_id):
            reached = ", ".join(begun) or in_words(run.state)
            raise MissedError(f"a run with the queue {NO_QUEUE} got as far as {reached}")
        reason = self._why(run_id)
        if NO_QUEUE not in reason:
            raise MissedError(f"`grpo-pipeline status` does not name what is wrong: {reason}")
        return reason

    def _launcher(self) -> str:
        self._long = run_id = self._submit("long", "long")
        before = self._until("GRPO trains", partial(self._step, run_id, STEPS_BEFORE))
        jobs, launchers = self._jobs_of(run_id), self._launchers(run_id)
        if not jobs or not launchers:
            raise MissedError("GRPO trains, but not in a training job with a launcher")
        for launcher in launchers:
            self._pods.delete_namespaced_pod(launcher, self._jobs.namespace)
        deleted = time.monotonic()
        self._until("another launcher runs", partial(self._other_launcher, run_id, launchers))
        took = time.monotonic() - deleted
        self._last_step = self._until("GRPO goes on", partial(self._step, run_id, before + STEPS_AFTER))
        name, uid = (jobs[0]["metadata"][key] for key in ("name", "uid"))
        if [each["metadata"]["uid"] for each in self._jobs_of(run_id)] != [uid]:
            raise MissedError(f"the training job {name} did not survive its launcher")
        return f"{name} trained on from step {before} to {self._last_step}; another launcher ran after {duration(took)}"

    def _stop(self) -> str:
        run_id = self._needs(self._long)
        names = [each["metadata"]["name"] for each in self._jobs_of(run_id)]
        if not names:
            raise MissedError("not tried: the run has no training job any more")
        self._check_goes_on(run_id)
        self._last_step = max([self._last_step, *self._steps(run_id)])
        started = time.monotonic()
        self._command("stop", run_id)
        self._until("its training job and pods are gone", partial(self._is_gone, run_id, *names))
        took = time.monotonic() - started
        self._until("the run ends", partial(self._ended, run_id))
        return f"{', '.join(names)} and its pods were gone after {duration(took)}, at step {self._last_step}"

    def _resume(self) -> str:
        self._needs(self._long and self._last_step)
        run_id = self._submit("again", "long")
        self._until("GRPO trains", partial(self._step, run_id, 1))
        first = self._steps(run_id)[0]
        self._command("stop", run_id)
        self._until("the run ends", partial(self._ended, run_id))
        if first < self._last_step - EVERY_STEPS:
            raise MissedError(f"the run was stopped at step {self._last_step}; the next one began before step {first}")
        return f"stopped at step {self._last_step}, and at step {first} in the next run"

    def _schedule(self) -> str:
        options = ("--params", str(self._path("smoke")), "--experiment", self.name)
        self._command("schedule", "apply", self.name, "--cron", "0 * * * * *", *options)
        if self.name not in self._command("schedule", "list"):
            raise MissedError("`grpo-pipeline schedule list` does not list the schedule")
        run = self._until("it fires", self._scheduled_run)
        self._runs.append(run.run_id)
        remove = partial(self._command, "schedule", "remove", self.name)
        try:
            remove()
        except RetryableError:
            self._command("stop", run.run_id)
        else:
            raise MissedError(f"the schedule was removed, and with it its run {run.display_name}, which had not ended")
        self._until("its run ends", partial(self._ended, run.run_id))
        self._until("the schedule is removed", remove)
        if self.name in self._command("schedule", "list"):
            raise MissedError("the schedule is still there after `grpo-pipeline schedule remove`")
        return f"fired as {run.display_name}; not removed before that run had ended"

    def _clean_up(self) -> str:
        self._end_everything()
        if self._keep or not all(row.held for row in self.rows):
            return f"runs are stopped and jobs removed; the runs stay in the experiment {self.name}, to be looked at"
        self._clean_volume()
        api, namespace = self._kubeflow.client, self._kubeflow.user_namespace
        for run_id in self._runs:
            api.delete_run(run_id)
        api.delete_experiment(api.get_experiment(experiment_name=self.name, namespace=namespace).experiment_id)
        return f"{len(self._runs)} runs, the versions and all checkpoints are removed"

    def _end_everything(self) -> None:
        """Remove the schedule, stop what runs, and wait until no training job is left."""
        if self.name in self._command("schedule", "list"):
            self._command("schedule", "remove", self.name, "--now")
        for run_id in self._runs:
            if not self._ended(run_id) or self._jobs_of(run_id):
                self._command("stop", run_id)
        for run_id in self._runs:
            self._until(f"{run_id} ends", partial(self._ended, run_id))
            self._until(f"the jobs of {run_id} are gone", partial(self._is_gone, run_id))

    def _clean_volume(self) -> None:
        """Remove what the runs left on the volume, with a pod that mounts it."""
        script, namespace = cleaning(MOUNT, self.name, self._seed, self._runs), self._jobs.namespace
        self._pods.create_namespaced_pod(namespace, volume_pod(self.name, script, self._params.deployment))

        def phase() -> str | None:
            current = (self._jobs.pod(self.name) or {}).get("status", {}).get("phase")
            return current if current in ("Succeeded", "Failed") else None

        try:
            if self._until(f"the pod {self.name} has removed what is on the volume", phase) == "Failed":
                raise MissedError(f"the pod {self.name} could not remove what the runs left on the volume")
        finally:
            self._pods.delete_namespaced_pod(self.name, namespace)

    def _needs(self, value: _Answer) -> _Answer:
        if not value:
            raise MissedError("not tried: it needs a check before it that did not hold")
        return value

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.yaml"

    def _write(self, name: str, values: Json) -> Path:
        self._path(name).write_text(yaml.safe_dump(values))
        return self._path(name)

    def _command(self, *arguments: str, accept: tuple[int, ...] = (0,)) -> str:
        """Run `grpo-pipeline` and return what it prints, errors included."""
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            code = grpo_pipeline(arguments)
        if code not in accept:
            last = (printed.getvalue().strip().splitlines() or ["nothing"])[-1]
            kind = RetryableError if code == RetryableError.exit_code else MissedError
            raise kind(f"`grpo-pipeline {' '.join(arguments)}` ended with {code} and printed: {last}")
        return printed.getvalue()

    def _submit(self, name: str, params: str, *settings: str) -> str:
        options = ("--name", f"{self.name}-{name}", "--experiment", self.name)
        printed = self._command("submit", "--params", str(self._path(params)), *settings, *options)
        self._runs.append(_RUN_ID.findall(printed)[0])
        return self._runs[-1]

    def _until(self, what: str, ask: Callable[[], _Answer | None]) -> _Answer:
        """Return the first answer that is not None within the time of the check; failures to answer are waited out."""
        last = ""
        while True:
            try:
                answer = ask()
            except (RetryableError, client.ApiException, HTTPError) as error:
                answer, last = None, f" ({' '.join(str(error).split())[:200]})"
            if answer is not None:
                return answer
            if time.monotonic() > self._deadline:
                raise MissedError(f"waited in vain until {what}{last}")
            time.sleep(_POLL_S)

    def _ended(self, run_id: str) -> Any:
        run = self._kubeflow.run(run_id)
        return run if run.state in FINISHED else None

    def _why(self, run_id: str) -> str:
        """Return why a run failed, as `grpo-pipeline status` says it."""
        printed = self._command("status", run_id)
        _, separator, reason = printed.partition("error: ")
        return " ".join(reason.split()) if separator else f"`grpo-pipeline status` gives no reason: {printed.strip()}"

    def _log(self, run_id: str, stage: str) -> str:
        return self._command("logs", run_id, "--stage", stage, accept=(0, 2))  # 2: there is no log yet

    def _steps(self, run_id: str) -> list[int]:
        """Return the steps that GRPO has shown so far."""
        return list(map(int, STEP.findall(self._log(run_id, "train_grpo"))))

    def _step(self, run_id: str, least: int) -> int | None:
        """Return GRPO's step once it has come to the least one, in a run that goes on."""
        self._check_goes_on(run_id)
        step = max(self._steps(run_id), default=0)
        return step if step >= least else None

    def _other_launcher(self, run_id: str, before: list[str]) -> str | None:
        self._check_goes_on(run_id)
        return next((each for each in self._launchers(run_id) if each not in before), None)

    def _check_goes_on(self, run_id: str) -> None:
        run = self._ended(run_id)
        if run:
            raise MissedError(f"the run has ended: {in_words(run.state)}: {self._why(run_id)}")

    def _jobs_of(self, run_id: str) -> list[Json]:
        return self._jobs.find({kube.RUN_ID: run_id})

    def _is_gone(self, run_id: str, *names: str) -> bool | None:
        """Tell whether a run has no training jobs any more, and jobs of some names have no pods; None if not."""
        is_left = self._jobs_of(run_id) or any(self._jobs.pods(kube.JOB_SET, name) for name in names)
        return None if is_left else True

    def _launchers(self, run_id: str) -> list[str]:
        """Return the running pods that watch over GRPO's training job."""
        selector = f"pipeline/runid={run_id},grpo-pipeline/task=train-grpo"
        pods = self._pods.list_namespaced_pod(self._jobs.namespace, label_selector=selector).items
        return [each.metadata.name for each in pods if each.status.phase == "Running"]

    def _scheduled_run(self) -> Any:
        """Return the run that our schedule started, once it runs."""
        ours = {each.recurring_run_id for each in self._kubeflow.schedules() if each.display_name == self.name}
        runs = (run for run in self._kubeflow.runs() if run.recurring_run_id in ours and run.state == "RUNNING")
        return next(runs, None)

    def _uploaded(self, stage: str) -> list[tuple[str, str, str]]:
        """Return source, bucket and key of the files that a stage of the first run gave to Kubeflow."""
        run = self._kubeflow.run(self._needs(self._first))
        (pod,) = [each.pods[-1] for each in stages(run) if each.name == stage]
        # Not from `grpo-pipeline logs`, which leaves out what Kubeflow reports while all is well.
        query = {"podname": pod, "podnamespace": self._kubeflow.namespace, "runid": run.run_id}
        return UPLOAD.findall(self._ask_ui("/k8s/pod/logs", **query, createdat=f"{run.created_at:%Y-%m-%d}"))

    def _fetch(self, file: tuple[str, str, str]) -> str:
        """Return a file from the UI's artifact address."""
        query = dict(zip(("source", "bucket", "key"), file, strict=True))
        return self._ask_ui("/artifacts/get", **query, namespace=self._kubeflow.namespace)

    def _ask_ui(self, path: str, **query: str) -> str:
        return self._kubeflow.get(path, query).decode(errors="replace")


def of_policy(text: str) -> dict[str, str]:
    """Return the digest of each file of a version's policy, without its lineage, from its digests.json."""
    digests: dict[str, str] = json.loads(text)
    names = (path for path in digests if path.startswith(f"{POLICY}/") and not path.endswith(f"/{lineage.FILE_NAME}"))
    return {path: digests[path] for path in names}


def cleaning(mount: str, name: str, seed: int, run_ids: list[str]) -> str:
    """Return the shell script that removes the versions of a check, its unfinished work, and its runs."""
    return f"""
        cd {mount} && rm -rf {name} && cd grpo-pipeline || exit 1
        for file in $(grep -lsw {seed} work/*/*/fingerprint.json); do rm -rf "$(dirname "$file")"; done
        for run in {" ".join(run_ids)}; do rm -rf "$run" $(grep -ls "$run" work/*/*.json); done
    """


def volume_pod(name: str, script: str, deployment: DeploymentConfig) -> Json:
    """Return a pod that runs a shell script beside the shared volume, under the restricted standard."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        **{"name": "main", "image": deployment.image_light, "command": ["sh", "-c", script]},
        "resources": {kind: {"cpu": "100m", "memory": "128Mi"} for kind in ("requests", "limits")},
        "securityContext": security,
        "volumeMounts": [{"name": "work", "mountPath": MOUNT}],
    }
    spec = {
        **{"restartPolicy": "Never", "automountServiceAccountToken": False},
        "imagePullSecrets": [{"name": deployment.image_pull_secret}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": deployment.volume}}],
    }
    metadata = {"name": name, "labels": {kube.MANAGED_BY: kube.PROJECT, "sidecar.istio.io/inject": "false"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@contextmanager
def forwarded() -> Iterator[str]:
    """Yield the address of a port that kubectl forwards to Kubeflow's UI."""
    namespace, service = _UI
    command = ["kubectl", "port-forward", "--namespace", namespace, service, ":80"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise PipelineError(f"kubectl is not installed; install it, or set {ENDPOINT_VARIABLES[0]}") from None
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        port = re.search(r"127\.0\.0\.1:(\d+) ->", process.stdout.readline())
        if not port:
            process.terminate()
            reason = " ".join(process.stderr.read().split())[:200]
            raise PipelineError(f"kubectl cannot forward a port to {service} in the namespace {namespace}: {reason}")
        yield f"http://127.0.0.1:{port[1]}"
    finally:
        process.terminate()
        process.wait()


def connect(stack: ExitStack) -> tuple[Kubeflow, TrainJobs]:
    """Return the cluster that kubectl points at; PipelineError if it or Kubeflow's UI does not answer."""
    api, namespace = kube.connect(), os.environ.get(NAMESPACE_VARIABLE)
    jobs, where = TrainJobs(api, namespace or _UI[0]), f"the cluster of kubectl, {api.configuration.host}"
    try:
        jobs.find({})
    except HTTPError as error:
        raise PipelineError(f"{where}, cannot be reached: {kube.error_message(error)}") from None
    except client.ApiException as error:
        hint = "; is Kubeflow Trainer installed?" if error.status == 404 else ""
        raise PipelineError(f"{where}, does not list training jobs: {kube.error_message(error)}{hint}") from None
    endpoint = os.environ.get(ENDPOINT_VARIABLES[0]) or stack.enter_context(forwarded())
    os.environ[ENDPOINT_VARIABLES[0]] = endpoint  # which `grpo-pipeline` uses, too
    files = (os.environ.get(name) for name in (TOKEN_FILE_VARIABLES[0], CA_VARIABLE))
    kubeflow = Kubeflow(endpoint, namespace, *(Path(name) if name else None for name in files))
    list(islice(kubeflow.runs(page_size=1), 1))
    return kubeflow, jobs


def report(rows: list[Row]) -> str:
    """Return the table of what held, and what it comes to."""
    lines = [("check", "result", "took", "evidence")]
    lines += [(row.title, "held" if row.held else "MISSED", duration(row.took_s), row.evidence[:120]) for row in rows]
    num_held, total = sum(row.held for row in rows), duration(sum(row.took_s for row in rows))
    return f"\n{aligned(lines)}\n\n{num_held} of {len(rows)} checks held, in {total}"


def main() -> int:
    """Check the cluster that kubectl points at; return 0 if everything held, 1 if not, 2 if nothing could be tried."""
    parser = argparse.ArgumentParser(prog="make cluster-check", description=__doc__)
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml", help="file with your section `deployment`")
    parser.add_argument("--keep", action="store_true", help="keep the runs, to look at them in the UI")
    options = parser.parse_args()
    screen = Screen(sys.stdout, sys.stderr)
    try:
        params = load_params(options.params)
        if params.deployment.image_light.endswith(":dev"):
            raise PipelineError("no registry has images :dev; set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints")
        with ExitStack() as stack:
            cluster = connect(stack)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-check-")))
            acceptance = Acceptance(*cluster, params, folder, keep=options.keep)
            screen.show(acceptance.plan())
            held = acceptance.run(screen)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return PipelineError.exit_code
    except KeyboardInterrupt:
        return 130
    screen.show(report(acceptance.rows))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
