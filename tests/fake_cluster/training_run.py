"""One TrainJob's life in the scripted cluster: the controllers of Trainer, JobSet and Kueue, step by step."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fake_cluster.children import Children
from tests.fake_cluster.errors import Json
from tests.fake_cluster.pods import Pods
from tests.fake_cluster.processes import Processes, free_port
from tests.fake_cluster.script import (
    Complete,
    Do,
    Executed,
    Failed,
    NodeLost,
    Preempted,
    PullBackOff,
    Queued,
    Restarted,
    Running,
    Script,
    Step,
    Unschedulable,
)
from tests.fake_cluster.store import Store
from tests.fake_cluster.train_job_rules import QUEUE_LABEL, is_finished, runtime_of

CONTROLLERS_S = 0.5
"""How long the controllers take until there are pods."""
STARTS_S = 2.0
"""How long a pod with a node takes until its containers run."""
_NEED_PODS = (Running, Executed, Failed, Complete, NodeLost, Restarted, Preempted)


class TrainingRun:
    """Follows a script for one TrainJob, until that ends or is deleted."""

    def __init__(self, store: Store, pods: Pods, processes: Processes, job: Json, script: Script) -> None:
        self._store, self._pods, self._processes = store, pods, processes
        self._name = job["metadata"]["name"]
        self._script: list[Step] = list(script)
        self._attempt = 0
        self._epoch = 0
        self._codes: dict[str, int] = {}
        self._num_admissions = 0
        self._is_up = False
        """Whether the containers run."""
        runtime = runtime_of(store, job)
        assert runtime is not None, "the webhook admits no TrainJob without its runtime"
        self._children = Children(store, pods, job, runtime)

    def begin(self, job: Json) -> None:
        """The controllers see the new TrainJob."""
        if job["spec"]["suspend"]:
            self._suspended(job)
        else:
            self._start_deadline(job)
        self._later(CONTROLLERS_S, self._next)

    def changed(self, before: Json, after: Json) -> None:
        """Somebody has changed the TrainJob: suspending and resuming take effect."""
        was, is_ = before["spec"].get("suspend"), after["spec"].get("suspend")
        if is_finished(after) or was == is_:
            return
        if is_:
            self._suspend(after)
        else:
            self._resumed(after)

    def gone(self) -> None:
        """The TrainJob is deleted: nothing of the script happens any more."""
        self._epoch += 1

    def _later(self, seconds: float | None, action: Callable[[], None]) -> None:
        """Do something then, unless the job has been suspended, restarted or ended by then."""
        epoch = self._epoch

        def act() -> None:
            if epoch == self._epoch and self._children.job() is not None:
                action()

        if seconds is not None:
            self._store.clock.call_in(seconds, act)

    def _next(self) -> None:
        job = self._children.job()
        if job is None or not self._script:
            return
        step = self._script[0]
        if job["spec"]["suspend"] and not isinstance(step, Queued):
            # Nobody has queued it by script: whoever suspended it will resume it.
            return
        if isinstance(step, _NEED_PODS) and not self._is_up:
            self._bring_up(job)
            return
        self._script.pop(0)
        self._play(step, job)

    def _play(self, step: Step, job: Json) -> None:
        play: dict[type, Callable[[Any, Json], None]] = {
            Queued: lambda step, _: self._later(step.seconds, self._admit),
            Unschedulable: self._find_no_node,
            PullBackOff: self._back_off,
            Running: self._run,
            Executed: self._execute,
            Preempted: self._preempt,
            NodeLost: self._lose_node,
            Restarted: self._end_and_restart,
            Failed: self._end_and_fail,
            Complete: self._complete,
            Do: self._do,
        }
        play[type(step)](step, job)

    def _find_no_node(self, step: Unschedulable, job: Json) -> None:
        for pod in self._children.pods(job, self._attempt):
            self._pods.unschedulable(pod, step.message)
        self._later(step.seconds, self._next)

    def _back_off(self, step: PullBackOff, job: Json) -> None:
        for pod in self._children.pods(job, self._attempt):
            self._pods.assign(pod)
        for pod in self._pods.of(job):
            self._pods.pull_fails(pod, step.message)
        self._later(step.seconds, self._next)

    def _do(self, step: Do, _: Json) -> None:
        step.action()
        self._next()

    def _bring_up(self, job: Json) -> None:
        for pod in self._children.pods(job, self._attempt):
            self._pods.assign(pod)
        self._later(STARTS_S, self._up)

    def _up(self) -> None:
        job = self._children.job()
        assert job is not None
        for pod in self._pods.of(job):
            self._pods.start(pod)
        self._is_up = True
        self._children.report(active=1, ready=1)
        self._next()

    def _run(self, step: Running, job: Json) -> None:
        first = self._pods.of(job, "node")[0]
        every = (step.seconds if step.seconds is not None else len(step.lines)) / (len(step.lines) or 1)
        for number, line in enumerate(step.lines):
            self._later(every * number, partial(self._pods.say, first, line))
        self._later(step.seconds, self._next)

    def _execute(self, step: Executed, job: Json) -> None:
        pods = self._pods.of(job, "node")
        self._codes.clear()
        port = free_port()
        for pod in pods:
            ended = partial(self._executed, step, self._epoch, len(pods))
            self._processes.start(pod, port, dict(step.environment), ended)

    def _executed(self, step: Executed, epoch: int, number: int, pod: Json, code: int) -> None:
        """One container has ended; the first that fails, or the last, decides what becomes of the job."""
        job = self._children.job()
        if epoch != self._epoch or job is None:
            return
        self._pods.stop(pod, code, "Error" if code else "Completed")
        self._codes[pod["metadata"]["name"]] = code
        if code:
            self._script.insert(0, step)
            self._restart(job)
        elif len(self._codes) == number:
            self._later(CONTROLLERS_S, self._completed)

    def _end_container(self, step: Failed, job: Json) -> None:
        pods = self._pods.of(job, "node")
        failing = pods[min(step.rank, len(pods) - 1)]
        self._pods.say(failing, *step.lines)
        self._pods.stop(failing, step.exit_code, step.reason)

    def _end_and_fail(self, step: Failed, job: Json) -> None:
        self._end_container(step, job)
        self._later(CONTROLLERS_S, partial(self._fail, "FailedJobs", _jobs_failed(self._name)))

    def _end_and_restart(self, step: Restarted, job: Json) -> None:
        self._end_container(Failed(step.exit_code, lines=step.lines), job)
        self._restart(job)

    def _lose_node(self, step: NodeLost, job: Json) -> None:
        pods = self._pods.of(job, "node")
        lost = pods[min(step.rank, len(pods) - 1)]
        self._pods.event(lost, "Warning", "NodeNotReady", "Node is not ready", "node-controller")
        self._pods.remove(lost)
        self._restart(job)

    def _restart(self, job: Json) -> None:
        most = self._children.max_restarts
        self._epoch += 1
        if self._attempt >= most:
            reason = "ReachedMaxRestarts" if most else "FailedJobs"
            said = _no_restarts_left(self._name) if most else _jobs_failed(self._name)
            self._later(CONTROLLERS_S, partial(self._fail, reason, said))
            return
        self._attempt += 1
        self._take_down(job)
        self._later(CONTROLLERS_S, self._next)

    def _take_down(self, job: Json) -> None:
        for pod in self._pods.of(job):
            self._pods.remove(pod)
        self._is_up = False

    def _admit(self) -> None:
        job = self._children.job()
        if job is not None:
            self._pods.event(job, "Normal", "Admitted", "Admitted by clusterQueue cluster-queue", "kueue-admission")
            self._store.replace({**job, "spec": {**job["spec"], "suspend": False}})

    def _preempt(self, step: Preempted, job: Json) -> None:
        self._script.insert(0, Queued(step.seconds))
        self._pods.event(job, "Normal", "Preempted", "Preempted to accommodate a workload", "kueue-admission")
        self._store.replace({**job, "spec": {**job["spec"], "suspend": True}})

    def _suspend(self, job: Json) -> None:
        self._epoch += 1
        self._take_down(job)
        self._suspended(job)
        self._later(CONTROLLERS_S, self._next)

    def _suspended(self, job: Json) -> None:
        self._children.condition("Suspended", "True", "Suspended", "TrainJob is suspended")
        self._children.report(suspended=1)
        if QUEUE_LABEL in job["metadata"].get("labels", {}):
            self._pods.event(job, "Normal", "CreatedWorkload", "Created Workload", "kubeflow.org/trainjob-kueue")

    def _resumed(self, job: Json) -> None:
        self._epoch += 1
        self._children.condition("Suspended", "False", "Resumed", "TrainJob is resumed")
        self._start_deadline(job)
        if self._script and isinstance(self._script[0], Queued):
            self._script.pop(0)
        self._later(CONTROLLERS_S, self._next)

    def _start_deadline(self, job: Json) -> None:
        self._num_admissions += 1
        seconds = job["spec"].get("activeDeadlineSeconds")
        if seconds is not None:
            self._store.clock.call_in(seconds, partial(self._exceed_deadline, self._num_admissions))

    def _exceed_deadline(self, admission: int) -> None:
        """The time since the last admission is over, restarts or not."""
        job = self._children.job()
        if job is None or is_finished(job) or job["spec"]["suspend"] or admission != self._num_admissions:
            return
        self._take_down(job)
        self._fail("DeadlineExceeded", "TrainJob exceeded its active deadline")

    def _complete(self, step: Complete, job: Json) -> None:
        self._pods.say(self._pods.of(job, "node")[0], *step.lines)
        for pod in self._pods.of(job):
            self._pods.stop(pod, 0, "Completed")
        self._later(CONTROLLERS_S, self._completed)

    def _completed(self) -> None:
        self._epoch += 1
        self._children.report(succeeded=1)
        self._children.condition("Complete", "True", "AllJobsCompleted", "jobset completed successfully")

    def _fail(self, reason: str, message: str) -> None:
        self._epoch += 1
        job = self._children.job()
        for pod in self._pods.of(job) if job else []:
            if pod["status"]["phase"] == "Running":
                # JobSet deletes the jobs that still run.
                self._pods.remove(pod)
        self._children.report(failed=1)
        self._children.condition("Failed", "True", reason, message)


def _jobs_failed(name: str) -> str:
    return f"jobset failed due to one or more job failures (first failed job: {name}-node-0)"


def _no_restarts_left(name: str) -> str:
    return f"jobset failed due to reaching max number of restarts (first failed job: {name}-node-0)"
