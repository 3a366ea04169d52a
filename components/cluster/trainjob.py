"""Runs a job as a TrainJob on a cluster: submits or adopts it, watches it, retries it where that helps, removes it."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import kube
from components.cluster.config import ClusterStage
from components.cluster.failures import condition, error_of_ranks, failure_reason
from components.cluster.job import Job
from components.cluster.kube import Clock, Json, RetryPolicy, TrainJobs, UnavailableError
from components.cluster.manifest import owner_reference, train_job
from components.cluster.termination import Termination
from components.cluster.watch import Phase, Watch
from components.shared.environment import IMAGE_VARIABLE, POD_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say, say_line
from components.shared.work import OvertakenError, current_work

_ENDED = ("Succeeded", "Failed")
_PASSED_ON = (WEIGHTS_VARIABLE, "HF_HUB_OFFLINE")
"""Environment variables of this process that its ranks get."""
_VISIBLE_S, _RESULTS_POLL_S = 90.0, 3.0
"""Time until a shared file system shows here what a rank has written elsewhere."""
_GONE_S, _GONE_POLL_S = 300.0, 2.0
"""Time for a deleted job to disappear, in addition to that for its pods to end."""
_TURN_S = 60.0
"""Time that another run of the same work may take to submit its job."""
_LINES_SHOWN = 20
_Results = list[dict[str, float]]


def run_on_cluster(job: Job, stage: ClusterStage, clock: Clock | None = None) -> dict[str, float]:
    """Run a job on a cluster; return the first rank's result.

    Ranks write outputs beside the job, wherever the step that waits for them has its own; at the end they are moved.

    Raises:
        PipelineError: The job, its data or the cluster's configuration is wrong.
        RetryableError: The failure may pass; the same job goes on where this one stopped.
        SystemExit: This process was asked to stop. The job is deleted, unless this pod is, which another may follow.
    """
    inside = replace(job, outputs={name: str(job.folder / "outputs" / name) for name in job.outputs})
    results = _ClusterRun(inside, stage, clock or Clock()).results()
    for name, place in job.outputs.items():
        Path(place).rmdir()
        Path(inside.outputs[name]).rename(place)
    return results[0]


class _ClusterRun:
    """A job from its submission to its end, over all attempts."""

    def __init__(self, job: Job, stage: ClusterStage, clock: Clock) -> None:
        self._job, self._stage, self._clock = job, stage, clock
        self._retries = RetryPolicy(clock)
        here, pod = kube.own_namespace(), os.environ.get(POD_VARIABLE)
        self._jobs = TrainJobs(kube.connect(), stage.config.namespace or here)
        # Kubernetes takes an owner in another namespace for one that is gone, and would delete the job with it.
        owner = None
        if pod and self._jobs.namespace == here:
            owner = owner_reference(self._retries.call(f"read the pod {pod}", lambda: self._jobs.pod(pod)))
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment[IMAGE_VARIABLE] = stage.config.image
        self._manifest = train_job(job, stage, environment, owner, clock.now().isoformat())
        self._name: str = self._manifest["metadata"]["name"]
        self._termination = Termination(
            stage.stage, self._jobs.namespace, self._name, pod=(here, pod) if pod else None, work=job.folder.parent
        )

    def results(self) -> _Results:
        """Return the results of all ranks."""
        with self._termination.handled():
            try:
                return self._results_of_attempts()
            except PipelineError:
                raise
            except Exception:  # this code itself fails: no job is left behind
                with suppress(client.ApiException, HTTPError):
                    self._jobs.delete(self._name, pods_first=True)
                raise

    def _results_of_attempts(self) -> _Results:
        retries_left = self._stage.config.max_restarts
        while True:
            try:
                return self._attempt(last=not retries_left)
            except RetryableError as error:
                if error.is_final:
                    raise
                if not retries_left:
                    raise RetriesExhaustedError(str(error)) from error
                retries_left -= 1
                after = f"{retries_left} more times after that" if retries_left else "for the last time"
                self._say(f"{error}; trying again with {self._name}, {after}")

    def _say(self, message: str) -> None:
        say(self._stage.stage, message)

    def _attempt(self, *, last: bool) -> _Results:
        """Return the results; a RetryableError that is not final asks for another attempt, unless this is the last."""
        self._lock_work()
        # The cluster has to answer first: a job may end while it does not.
        self._find(kube.RUN_ID)
        earlier = self._earlier_results()
        if earlier is not None:
            return earlier
        watch = Watch(self._jobs, self._stage, self._clock, self._submit())
        self._termination.stop_other_requests = watch.stop
        phase: Phase | None = None
        failure: Exception | None = None
        try:
            phase = watch.until_end(self._take_turn)
        except PipelineError as error:
            failure = error
        except BaseException as error:
            watch.stop()
            if isinstance(error, OvertakenError):
                self._remove()
            raise
        work = current_work()
        is_ours = work is None or work.is_locked  # else the results are those of the run that has the folder
        results = self._results(phase) if is_ours else None
        tails = watch.record(self._job)
        if results is not None:
            self._remove()
            return results
        of_ranks = error_of_ranks(self._job) if is_ours else None
        failure = failure or failure_reason(watch.job, watch.pods, tails, of_ranks)
        is_transient = isinstance(failure, RetryableError) and not failure.is_final
        if is_transient and not last:
            if not isinstance(failure, UnavailableError):  # such a job runs on, and is adopted
                self._delete(self._name)  # or one that hangs would be adopted, too
            raise failure
        _print_ends(tails)
        self._remove()
        # The traceback of a bug is in the log of its rank, and this process has none to show.
        raise PipelineError(str(failure).split("\n", 1)[0]) if isinstance(failure, RuntimeError) else failure

    def _earlier_results(self) -> _Results | None:
        """Return the results of this job, if it succeeded while no step was waiting for it."""
        outputs_exist = all(Path(path).is_dir() for path in self._job.outputs.values())
        results = self._job.results() if outputs_exist and self._job.is_written() else None
        if results is not None:
            self._say(f"{self._name} has succeeded before")
            self._remove()
        return results

    def _results(self, phase: Phase | None) -> _Results | None:
        # Where they exist, it does not matter what happened to the job later.
        deadline = self._clock.monotonic() + _VISIBLE_S
        while phase is Phase.COMPLETE and self._job.results() is None and self._clock.monotonic() < deadline:
            self._clock.sleep(_RESULTS_POLL_S)
        return self._job.results()

    def _submit(self) -> Json:
        """Return the job as it is in the cluster: adopted where it is there already, else created.

        Also one of another run that has begun the same work: this step holds the lock, so that run's step is gone. One
        with other settings, or that has ended, is removed first. Jobs that wait in a queue are left to their steps.
        """
        _annotations(self._manifest)[kube.HEARTBEAT] = self._clock.now().isoformat()
        turn = Job.turn(self._job.folder)
        others = [job for job in self._find(kube.WORK) if job["metadata"]["name"] == turn]
        for job in [*self._find(kube.RUN_ID, kube.STAGE), *others]:
            if self._is_same(job) and not _is_over(job):
                return self._adopt(job)
            name = job["metadata"]["name"]
            if other := self._other_run(job):
                self._say(f"removing {name} of run {other}, which has the same work; its checkpoints are used")
            self._delete(name)
        self._use_name(self._manifest["metadata"]["name"])
        self._wait_until_gone(self._name)
        if self._stage.config.queue is None:
            self._begin_turn()
        else:
            self._job.write()
        self._termination.is_creating = True
        self._retries.call(f"create the training job {self._name}", lambda: self._jobs.create(self._manifest))
        self._termination.is_creating = False
        created = self._retries.call(f"read the training job {self._name}", lambda: self._jobs.get(self._name))
        if created is None:
            raise RetryableError(f"{self._name}: somebody deleted it as soon as it was submitted")
        self._say(f"submitted {self._name}")
        return created

    def _take_turn(self, phase: Phase) -> None:
        """Lock the work and let the pods begin once the queue has admitted the job; before, others may do the work."""
        work = current_work()
        if phase is Phase.QUEUED and self._stage.config.queue is not None:
            if work is not None and work.is_locked:
                self._job.end_turn()
                work.unlock()
            if work is not None:
                work.require_unchanged()
        elif phase in (Phase.PENDING, Phase.RUNNING):
            self._lock_work()
            if Job.turn(self._job.folder) != self._name:
                self._begin_turn()

    def _lock_work(self) -> None:
        work, deadline = current_work(), self._clock.monotonic() + _TURN_S
        while work is not None and not work.is_locked and not work.lock_again():
            if self._clock.monotonic() > deadline:
                raise OvertakenError
            self._clock.sleep(_GONE_POLL_S)

    def _begin_turn(self) -> None:
        work = self._manifest["metadata"]["labels"][kube.WORK]

        def others() -> list[Json]:
            pods = self._jobs.pods(kube.WORK, work)
            pods = [pod for pod in pods if pod["metadata"]["labels"].get(kube.JOB_SET) != self._name]
            return [pod for pod in pods if pod["status"].get("phase") not in _ENDED]

        self._wait_for_pods(others)
        self._job.write(self._name)

    def _find(self, *labels: str) -> list[Json]:
        values = {label: self._manifest["metadata"]["labels"][label] for label in labels}
        return self._retries.call("list training jobs", lambda: self._jobs.find(values))

    def _is_same(self, job: Json) -> bool:
        return _annotations(job).get(kube.SPEC_DIGEST) == _annotations(self._manifest)[kube.SPEC_DIGEST]

    def _adopt(self, job: Json) -> Json:
        self._use_name(job["metadata"]["name"])
        other = self._other_run(job)
        self._say(f"{self._name} exists already and is adopted{f' from run {other}' if other else ''}")
        annotations = {key: _annotations(self._manifest)[key] for key in (kube.HEARTBEAT, kube.RUN_NAME)}
        changes = {"annotations": annotations, "labels": {kube.RUN_ID: self._stage.run_id}}
        if owners := self._manifest["metadata"].get("ownerReferences"):
            changes["ownerReferences"] = owners
        self._retries.call(f"adopt the training job {self._name}", lambda: self._jobs.patch(job, changes))
        return job

    def _other_run(self, job: Json) -> str:
        """Return the name of the run that a job is of, if it is another; else nothing."""
        run_id: str = job["metadata"]["labels"][kube.RUN_ID]
        return "" if run_id == self._stage.run_id else _annotations(job).get(kube.RUN_NAME) or run_id

    def _use_name(self, name: str) -> None:
        self._name = self._termination.job_name = name

    def _remove(self) -> None:
        """Delete this job; where that fails, the reaper does."""
        try:
            self._delete(self._name)
        except PipelineError as error:
            self._say(f"{self._name} may be left in the cluster until the reaper removes it: {error}")

    def _delete(self, name: str) -> None:
        """Delete a job; UnavailableError where it does not disappear with its pods in time."""
        self._retries.call(f"delete the training job {name}", lambda: self._jobs.delete(name, pods_first=True))
        self._wait_until_gone(name)

    def _wait_until_gone(self, name: str) -> None:
        """Wait until neither a job nor a pod of it is left: two would write the same checkpoints."""
        self._wait_for_pods(lambda: [job] if (job := self._jobs.get(name)) else self._jobs.pods(kube.JOB_SET, name))

    def _wait_for_pods(self, find: Callable[[], list[Json]]) -> None:
        limit_s = self._job.grace_s + _GONE_S  # pods may take long to write a last checkpoint
        deadline = self._clock.monotonic() + limit_s
        while left := self._retries.call("list pods", find):
            if self._clock.monotonic() > deadline:
                names = ", ".join(each["metadata"]["name"] for each in left)
                raise UnavailableError(f"{names}: still exist {limit_s:g} s after the training job was deleted")
            self._clock.sleep(_GONE_POLL_S)


def _print_ends(tails: dict[str, list[str]]) -> None:
    for where, lines in tails.items():
        if where != "rank 0" and lines:  # the first rank's has been printed already
            say_line("\n".join([f"the end of the log of {where}:", *lines[-_LINES_SHOWN:]]))


def _annotations(job: Json) -> dict[str, str]:
    return job["metadata"].get("annotations") or {}


def _is_over(job: Json) -> bool:
    ended = any(condition(job, kind)["status"] == "True" for kind in ("Complete", "Failed"))
    return ended or "deletionTimestamp" in job["metadata"]
