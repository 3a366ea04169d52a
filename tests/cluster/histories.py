"""Histories of runs on the fake cluster: launchers in separate processes, pods that train, and what happens to both.

A `History` is one cluster with its volume, in simulated time. Everything that happens is on one agenda, and one
launcher at a time does something, so a history is the same whenever it is run with the same events.
"""

import heapq
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import kube
from components.cluster.job import Job
from components.cluster.reaper import reap
from components.shared.environment import KUBECONFIG_VARIABLE, POD_VARIABLE
from components.shared.model import resolve_reference
from components.shared.work import last_step
from pipelines.graph import RESOURCES
from tests.cluster.launched import NUM_RANKS, STEP
from tests.cluster.processes import ROOT
from tests.fake_cluster import ApiServer, Change, Fault, Json, kinds, script
from tests.fake_cluster.http import Request

STEP_S = 5.0
_POD_STARTS_S, _ARGO_S, _NODE_DEAD_S, _REAPER_S = 3.0, 10.0, 330.0, 300.0
SUCCEEDED, FAILED, ERROR = "Succeeded", "Failed", "Error"
"""How an attempt at a step ends for Argo, which tries it again where its pod was deleted: an error."""
_BACKOFF_S = 30.0
_GRACE_S, _REAL_S = 1.0, 60.0
"""Time that Kubeflow leaves a step that it stops, and for a launcher to do what it does at one moment."""


class Launchers:
    """The program that starts launchers, and the socket to which they report."""

    def __init__(self, folder: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / "clock"))
        self._server.listen()
        self._server.settimeout(_REAL_S)
        command = [sys.executable, "-m", "tests.cluster.launcher", str(folder / "clock")]
        self._program = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True)

    def start(self, order: Json) -> socket.socket:
        """Start a launcher; return the connection to it."""
        print(json.dumps(order), file=self._program.stdin, flush=True)
        connection, _ = self._server.accept()
        connection.settimeout(_REAL_S)
        return connection

    def close(self) -> None:
        """End the program."""
        self._program.communicate(timeout=_REAL_S)
        self._server.close()


@dataclass
class Launcher:
    """A process that waits for its run's training job."""

    run: "Run"
    pod: str
    log: Path
    pid: int = 0
    connection: socket.socket | None = None
    exit_code: int | None = None
    wakes_s: float = 0.0
    asked_to_stop: bool = False


@dataclass
class Run:
    """A run with one step, and how each attempt at it has ended for Argo."""

    id: str
    workflow: str
    terminated_s: float | None = None
    attempts: list[str] = field(default_factory=list)
    launcher: Launcher | None = None
    end: str | None = None
    logs: list[Path] = field(default_factory=list)


