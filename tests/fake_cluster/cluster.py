"""The scripted cluster behind the server: what is installed in it, and what happens to the TrainJobs created in it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fake_cluster import script
from tests.fake_cluster.admission import QUEUE_LABEL, runtime_of
from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import (
    NAMESPACES,
    PODS,
    TRAIN_JOBS,
    TRAINING_RUNTIMES,
    WORKFLOWS,
    WORKLOADS,
    Kind,
    kind_of,
)
from tests.fake_cluster.pods import ANCESTOR_LABEL, Pods, pods_of
from tests.fake_cluster.processes import Processes, free_port
from tests.fake_cluster.store import Change, Store, key_of, reference_to

_CONTROLLERS_S = 0.5
"""Time that the controllers take until there are pods."""
_STARTS_S = 2.0
"""Time that a pod with a node takes until its containers run."""
_NEED_PODS = (script.Running, script.Executed, script.Failed, script.Complete, script.NodeLost, script.Preempted)


class ScriptedCluster:
    """The objects behind the API, for the test to arrange and to look at.

    At the start there are the namespaces `default` and the test's own. All methods take the lock that guards time and
    objects.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self.store, self._namespace = store, namespace
        self.uninstalled: set[Kind] = set()
        """Kinds whose definition is missing: their paths answer 404."""
        self._pods = Pods(store)
        self.outputs = self._pods.outputs
        self._processes = Processes(store, self._pods)
        self._script = script.SUCCEEDS
        self._runs: dict[str, TrainingRun] = {}
        for name in {"default", namespace}:
            self.add(_document(NAMESPACES, name))
        store.listen(self._follow)

    def add(self, *documents: Json) -> list[Json]:
        """Create objects as they are, past all rules; in the test's namespace where they name none."""
        with self.store.clock.changed:
            for document in documents:
                if kind_of(document["apiVersion"], document["kind"]) != NAMESPACES:
                    document["metadata"].setdefault("namespace", self._namespace)
            return [self.store.create(document) for document in documents]

    def add_runtime(self, name: str = "grpo-torch", **options: Any) -> None:
        """Create a runtime; see `runtime`."""
        self.add(runtime(name, **options))

    def add_workflow(self, name: str, **labels: str) -> Json:
        """Create the workflow of a run, to which the pods of its steps belong."""
        document = _document(WORKFLOWS, name)
        document["metadata"]["labels"] = labels
        return self.add(document)[0]

    def add_pod(self, name: str, workflow: Json | None = None) -> Json:
        """Create the pod that the code under test runs in, a step of the workflow if there is one."""
        spec = {"containers": [{"name": "main", "image": "light"}], "nodeName": "cpu-0"}
        pod = {**_document(PODS, name), "spec": spec, "status": {"phase": "Running"}}
        if workflow is not None:
            pod["metadata"]["ownerReferences"] = [reference_to(workflow)]
        return self.add(pod)[0]

    def drain(self, name: str) -> None:
        """Begin to delete a pod, as an eviction does: it exists until its containers have ended."""
        with self.store.clock.changed:
            pod = self.store.get(PODS, self._namespace, name)
            assert pod is not None
            pod["metadata"]["deletionTimestamp"] = self.store.clock.stamp()
            self.store.replace(pod)

    def print(self, pod: Json, *lines: str, container: str = "main") -> None:
        """Have a container of a pod print lines and end."""
        with self.store.clock.changed:
            self._pods.print(pod, *lines, container=container)
            self._pods.end_logs(pod)

    def play(self, *steps: script.Step) -> None:
        """Set the script of the TrainJobs to come."""
        self._script = steps

    def all(self, kind: Kind) -> list[Json]:
        """Return all objects of a kind."""
        with self.store.clock.changed:
            return self.store.all(kind)

    def remove(self, kind: Kind, name: str) -> None:
        """Remove an object as if somebody had deleted it; what it owns is collected."""
        with self.store.clock.changed:
            self.store.remove((kind, self._namespace, name))

    def close(self) -> None:
        """End what runs as a process."""
        self._processes.close()

    def _follow(self, change: Change) -> None:
        if change.kind != TRAIN_JOBS:
            return
        job, uid = change.after, change.after["metadata"]["uid"]
        if change.type == "ADDED":
            self._runs[uid] = TrainingRun(self.store, self._pods, self._processes, job, self._script)
        if change.type == "DELETED":
            self._runs.pop(uid).deleted()
        else:
            self._runs[uid].changed(change.before, job)


