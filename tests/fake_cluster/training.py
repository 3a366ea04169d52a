"""One TrainJob's life in the scripted cluster: the controllers of Trainer, JobSet and Kueue, step by step."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fake_cluster import script
from tests.fake_cluster.admission import QUEUE_LABEL, runtime_of
from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import JOB_SETS, JOBS, TRAIN_JOBS, Kind
from tests.fake_cluster.pods import Pods, pods_of
from tests.fake_cluster.processes import Processes, free_port
from tests.fake_cluster.store import Store, reference_to

_CONTROLLERS_S = 0.5
"""Time that the controllers take until there are pods."""
_STARTS_S = 2.0
"""Time that a pod with a node takes until its containers run."""
_NEED_PODS = (script.Running, script.Executed, script.Failed, script.Complete, script.NodeLost, script.Preempted)


class TrainingRun:
    """Follows a script for one TrainJob, until that ends or is deleted."""

    def __init__(self, store: Store, pods: Pods, processes: Processes, job: Json, steps: script.Script) -> None:
        self._store, self._pods, self._processes = store, pods, processes
        self._namespace, self._name = job["metadata"]["namespace"], job["metadata"]["name"]
        self._script = list(steps)
        self._attempt = 0
        self._epoch = 0
        """Counts what makes all that is scheduled for the job void: suspension, restart, its end."""
        self._codes: dict[str, int] = {}
        self._num_admissions = 0
        self._is_up = False
        """Whether the containers run."""
        runtime = runtime_of(store, job)
        assert runtime is not None, "the webhook admits no TrainJob without its runtime"
        self._runtime = runtime

    def begin(self, job: Json) -> None:
        """The controllers see the new TrainJob."""
        if job["spec"].get("suspend"):
            self._report_suspended(job)
        else:
            self._start_deadline(job)
        self._later(_CONTROLLERS_S, self._next)

    def changed(self, before: Json, after: Json) -> None:
        """The TrainJob has changed: suspending and resuming take effect."""
        is_suspended = after["spec"].get("suspend")
        if before["spec"].get("suspend") == is_suspended or _is_finished(after):
            return
        self._epoch += 1
        if is_suspended:
            self._take_down(after)
            self._report_suspended(after)
        else:
            self._condition("Suspended", "False", "Resumed", "TrainJob is resumed")
            self._start_deadline(after)
            if self._script and isinstance(self._script[0], script.Queued):
                self._script.pop(0)
        self._later(_CONTROLLERS_S, self._next)

    def deleted(self) -> None:
        """The TrainJob is deleted: nothing of the script happens any more."""
        self._epoch += 1
        self._script.clear()

    def _job(self) -> Json:
        job = self._store.get(TRAIN_JOBS, self._namespace, self._name)
        assert job is not None
        return job

    def _later(self, seconds: float | None, action: Callable[[], None]) -> None:
        """Do something then, unless the job is suspended, restarted, ended or deleted by then."""
        epoch = self._epoch
        if seconds is not None:
            self._store.clock.call_in(seconds, lambda: action() if epoch == self._epoch else None)

    def _next(self) -> None:
        if not self._script:
            return
        job, step = self._job(), self._script[0]
        if job["spec"].get("suspend") and not isinstance(step, script.Queued):
            # No script has queued it: it waits for whoever suspended it.
            return
        if isinstance(step, _NEED_PODS) and not self._is_up:
            for pod in self._with_pods(job):
                self._pods.assign(pod)
            self._later(_STARTS_S, self._up)
            return
        self._script.pop(0)
        play: dict[type, Callable[[Any, Json], None]] = {
            script.Queued: lambda step, _: self._later(step.seconds, self._admit),
            script.Unschedulable: self._find_no_node,
            script.PullBackOff: self._back_off,
            script.Running: self._run,
            script.Executed: self._execute,
            script.Preempted: self._preempt,
            script.NodeLost: self._lose_node,
            script.Failed: self._end_and_fail,
            script.Complete: self._complete,
            script.Do: self._do,
        }
        play[type(step)](step, job)

    def _with_pods(self, job: Json) -> list[Json]:
        """Return the job's pods, created if there are none."""
        if not self._pods.of(job):
            job_set = self._child(JOB_SETS, self._name, job)
            for name, pod in pods_of(job, self._runtime, self._attempt):
                self._pods.create(pod, reference_to(self._child(JOBS, name, job_set)))
            self._report(active=1)
        return self._pods.of(job)

    def _child(self, kind: Kind, name: str, owner: Json) -> Json:
        metadata = {"name": name, "namespace": self._namespace, "ownerReferences": [reference_to(owner)]}
        document = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": {}}
        return self._store.get(kind, self._namespace, name) or self._store.create(document)

    def _up(self) -> None:
        pods = self._pods.of(self._job())
        if not pods:
            return  # they were deleted while they were starting
        for pod in pods:
            self._pods.start(pod)
        self._is_up = True
        self._report(active=1, ready=1)
        self._next()

    def _find_no_node(self, step: script.Unschedulable, job: Json) -> None:
        for pod in self._with_pods(job):
            self._pods.unschedulable(pod, step.message)
        self._later(step.seconds, self._next)

    def _back_off(self, step: script.PullBackOff, job: Json) -> None:
        for pod in self._with_pods(job):
            self._pods.assign(pod)
            self._pods.pull_fails(pod, step.message)
        self._later(step.seconds, self._next)

    def _do(self, step: script.Do, _: Json) -> None:
        step.action()
        self._next()

    def _run(self, step: script.Running, job: Json) -> None:
        first = self._pods.of(job, "node")[0]
        every = (step.seconds if step.seconds is not None else len(step.lines)) / (len(step.lines) or 1)
        for number, line in enumerate(step.lines):
            self._later(every * number, partial(self._pods.print, first, line))
        self._later(step.seconds, self._next)

    def _execute(self, step: script.Executed, job: Json) -> None:
        pods, port = self._pods.of(job, "node"), free_port()
        self._codes.clear()
        for pod in pods:
            ended = partial(self._executed, step, self._epoch, len(pods))
            self._processes.start(pod, port, dict(step.environment), ended)

    def _executed(self, step: script.Executed, epoch: int, num_pods: int, pod: Json, code: int) -> None:
        """One container has ended; the first that fails, or the last, decides how the job goes on."""
        if epoch != self._epoch:
            return
        self._pods.stop(pod, code, "Error" if code else "Completed")
        self._codes[pod["metadata"]["name"]] = code
        if code:
            self._script.insert(0, step)
            self._restart()
        elif len(self._codes) == num_pods:
            self._later(_CONTROLLERS_S, self._completed)

    def _end_and_fail(self, step: script.Failed, job: Json) -> None:
        pods = self._pods.of(job, "node")
        failing = pods[min(step.rank, len(pods) - 1)]
        self._pods.print(failing, *step.lines)
        self._pods.stop(failing, step.exit_code, step.reason)
        self._later(_CONTROLLERS_S, self._fail)

    def _lose_node(self, step: script.NodeLost, job: Json) -> None:
        pods = self._pods.of(job, "node")
        lost = pods[min(step.rank, len(pods) - 1)]
        self._pods.event(lost, "Warning", "NodeNotReady", "Node is not ready")
        self._pods.remove(lost)
        self._restart()

    def _restart(self) -> None:
        """JobSet starts all pods anew, or fails where the runtime allows no further restart."""
        limit = self._runtime["spec"]["template"]["spec"].get("failurePolicy", {}).get("maxRestarts", 0)
        self._epoch += 1
        if self._attempt < limit:
            self._attempt += 1
            self._take_down(self._job())
            self._later(_CONTROLLERS_S, self._next)
        elif limit:
            why = "jobset failed due to reaching max number of restarts"
            self._later(_CONTROLLERS_S, partial(self._fail, "ReachedMaxRestarts", why))
        else:
            self._later(_CONTROLLERS_S, self._fail)

    def _take_down(self, job: Json) -> None:
        for pod in self._pods.of(job):
            self._pods.remove(pod)
        self._is_up = False

    def _admit(self) -> None:
        job = self._job()
        self._pods.event(job, "Normal", "Admitted", "Admitted by clusterQueue cluster-queue")
        self._store.replace({**job, "spec": {**job["spec"], "suspend": False}})

    def _preempt(self, step: script.Preempted, job: Json) -> None:
        self._script.insert(0, script.Queued(step.seconds))
        self._pods.event(job, "Normal", "Preempted", "Preempted to accommodate a workload")
        self._store.replace({**job, "spec": {**job["spec"], "suspend": True}})

    def _report_suspended(self, job: Json) -> None:
        self._condition("Suspended", "True", "Suspended", "TrainJob is suspended")
        self._report(suspended=1)
        if QUEUE_LABEL in job["metadata"].get("labels", {}):
            self._pods.event(job, "Normal", "CreatedWorkload", "Created Workload")

    def _start_deadline(self, job: Json) -> None:
        """Fail the job when the time since this admission is over, restarts or not."""
        self._num_admissions += 1
        admission, seconds = self._num_admissions, job["spec"].get("activeDeadlineSeconds")

        def exceed() -> None:
            job = self._store.get(TRAIN_JOBS, self._namespace, self._name)
            is_current = job is not None and admission == self._num_admissions and not job["spec"].get("suspend")
            if job is not None and is_current and not _is_finished(job):
                self._take_down(job)
                self._fail("DeadlineExceeded", "TrainJob exceeded its active deadline")

        if seconds is not None:
            self._store.clock.call_in(seconds, exceed)

    def _complete(self, _: script.Complete, job: Json) -> None:
        for pod in self._pods.of(job):
            self._pods.stop(pod, 0, "Completed")
        self._later(_CONTROLLERS_S, self._completed)

    def _completed(self) -> None:
        self._epoch += 1
        self._report(succeeded=1)
        self._condition("Complete", "True", "AllJobsCompleted", "jobset completed successfully")

    def _fail(self, reason: str = "FailedJobs", why: str = "jobset failed due to one or more job failures") -> None:
        self._epoch += 1
        for pod in self._pods.of(self._job()):
            if pod["status"]["phase"] == "Running":
                # JobSet deletes the jobs that still run.
                self._pods.remove(pod)
        self._report(failed=1)
        first = f" (first failed job: {self._name}-node-0)" if why.startswith("jobset") else ""
        self._condition("Failed", "True", reason, why + first)

    def _condition(self, type_: str, status: str, reason: str, message: str) -> None:
        """Write a condition into the TrainJob's status."""
        current = self._job().get("status", {})
        others = [each for each in current.get("conditions", []) if each["type"] != type_]
        condition = {"type": type_, "status": status, "reason": reason, "message": message}
        condition["lastTransitionTime"] = self._store.clock.stamp()
        self._set_status({**current, "conditions": [*others, condition]})

    def _report(self, **counts: int) -> None:
        """Write the state of the replicated jobs into the status of the TrainJob."""
        zero = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
        jobs = [
            {"name": each["name"], **zero, **{key: n * each.get("replicas", 1) for key, n in counts.items()}}
            for each in self._runtime["spec"]["template"]["spec"]["replicatedJobs"]
        ]
        self._set_status({**self._job().get("status", {}), "jobsStatus": jobs})

    def _set_status(self, status: Json) -> None:
        self._store.patch(TRAIN_JOBS, self._namespace, self._name, status=status)


def _is_finished(job: Json) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)
