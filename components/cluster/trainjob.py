"""Runs a job as a TrainJob on a cluster: submits or adopts it, watches it, retries it if that can help, removes it."""

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
_PASSED_ON = (WEIGHTS_VARIABLE, "HF_HUB_OFFLINE")  # environment variables that ranks inherit from this process
_VISIBLE_S, _RESULTS_POLL_S = 90.0, 3.0  # time until a shared file system shows what a rank wrote on another node
_GONE_S, _GONE_POLL_S = 300.0, 2.0  # time for a deleted job to disappear, in addition to that for its pods to end
_TURN_S = 60.0  # time that another run of the same work may take to submit its job
_LINES_SHOWN = 20
_Results = list[dict[str, float]]


def run_on_cluster(job: Job, stage: ClusterStage, clock: Clock | None = None) -> dict[str, float]:
    """Run a job on a cluster; return the first rank's result.

    Raises:
        PipelineError: The job, its data or the cluster's configuration is wrong.
        RetryableError: The failure may pass; the same job, started again, resumes.
        SystemExit: This process was asked to stop; `Termination` says what happens to the job.
    """
    # Ranks write outputs into the job's folder, because a step that adopts the job has other output folders.
    submitted = replace(job, outputs={name: str(job.folder / "outputs" / name) for name in job.outputs})
    results = _ClusterRun(submitted, stage, clock or Clock()).run()
    for name, path in job.outputs.items():
        Path(path).rmdir()
        Path(submitted.outputs[name]).rename(path)
    return results[0]