def runtime(name: str, *, max_restarts: int = 0, jobs: tuple[str, ...] = ("node",)) -> Json:
    """Return the manifest of a TrainingRuntime with one container per job, named as the job."""
    job_set = {"replicatedJobs": list(map(_replicated_job, jobs)), "failurePolicy": {"maxRestarts": max_restarts}}
    spec = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": job_set}}
    document = {**_document(TRAINING_RUNTIMES, name), "spec": spec}
    document["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "torch"}
    return document


def _replicated_job(name: str) -> Json:
    step = {ANCESTOR_LABEL: "trainer"} if name == "node" else {}
    containers = [{"name": name, "image": "gpu"}]
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 60, "containers": containers}}
    return {"name": name, "template": {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": pod}}}


def _document(kind: Kind, name: str) -> Json:
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}}


class TrainingRun:
    """Follows a script for one TrainJob, until that ends or is deleted."""

    def __init__(self, store: Store, pods: Pods, processes: Processes, job: Json, steps: script.Script) -> None:
        self._store, self._pods, self._processes = store, pods, processes
        self._key = key_of(job)
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

    def changed(self, before: Json | None, after: Json) -> None:
        """The TrainJob is new, or has changed: suspending and resuming take effect."""
        is_suspended = after["spec"].get("suspend", False)
        if before and (before["spec"].get("suspend", False) == is_suspended or _is_finished(after)):
            return
        self._epoch += 1
        if is_suspended:
            self._take_down(after)
            self._condition("Suspended", "True", "Suspended", "TrainJob is suspended")
        else:
            self._start_deadline(after)
            if before:
                self._condition("Suspended", "False", "Resumed", "TrainJob is resumed")
            if before and self._script and isinstance(self._script[0], script.Queued):
                self._script.pop(0)
        self._later(_CONTROLLERS_S, self._next)

    def deleted(self) -> None:
        """The TrainJob is deleted: nothing of the script happens any more."""
        self._epoch += 1
        self._script.clear()

    def _job(self) -> Json:
        job = self._store.get(*self._key)
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
        if "deletionTimestamp" in job["metadata"]:
            return  # its pods go first
        if job["spec"].get("suspend") and not isinstance(step, script.Queued):
            return  # no script has queued it: it waits for whoever suspended it
        if isinstance(step, _NEED_PODS) and not (self._is_up and self._pods.of(job)):
            for pod in self._with_pods(job):
                self._pods.assign(pod)
            self._later(_STARTS_S, self._up)
            return
        self._script.pop(0)
        play: dict[type, Callable[[Any, Json], None]] = {
            script.Queued: self._queue,
            script.Unschedulable: self._wait,
            script.PullBackOff: self._wait,
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
            self._pods.create(job, self._runtime, self._attempt)
        return self._pods.of(job)

    def _up(self) -> None:
        pods = self._pods.of(self._job())
        if not pods:
            return  # they were deleted while they were starting
        for pod in pods:
            self._pods.start(pod)
        self._is_up = True
        self._next()

    def _wait(self, step: script.Unschedulable | script.PullBackOff, job: Json) -> None:
        for pod in self._with_pods(job):
            if isinstance(step, script.PullBackOff):
                self._pods.pull_fails(pod, step.message)
            else:
                self._pods.unschedulable(pod, step.message)
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
        else:
            self._later(_CONTROLLERS_S, self._fail)

    def _take_down(self, job: Json) -> None:
        for pod in self._pods.of(job):
            self._pods.remove(pod)
        self._is_up = False

    def _queue(self, step: script.Queued, job: Json) -> None:
        self._tell_workload(job, "QuotaReserved", "False", "Pending", step.message)
        self._later(step.seconds, self._admit)

    def _admit(self) -> None:
        job = self._job()
        self._tell_workload(job, "Evicted", "False", "QuotaReserved", "Previously: Preempted")
        self._tell_workload(job, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue gpu")
        self._tell_workload(job, "Admitted", "True", "Admitted", "The workload is admitted")
        self._store.replace({**job, "spec": {**job["spec"], "suspend": False}})

    def _preempt(self, step: script.Preempted, job: Json) -> None:
        self._script.insert(0, script.Queued(step.seconds))
        why = "Preempted to accommodate a workload (UID: 1, JobUID: 2) due to prioritization in the ClusterQueue"
        self._tell_workload(job, "Evicted", "True", "Preempted", why)
        self._tell_workload(job, "Admitted", "False", "NoReservation", "The workload has no reservation")
        self._store.replace({**job, "spec": {**job["spec"], "suspend": True}})

    def _tell_workload(self, job: Json, *condition: str) -> None:
        """Write a condition into the Workload of a queued job, which is created with the first."""
        metadata, queue = job["metadata"], job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        if queue is None:
            return
        name = f"trainjob-{metadata['name']}-{metadata['uid'][-5:]}"
        workload = self._store.get(WORKLOADS, metadata["namespace"], name)
        if workload is None:
            pods = [pod["spec"] for pod in pods_of(job, self._runtime, 0)]
            own = {"namespace": metadata["namespace"], "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]}}
            document = _document(WORKLOADS, name)
            document["metadata"] |= {**own, "ownerReferences": [reference_to(job)]}
            sets = [{"name": "node", "count": len(pods), "template": {"metadata": {}, "spec": pods[0]}}]
            spec = {"active": True, "priority": 0, "queueName": queue, "podSets": sets}
            workload = self._store.create({**document, "spec": spec})
        _set_condition(self._store, workload, *condition)

    def _start_deadline(self, job: Json) -> None:
        """Fail the job when the time since this admission is over, restarts or not."""
        self._num_admissions += 1
        admission, seconds = self._num_admissions, job["spec"].get("activeDeadlineSeconds")

        def exceed() -> None:
            job = self._store.get(*self._key)
            if job and admission == self._num_admissions and not job["spec"].get("suspend") and not _is_finished(job):
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
        self._condition("Complete", "True", "AllJobsCompleted", "jobset completed successfully")

    def _fail(self, reason: str = "FailedJobs", why: str = "jobset failed due to one or more job failures") -> None:
        self._epoch += 1
        for pod in self._pods.of(self._job()):
            if pod["status"]["phase"] == "Running":
                # JobSet deletes the jobs that still run.
                self._pods.remove(pod)
        first = f" (first failed job: {self._key[2]}-node-0)" if why.startswith("jobset") else ""
        self._condition("Failed", "True", reason, why + first)

    def _condition(self, type_: str, status: str, reason: str, message: str) -> None:
        """Write a condition into the TrainJob's status."""
        _set_condition(self._store, self._job(), type_, status, reason, message)


def _set_condition(store: Store, document: Json, type_: str, status: str, reason: str, message: str) -> None:
    current = document.get("status", {})
    others = [each for each in current.get("conditions", []) if each["type"] != type_]
    condition = {"type": type_, "status": status, "reason": reason, "message": message}
    condition["lastTransitionTime"] = store.clock.stamp()
    store.patch(key_of(document), status={**current, "conditions": [*others, condition]})


def _is_finished(job: Json) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)