class Volume:
    """What training pods do to the shared volume, and what must never happen there."""

    def __init__(self, history: "History", num_steps: int, save_every: int) -> None:
        self._history, self._num_steps, self._save_every = history, num_steps, save_every
        self._saved: dict[Path, int] = {}
        self._step: dict[Path, int] = {}
        self._writers: dict[str, Path] = {}
        history.server.store.listen(self._follow)

    def program(self) -> script.Program:
        """Return what training pods run."""
        return script.Program(STEP_S, lambda pods: partial(next, self._train(pods)))

    def _train(self, pods: list[Json]) -> Iterator[int | None]:
        """Wait for the turn of the pods, as `Job.read_in_pod` does, then train: a step each time, at last the code."""
        folder = Path(pods[0]["spec"]["containers"][0]["command"][-1])
        name, work = pods[0]["metadata"]["labels"][kube.JOB_SET], folder.parent
        while not (folder / "job.json").is_file() or Job.turn(folder) != name:
            yield None
        job = Job.read(folder)
        self._history.begun.append(name)
        assert work not in self._writers.values(), f"two jobs write to {work}"
        self._writers |= {pod["metadata"]["uid"]: work for pod in pods}
        for rank in range(NUM_RANKS):
            job.start_rank(rank)
        step = self._step[work] = last_step(work) or 0
        # A run that ends well removes its work.
        saved = 0 if not step and self._history.is_published() else self._saved.get(work, 0)
        assert step >= saved, f"step {saved} was saved, and training starts after {step}"
        while True:
            self._step[work] = min(self._step[work] + 1, self._num_steps)
            self._history.server.cluster.print(pods[0], f"step {self._step[work]}", container="node", ends=False)
            if self._step[work] % self._save_every == 0:
                self._save(work)
            if self._step[work] == self._num_steps:
                break
            yield None
        (Path(job.outputs["policy"]) / "weights").write_text(str(self._num_steps))
        for rank in range(NUM_RANKS):
            job.write_outcome(rank, {"result": {"loss": 0.25}, "exit_code": 0})
        self._history.succeeded.add(name)
        yield 0

    def _save(self, work: Path) -> None:
        folder = work / "checkpoints" / f"step-{self._step[work]:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        self._saved[work] = self._step[work]

    def _follow(self, change: Change) -> None:
        """A pod that is asked to stop saves its step as it ends."""
        uid = change.after["metadata"]["uid"]
        if uid not in self._writers or change.kind != kinds.PODS:
            return
        is_gone, has_ended = change.type == "DELETED", change.after["status"]["phase"] in ("Failed", "Succeeded")
        if is_gone or has_ended:
            work = self._writers.pop(uid)
            index = change.after["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            if is_gone and "deletionTimestamp" in change.after["metadata"] and index == "0" and work.is_dir():
                self._save(work)


class History:
    """A cluster, its runs, and what is still to happen."""

    def __init__(self, launchers: Launchers, root: Path) -> None:
        self.server = ApiServer(namespace="kubeflow")
        self.clock, self.cluster = self.server.clock, self.server.cluster
        self.root, self._launchers = root, launchers
        self.volume = root / "volume"
        self.volume.mkdir(parents=True)
        self.runs: list[Run] = []
        self.notes: list[str] = []
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._active: Launcher | None = None  # which does something at this moment
        self._strike: tuple[str, signal.Signals] | None = None
        self.violations: list[str] = []
        self.struck: list[str] = []
        """Runs of launchers that got a signal in the middle of a request."""
        self.server.before = self._hit
        self.begun: list[str] = []
        """Jobs whose pods have begun to train, the last one last."""
        self.succeeded: set[str] = set()
        """Jobs whose ranks have all succeeded, whether or not their status says so yet."""
        self.kubeconfig = self.server.kubeconfig(root / "kubeconfig")
        self._order: Json = {}
        self.server.store.listen(self._watch_jobs)
        self.server.store.listen(self._watch_launchers)
        self.cluster.add_runtime(max_restarts=3)
        self.at(_REAPER_S, self._reap)

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for launcher in self._alive():
            os.kill(launcher.pid, signal.SIGKILL)
            self._listen(launcher)
        self.server.__exit__(*error)

    def configure(self, num_steps: int, save_every: int, **cluster: Any) -> None:
        """Set what all runs do."""
        self._num_steps = num_steps
        self._work = Volume(self, num_steps, save_every)
        queued = [script.Queued(30)] if cluster.get("queue") else []
        self.cluster.play(*queued, self._work.program())
        settings = {"image": "gpu:1", "nodes": NUM_RANKS, "gpus_per_node": 1, "mount": str(self.volume), **cluster}
        self._order = {"config": {"num_steps": num_steps}, "cluster": settings}

    def use_queue(self, name: str, wait_s: float | None) -> None:
        """Make later jobs wait in this queue; for ever with None."""
        self._order["cluster"] = {**self._order["cluster"], "queue": name}
        self.cluster.play(script.Queued(wait_s), self._work.program())

    def now(self) -> float:
        """Return the seconds since the cluster was made."""
        return self.clock.monotonic()

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something then; it may start and stop launchers, which the cluster's own actions cannot."""
        heapq.heappush(self._agenda, (max(seconds, self.now()), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something so many seconds later."""
        self.at(self.now() + seconds, action)

    def play_until(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Let time pass until then."""
        while not is_over():
            at_s, _, action = heapq.heappop(self._agenda)
            assert at_s < limit_s, "the history does not end"
            self.clock.advance(at_s - self.now())
            action()

    def note(self, what: str) -> None:
        """Write down what happens."""
        self.notes.append(f"{self.now():7.1f} {what}")

    def submit(self, run_id: str) -> Run:
        """Start a run."""
        run = Run(run_id, f"run-{run_id[:8]}")
        self.runs.append(run)
        self.cluster.add_workflow(run.workflow, **{kube.KFP_RUN_ID: run.id})
        self.note(f"{run.workflow} is submitted")
        self._begin(run)
        return run

    def terminate(self, run: Run) -> None:
        """Stop a run, as Kubeflow does."""
        if run.end:
            return
        self.note(f"{run.workflow} is terminated")
        run.terminated_s = self.now()
        if run.launcher and run.launcher.exit_code is None:
            self._stop(run.launcher, _GRACE_S)
        elif not run.launcher:
            self._argo(run)

    def _begin(self, run: Run) -> None:
        if run.terminated_s is not None:
            self._argo(run)
            return
        pod = f"{run.workflow}-{len(run.attempts)}"
        workflow = next(each for each in self.cluster.all(kinds.WORKFLOWS) if each["metadata"]["name"] == run.workflow)
        self.cluster.add_pod(pod, workflow)
        log = self.root / f"{pod}.log"
        run.logs.append(log)
        run.launcher = Launcher(run, pod, log)
        self.after(_POD_STARTS_S, partial(self._start, run.launcher))

    def _argo(self, run: Run) -> None:
        if run.end:
            return
        phase = run.attempts[-1] if run.attempts else FAILED
        if phase == ERROR and run.terminated_s is None and len(run.attempts) <= RESOURCES[STEP.name].retries:
            self.after(_BACKOFF_S, lambda: self._begin(run))
        else:
            run.end = phase
            self.cluster.label(kinds.WORKFLOWS, run.workflow, **{kube.COMPLETED: "true"})
            self.note(f"{run.workflow} ends: {phase}")

    def _ended(self, launcher: Launcher, phase: str) -> None:
        run = launcher.run
        if run.launcher is launcher:
            run.attempts.append(phase)
            run.launcher = None
            self.after(_ARGO_S, lambda: self._argo(run))

    def _start(self, launcher: Launcher) -> None:
        if launcher.run.launcher is not launcher or launcher.exit_code is not None:
            return
        run = launcher.run
        order = {**self._order, "name": launcher.pod, "run_id": run.id, "run_name": run.workflow}
        order["environment"] = {KUBECONFIG_VARIABLE: str(self.kubeconfig), POD_VARIABLE: launcher.pod}
        order |= {"artifact": str(self.root / launcher.pod), "log": str(launcher.log)}
        launcher.connection = self._launchers.start(order)
        self._listen(launcher)

    def _listen(self, launcher: Launcher) -> None:
        self._active = launcher
        message = self._report(launcher)
        self._active = None
        if "sleep" in message:
            launcher.wakes_s = self.now() + message["sleep"]
            self.at(launcher.wakes_s, partial(self._wake, launcher, launcher.wakes_s))
            return
        assert launcher.connection is not None
        launcher.connection.close()
        launcher.exit_code = message["exit"]
        self.note(f"{launcher.pod} ends with {launcher.exit_code}")
        # Of a dead node nobody knows how its containers have ended.
        if launcher.exit_code >= 0 or launcher.asked_to_stop:
            self._container_ends(launcher)

    def _report(self, launcher: Launcher) -> Json:
        """Return what a launcher reports next, after its pid."""
        assert launcher.connection is not None
        text = b""
        with suppress(ConnectionError):
            while part := launcher.connection.recv(1):
                text += part
                if part == b"\n":
                    message: Json = json.loads(text)
                    if "pid" not in message:
                        return message
                    launcher.pid, text = message["pid"], b""
        return {"exit": -signal.SIGKILL}

    def _container_ends(self, launcher: Launcher) -> None:
        if self._is_deleted(launcher):
            return  # what counts for Argo is that the pod is deleted
        self.cluster.end(launcher.pod, launcher.exit_code or 0)
        self._ended(launcher, FAILED if launcher.exit_code else SUCCEEDED)

    def _wake(self, launcher: Launcher, at_s: float) -> None:
        if launcher.exit_code is None and launcher.wakes_s == at_s:
            assert launcher.connection is not None
            with suppress(ConnectionError):
                launcher.connection.sendall(b"%f" % self.now())
            self._listen(launcher)

    def _stop(self, launcher: Launcher, grace_s: float) -> None:
        """Ask a launcher to stop, and kill it when its time is over."""
        if launcher.asked_to_stop or launcher.exit_code is not None:
            return
        launcher.asked_to_stop = True
        if not launcher.pid:
            launcher.exit_code = -signal.SIGKILL
            self._container_ends(launcher)
            return
        os.kill(launcher.pid, signal.SIGTERM)
        self._listen(launcher)
        self.after(grace_s, lambda: self.kill(launcher))

    def kill(self, launcher: Launcher) -> None:
        """Kill a launcher outright; its pod stays until somebody removes it."""
        if launcher.exit_code is None and launcher.pid:
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.wakes_s = -1
            self._listen(launcher)

    def _watch_launchers(self, change: Change) -> None:
        """The kubelet stops the launcher of a pod that is being deleted, and Argo sees pods that are gone."""
        if change.kind != kinds.PODS:
            return
        metadata = change.after["metadata"]
        launcher = next((each for run in self.runs if (each := run.launcher) and each.pod == metadata["name"]), None)
        if launcher is None:
            return
        if change.type == "DELETED":
            self.after(0, lambda: self._pod_gone(launcher))
        elif "deletionTimestamp" in metadata:
            self.after(0, lambda: self._stop(launcher, 2 * _GRACE_S))

    def _pod_gone(self, launcher: Launcher) -> None:
        self.kill(launcher)
        launcher.exit_code = launcher.exit_code if launcher.exit_code is not None else -signal.SIGKILL
        self._ended(launcher, ERROR)

    def _alive(self) -> list[Launcher]:
        every = (run.launcher for run in self.runs)
        return [each for each in every if each and each.pid and each.exit_code is None]

    def _reap(self) -> None:
        os.environ[KUBECONFIG_VARIABLE] = str(self.kubeconfig)
        with suppress(client.ApiException, HTTPError):
            reap(kube.connect(), self.server.namespace, self.clock.now(), self._let_pass)
        self.after(_REAPER_S, self._reap)

    def _let_pass(self, seconds: float) -> None:
        """Let time pass, in which others do something."""
        end = self.now() + seconds
        self.at(end, lambda: None)
        self.play_until(lambda: self.now() >= end, end + 1)

    def _watch_jobs(self, change: Change) -> None:
        """Record a violation where a job that could go on is deleted by anybody who must not."""
        if change.kind != kinds.TRAIN_JOBS:
            return
        metadata, conditions = change.after["metadata"], change.after.get("status", {}).get("conditions", [])
        if change.type != "MODIFIED":
            self.note(f"{metadata['name']} {change.type.lower()}")
        is_deleted = change.type == "DELETED" or "deletionTimestamp" in metadata
        was_deleted = change.before is not None and "deletionTimestamp" in change.before["metadata"]
        has_ended = any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)
        if not is_deleted or was_deleted or has_ended or metadata["name"] in self.succeeded:
            return
        run = next(each for each in self.runs if each.id == metadata["labels"][kube.RUN_ID])
        is_over = run.end is not None or run.terminated_s is not None
        # Its own step may delete it where it is asked to stop, or where the job waits in a queue: it leaves the work to
        # one that was admitted since.
        stops = run.launcher is not None and run.launcher.asked_to_stop and not self._is_disrupted(run.launcher)
        is_overtaken = metadata["name"] not in self.begun[-1:] and bool(self.begun)
        is_own = self._active is not None and self._active.run is run
        if not (is_over or (is_own and (stops or is_overtaken))):
            self.violations.append(f"{self.now():.1f} {metadata['name']} was deleted while it could go on")

    def _is_deleted(self, launcher: Launcher) -> bool:
        pods = {pod["metadata"]["name"]: pod["metadata"] for pod in self.cluster.all(kinds.PODS)}
        return "deletionTimestamp" in pods.get(launcher.pod, {"deletionTimestamp": ""})

    def _is_disrupted(self, launcher: Launcher) -> bool:
        pods = [pod for pod in self.cluster.all(kinds.PODS) if pod["metadata"]["name"] == launcher.pod]
        return self._is_deleted(launcher) or "DisruptionTarget" in str(pods)

    def strike(self, method: str, number: signal.Signals) -> None:
        """Send a signal to the next launcher that makes a request of this method, before the request has its effect."""
        self.note(f"{number.name} at the next {method}")
        self._strike = method, number

    def _hit(self, request: Request) -> None:
        launcher = self._active
        if not (self._strike and launcher and launcher.pid and request.method == self._strike[0]):
            return
        (_, number), self._strike = self._strike, None
        self.note(f"{number.name} to {launcher.pod} at {request.method} {request.path}")
        self.struck.append(launcher.run.id)
        launcher.asked_to_stop = number == signal.SIGTERM
        os.kill(launcher.pid, number)
        if number == signal.SIGKILL:
            self.after(60, lambda: self.cluster.lose(launcher.pod))

    def pause_controllers(self, seconds: float) -> None:
        """Restart the controllers of Trainer, JobSet and Kueue."""
        self.note("the controllers restart")
        self.cluster.controllers_return_s = self.now() + seconds

    def drain_launcher(self, run: Run) -> None:
        """Drain the node of a launcher."""
        if run.launcher and run.launcher.exit_code is None:
            self.note(f"{run.launcher.pod} is drained")
            self.cluster.drain(run.launcher.pod)

    def lose_launcher(self, run: Run) -> None:
        """Lose the node of a launcher; somebody notices only after minutes."""
        launcher = run.launcher
        if launcher and launcher.pid and launcher.exit_code is None:
            self.note(f"the node of {launcher.pod} dies")
            self.kill(launcher)
            self.after(_NODE_DEAD_S, lambda: self.cluster.lose(launcher.pod))

    def outage(self, seconds: float, **fault: Any) -> None:
        """Take the API server away."""
        self.note(f"the API server is away for {seconds:g} s")
        outage = Fault(times=10**9, **fault)
        self.server.faults.pending.insert(0, outage)

        def end() -> None:
            self.server.faults.pending[:] = [each for each in self.server.faults.pending if each.times < 10**6]
            self.note("the API server is back")

        self.after(seconds, end)

    def is_away(self) -> bool:
        """Tell whether nothing gets through to the API server."""
        return any(each.times > 10**6 for each in self.server.faults.pending)

    def training_pods(self) -> list[str]:
        """Return the names of the training pods that run."""
        running = [pod["metadata"] for pod in self.cluster.all(kinds.PODS) if pod["status"]["phase"] == "Running"]
        ours = [metadata for metadata in running if kube.JOB_SET in metadata.get("labels", {})]
        return [metadata["name"] for metadata in ours if "deletionTimestamp" not in metadata]

    def is_published(self) -> bool:
        """Tell whether a run has put its outputs in place."""
        return any(self.volume.glob(f"grpo-pipeline/*/{STEP.name}/policy/weights"))

    def is_complete(self, output: Path) -> bool:
        """Tell whether a step's output is a policy that was trained to its end."""
        weights = resolve_reference(output) / "weights"
        return weights.is_file() and weights.read_text() == str(self._num_steps)
