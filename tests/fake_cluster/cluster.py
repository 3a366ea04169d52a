"""The scripted cluster behind the server: what is installed in it, and what happens to the TrainJobs created in it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fake_cluster import script
from tests.fake_cluster.admission import runtime_of
from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import JOB_SETS, NAMESPACES, PODS, TRAIN_JOBS, TRAINING_RUNTIMES, WORKFLOWS, Kind, kind_of
from tests.fake_cluster.kueue import Kueue
from tests.fake_cluster.pods import ANCESTOR_LABEL, Pods, job_set_of
from tests.fake_cluster.store import Change, Store, key_of, reference_to

_CONTROLLERS_S, _STARTS_S = 0.5, 2.0
"""Time until there are pods, and until the containers of a pod with a node run."""
_LOW_MEMORY = "The node was low on resource: memory."
_NEED_PODS = (script.Running, script.Failed, script.Complete, script.NodeLost, script.Preempted)


class ScriptedCluster:
    """The objects behind the API, for the test to arrange and to look at; all methods take the lock."""

    def __init__(self, store: Store, namespace: str) -> None:
        self.store, self._namespace = store, namespace
        self.uninstalled: set[Kind] = set()
        """Kinds whose definition is missing: their paths answer 404."""
        self._pods = Pods(store)
        self.outputs = self._pods.outputs
        self._script: script.Script = ()
        self._runs: dict[str, TrainingRun] = {}
        self.controllers_return_s = 0.0
        """Until when, in seconds of the clock, the controllers of Trainer, JobSet and Kueue do nothing."""
        for name in {"default", namespace}:
            self.add(_document(NAMESPACES, name))
        store.listen(self._follow)

    def add(self, *documents: Json) -> list[Json]:
        """Create objects as they are; in the test's namespace where they name none."""
        with self.store.clock.changed:
            for document in documents:
                if kind_of(document["apiVersion"], document["kind"]).namespaced:
                    document["metadata"].setdefault("namespace", self._namespace)
            return [self.store.create(document) for document in documents]

    def add_runtime(self, name: str = "grpo-torch", namespace: str = "", **options: Any) -> None:
        """Create a runtime; see `_runtime`."""
        document = _runtime(name, **options)
        document["metadata"]["namespace"] = namespace or self._namespace
        self.add(document)

    def add_workflow(self, name: str, **labels: str) -> Json:
        """Create the workflow of a run, to which the pods of its steps belong."""
        document = _document(WORKFLOWS, name)
        document["metadata"]["labels"] = labels
        return self.add(document)[0]

    def add_pod(self, name: str, workflow: Json | None = None) -> Json:
        """Create the pod that the code under test runs in, a step of the workflow if there is one."""
        pod = {**_document(PODS, name), "spec": {"containers": []}, "status": {"phase": "Running"}}
        if workflow is not None:
            pod["metadata"]["ownerReferences"] = [reference_to(workflow)]
        return self.add(pod)[0]

    def drain(self, name: str) -> None:
        """Delete a pod as the drain of its node does: it exists until its containers have ended."""
        with self.store.clock.changed:
            pod = self._find(PODS, name)
            self._pods.disrupt(pod, "EvictionByEvictionAPI", "Eviction API: evicting")
            self.store.delete(key_of(pod))

    def evict(self, name: str) -> None:
        """End a pod whose node is short of memory, as its kubelet does: it stays, and has failed."""
        with self.store.clock.changed:
            self._pods.disrupt(self._find(PODS, name), "TerminationByKubelet", _LOW_MEMORY)
            self._pods.stop(self._find(PODS, name), 137, "Error", evicted=_LOW_MEMORY)

    def _find(self, kind: Kind, name: str) -> Json:
        return next(each for each in self.store.all(kind) if each["metadata"]["name"] == name)

    def print(self, pod: Json, *lines: str, container: str = "main") -> None:
        """Print lines from a container of a pod, and end its log."""
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
            for document in self.store.all(kind):
                if document["metadata"]["name"] == name:
                    self.store.remove(key_of(document))

    def _follow(self, change: Change) -> None:
        if change.kind == PODS and change.before is not None:
            for run in self._runs.values():
                run.pod_changed(change.after, is_gone=change.type == "DELETED")
        if change.kind != TRAIN_JOBS:
            return
        job, uid = change.after, change.after["metadata"]["uid"]
        if change.type == "ADDED":
            self._runs[uid] = TrainingRun(self, self._pods, job, self._script)
        if change.type == "DELETED":
            self._runs.pop(uid).deleted()
        else:
            self._runs[uid].changed(change.before, job)