class _ClusterRun:
    """A job from its submission to its end, over all attempts."""

    def __init__(self, job: Job, stage: ClusterStage, clock: Clock) -> None:
        self._job, self._stage, self._clock = job, stage, clock
        self._retries = RetryPolicy(clock)
        here, pod = kube.own_namespace(), os.environ.get(POD_VARIABLE)
        self._jobs = TrainJobs(kube.connect(), stage.config.namespace or here)
        # An owner in another namespace counts as missing: Kubernetes would delete the job.
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

    def run(self) -> _Results:
        """Return the results of all ranks. After an unexpected error, no job is left behind."""
        with self._termination.handled():
            try:
                return self._run_attempts()
            except PipelineError:
                raise
            except Exception:
                with suppress(client.ApiException, HTTPError):
                    self._jobs.delete(self._name, pods_first=True)
                raise

    def _run_attempts(self) -> _Results:
        retries_left = self._stage.config.max_restarts
        while True:
            try:
                return self._attempt(last=not retries_left)
            except RetryableError as error:
                if error.is_final:  # a stop was requested, or a wait took its whole time
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
        self._find(kube.RUN_ID)  # waits until the cluster answers: a job may end, and leave results, while it does not
        outputs_exist = all(Path(path).is_dir() for path in self._job.outputs.values())
        earlier_results = self._job.results() if outputs_exist and self._job.is_written() else None
        if earlier_results is not None:
            self._say(f"{self._name} has succeeded before")
            self._clean_up()
            return earlier_results
        watch = Watch(self._jobs, self._stage, self._clock, self._submit())
        self._termination.stop_other_requests = watch.stop
        outcome: Phase | Exception
        try:
            outcome = watch.until_end(self._take_turn)
        except PipelineError as error:
            outcome = error
        except BaseException as error:
            watch.stop()
            if isinstance(error, OvertakenError):  # another run has the results, so nobody needs this job
                self._clean_up()
            raise
        return self._end(watch, outcome, last=last)

    def _end(self, watch: Watch, outcome: Phase | Exception, *, last: bool) -> _Results:
        """Delete the watched job; return its results, even if the job failed after that, or raise why it failed."""
        work = current_work()
        is_ours = work is None or work.is_locked  # otherwise another run has the folder, with results of its job
        results = None
        if is_ours:
            deadline = self._clock.monotonic() + (_VISIBLE_S if outcome is Phase.COMPLETE else 0.0)
            while (results := self._job.results()) is None and self._clock.monotonic() < deadline:
                self._clock.sleep(_RESULTS_POLL_S)
        tails = watch.record(self._job)
        if results is not None:
            self._clean_up()
            return results
        if isinstance(outcome, Phase):
            reported = error_of_ranks(self._job) if is_ours else None
            outcome = failure_reason(watch.job, watch.pods, tails, reported)
        if isinstance(outcome, RetryableError) and not outcome.is_final and not last:
            # If the API server was unavailable, the job may be healthy, and the next attempt adopts it.
            if not isinstance(outcome, UnavailableError):
                self._delete(self._name)
            raise outcome
        _print_ends(tails)
        self._clean_up()
        # The traceback of a bug is in the log of its rank; this process shows its first line.
        raise PipelineError(str(outcome).split("\n", 1)[0]) if isinstance(outcome, RuntimeError) else outcome

    def _submit(self) -> Json:
        """Return the job as it is in the cluster: adopted if it exists already, otherwise created.

        A job of this stage that has ended, or has other settings, is deleted first. The same holds for the job with the
        turn, even of another run: the step of that run is gone, as this step has the lock. Other runs' jobs in a queue
        are left to their steps.
        """
        annotations = _annotations(self._manifest)
        annotations[kube.HEARTBEAT] = self._clock.now().isoformat()
        turn = Job.turn(self._job.folder)
        with_turn = [job for job in self._find(kube.WORK) if job["metadata"]["name"] == turn]
        for job in [*self._find(kube.RUN_ID, kube.STAGE), *with_turn]:
            is_same = _annotations(job).get(kube.SPEC_DIGEST) == annotations[kube.SPEC_DIGEST]
            if is_same and not _is_over(job):
                return self._adopt(job)
            name = job["metadata"]["name"]
            if other := self._other_run(job):
                self._say(f"removing {name} of run {other}, which has the same work; its checkpoints are used")
            self._delete(name)
        self._name = self._termination.job_name = self._manifest["metadata"]["name"]
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
        """Release the work folder while the job is in a queue; lock it and let the pods begin once it is admitted.

        Meanwhile other runs may do the same work; OvertakenError if one has finished it. Without a queue in the config,
        a suspended job keeps its turn.
        """
        work = current_work()
        if phase is Phase.QUEUED and self._stage.config.queue is not None:
            if work is None:
                return
            if work.is_locked:  # by `_attempt`, to submit the job
                self._job.end_turn()
                work.unlock()
            work.require_unchanged()
        elif phase in (Phase.PENDING, Phase.RUNNING):
            self._lock_work()
            if Job.turn(self._job.folder) != self._name:
                self._begin_turn()

    def _lock_work(self) -> None:
        """Lock the work folder; OvertakenError if another run has locked it for longer than submitting a job takes."""
        work, deadline = current_work(), self._clock.monotonic() + _TURN_S
        while work is not None and not work.is_locked and not work.lock_again():
            if self._clock.monotonic() > deadline:
                raise OvertakenError
            self._clock.sleep(_GONE_POLL_S)

    def _begin_turn(self) -> None:
        """Write the job for the pods of this TrainJob, once no other TrainJob's pods use the same checkpoints."""
        work = self._manifest["metadata"]["labels"][kube.WORK]

        def others() -> list[Json]:
            pods = [pod for pod in self._jobs.pods(kube.WORK, work) if pod["status"].get("phase") not in _ENDED]
            return [pod for pod in pods if pod["metadata"]["labels"].get(kube.JOB_SET) != self._name]

        self._wait_until_none(others)
        self._job.write(self._name)

    def _find(self, *labels: str) -> list[Json]:
        """Return the jobs in the cluster that have the same values of these labels as this job."""
        values = {label: self._manifest["metadata"]["labels"][label] for label in labels}
        return self._retries.call("list training jobs", lambda: self._jobs.find(values))

    def _adopt(self, job: Json) -> Json:
        """Take over a job that is in the cluster: renew its heartbeat, and assign it to this run and its workflow."""
        self._name = self._termination.job_name = job["metadata"]["name"]
        other = self._other_run(job)
        self._say(f"{self._name} exists already and is adopted{f' from run {other}' if other else ''}")
        annotations = {key: _annotations(self._manifest)[key] for key in (kube.HEARTBEAT, kube.RUN_NAME)}
        changes = {"annotations": annotations, "labels": {kube.RUN_ID: self._stage.run_id}}
        if owners := self._manifest["metadata"].get("ownerReferences"):
            changes["ownerReferences"] = owners
        self._retries.call(f"adopt the training job {self._name}", lambda: self._jobs.patch(job, changes))
        return job

    def _other_run(self, job: Json) -> str:
        """Return the name of a job's run if it is another run; empty if it is this one."""
        run_id: str = job["metadata"]["labels"][kube.RUN_ID]
        return "" if run_id == self._stage.run_id else _annotations(job).get(kube.RUN_NAME) or run_id

    def _clean_up(self) -> None:
        """Delete this job; if that fails, leave it to the reaper."""
        try:
            self._delete(self._name)
        except PipelineError as error:
            self._say(f"{self._name} may be left in the cluster until the reaper removes it: {error}")

    def _delete(self, name: str) -> None:
        """Delete a job; UnavailableError if it does not disappear with its pods in time."""
        self._retries.call(f"delete the training job {name}", lambda: self._jobs.delete(name, pods_first=True))
        self._wait_until_gone(name)

    def _wait_until_gone(self, name: str) -> None:
        """Wait until a job and its pods are gone: a second job would write the same checkpoints."""

        def remaining() -> list[Json]:
            job = self._jobs.get(name)
            return [job] if job else self._jobs.pods(kube.JOB_SET, name)

        self._wait_until_none(remaining)

    def _wait_until_none(self, find: Callable[[], list[Json]]) -> None:
        """Wait until `find` returns no job or pod; UnavailableError if that takes too long."""
        limit_s = self._job.grace_s + _GONE_S  # pods may take long to write a last checkpoint
        deadline = self._clock.monotonic() + limit_s
        while remaining := self._retries.call("list pods", find):
            if self._clock.monotonic() > deadline:
                names = ", ".join(each["metadata"]["name"] for each in remaining)
                raise UnavailableError(f"{names}: still exist {limit_s:g} s after the training job was deleted")
            self._clock.sleep(_GONE_POLL_S)


def _print_ends(tails: dict[str, list[str]]) -> None:
    for where, lines in tails.items():
        if where != "rank 0" and lines:  # the log of rank 0 has been printed already
            say_line("\n".join([f"the end of the log of {where}:", *lines[-_LINES_SHOWN:]]))


def _annotations(job: Json) -> dict[str, str]:
    return job["metadata"].get("annotations") or {}


def _is_over(job: Json) -> bool:
    ended = any(condition(job, kind)["status"] == "True" for kind in ("Complete", "Failed"))
    return ended or "deletionTimestamp" in job["metadata"]