def _runtime(name: str, *, max_restarts: int = 0, jobs: tuple[str, ...] = ("node",)) -> Json:
    """Return the manifest of a TrainingRuntime with one container per job, named as the job."""
    job_set = {"replicatedJobs": list(map(_replicated_job, jobs)), "failurePolicy": {"maxRestarts": max_restarts}}
    spec = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": job_set}}
    document = {**_document(TRAINING_RUNTIMES, name), "spec": spec}
    document["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "torch"}
    return document


def _replicated_job(name: str) -> Json:
    step = {ANCESTOR_LABEL: "trainer"} if name == "node" else {}
    containers = [{"name": name, "image": "gpu"}]
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 660, "containers": containers}}
    return {"name": name, "template": {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": pod}}}


def _document(kind: Kind, name: str) -> Json:
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}}


class TrainingRun:
    """Follows a script for one TrainJob, until that ends or is deleted."""

    def __init__(self, cluster: ScriptedCluster, pods: Pods, job: Json, steps: script.Script) -> None:
        self._cluster, self._store, self._pods = cluster, cluster.store, pods
        self._kueue = Kueue(self._store)
        self._key = key_of(job)
        self._script = list(steps)
        self._attempt = 0
        self._epoch = 0
        """Counts what makes all that is scheduled for the job void: suspension, restart, its end."""
        self._alive: set[str] = set()  # uids of pods
        runtime = runtime_of(self._store, job)
        assert runtime is not None, "the webhook admits no TrainJob without its runtime"
        self._runtime = runtime

    def changed(self, before: Json | None, after: Json) -> None:
        """The TrainJob is new, or has changed: suspending and resuming take effect."""
        is_suspended = after["spec"].get("suspend", False)
        if before and (before["spec"].get("suspend", False) == is_suspended or _is_finished(after)):
            return
        self._epoch += 1
        if before is None:
            self._kueue.queue(after)
        self._later(_CONTROLLERS_S if before is None or not is_suspended else 0, self._reconcile)

    def _reconcile(self) -> None:
        """Trainer makes the JobSet what the TrainJob says."""
        job = self._job()
        wanted, current = job_set_of(job, self._runtime), self._store.get(JOB_SETS, *self._key[1:])
        if current is None:
            current = self._store.create({**wanted, "status": {}})
        self._store.replace({**current, "spec": wanted["spec"]})
        if job["spec"].get("suspend"):
            self._take_down(job)
            self._condition("Suspended", "True", "Suspended", "TrainJob is suspended")
        else:
            self._start_deadline(job)
            if any(each["type"] == "Suspended" for each in job.get("status", {}).get("conditions", [])):
                self._condition("Suspended", "False", "Resumed", "TrainJob is resumed")
        self._next()

    def pod_changed(self, pod: Json, *, is_gone: bool) -> None:
        """A pod that should run is being deleted, is gone or has ended: all start anew, as often as they may."""
        uid = pod["metadata"]["uid"]
        has_ended = pod["status"].get("phase") in ("Failed", "Succeeded") or "deletionTimestamp" in pod["metadata"]
        if uid in self._alive and (is_gone or has_ended):
            self._alive.clear()
            if "deletionTimestamp" in self._job()["metadata"]:
                self._epoch += 1
            else:
                self._restart()

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

        def act() -> None:
            wait_s = self._cluster.controllers_return_s - self._store.clock.monotonic()
            if epoch == self._epoch and wait_s > 0:
                self._later(wait_s, action)
            elif epoch == self._epoch:
                action()

        if seconds is not None:
            self._store.clock.call_in(seconds, act)

    def _next(self) -> None:
        if not self._script:
            return
        job, step = self._job(), self._script[0]
        if job["spec"].get("suspend") and not isinstance(step, script.Queued):
            return  # no script has queued it: it waits for whoever suspended it
        if any("deletionTimestamp" in pod["metadata"] for pod in self._pods.of(job)):
            self._later(_CONTROLLERS_S, self._next)  # no pod is made before those of the attempt before are gone
            return
        if isinstance(step, _NEED_PODS) and not (self._alive and self._pods.of(job)):
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
            script.Preempted: self._preempt,
            script.NodeLost: self._lose_node,
            script.Failed: self._end_and_fail,
            script.Complete: self._complete,
            script.Do: self._do,
        }
        play[type(step)](step, job)

    def _with_pods(self, job: Json) -> list[Json]:
        if not self._pods.of(job):
            job_set = self._store.get(JOB_SETS, *self._key[1:])
            assert job_set is not None
            self._pods.create(job_set, self._attempt)
        return self._pods.of(job)

    def _up(self) -> None:
        pods = self._pods.of(self._job())
        for pod in pods:
            self._pods.start(pod)
        self._alive = {pod["metadata"]["uid"] for pod in pods}
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

    def _end_and_fail(self, step: script.Failed, job: Json) -> None:
        pods = self._pods.of(job, "node")
        failing = pods[min(step.rank, len(pods) - 1)]
        self._alive.clear()
        self._pods.print(failing, *step.lines)
        self._pods.stop(failing, step.exit_code, step.reason)
        self._later(_CONTROLLERS_S, self._fail)

    def _lose_node(self, step: script.NodeLost, job: Json) -> None:
        pods = self._pods.of(job, "node")
        self._store.remove(key_of(pods[min(step.rank, len(pods) - 1)]))

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
        self._alive.clear()
        for pod in self._pods.of(job):
            self._store.delete(key_of(pod))

    def _preempt(self, step: script.Preempted, job: Json) -> None:
        self._script.insert(0, script.Queued(step.seconds))
        self._kueue.preempt(job)

    def _queue(self, step: script.Queued, job: Json) -> None:
        self._kueue.wait(job, step.message)
        self._later(step.seconds, lambda: self._kueue.admit(self._job()))

    def _start_deadline(self, job: Json) -> None:
        """Fail the job when its time is over, restarts or not."""
        seconds = job["spec"].get("activeDeadlineSeconds")

        def exceed() -> None:
            self._take_down(self._job())
            self._fail("DeadlineExceeded", "TrainJob exceeded its active deadline")

        if seconds is not None:
            self._store.clock.call_in(seconds, exceed)

    def _complete(self, _: script.Complete, job: Json) -> None:
        self._alive.clear()
        for pod in self._pods.of(job):
            self._pods.stop(pod, 0, "Completed")
        self._later(_CONTROLLERS_S, self._completed)

    def _completed(self) -> None:
        self._epoch += 1
        self._condition("Complete", "True", "AllJobsCompleted", "jobset completed successfully")

    def _fail(self, reason: str = "FailedJobs", why: str = "jobset failed due to one or more job failures") -> None:
        self._epoch += 1
        self._alive.clear()
        for pod in self._pods.of(self._job()):
            if pod["status"]["phase"] == "Running":
                # JobSet deletes the jobs that still run.
                self._store.delete(key_of(pod))
        first = f" (first failed job: {self._key[2]}-node-0)" if why.startswith("jobset") else ""
        self._condition("Failed", "True", reason, why + first)

    def _condition(self, type_: str, status: str, reason: str, message: str) -> None:
        self._store.set_conditions(self._key, (type_, status, reason, message))


def _is_finished(job: Json) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)
