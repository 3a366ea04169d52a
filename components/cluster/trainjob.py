"""Runs a job as a TrainJob on a cluster: submits or adopts it, watches it, retries it where that helps, removes it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import kube
from components.cluster.config import ClusterStage
from components.cluster.failures import condition, error_of_ranks, failure_reason
from components.cluster.job import Job
from components.cluster.kube import Clock, Json, RetryPolicy, Snapshot, SystemClock, TrainJobs, UnavailableError
from components.cluster.logs import log_tails, write_records
from components.cluster.manifest import job_name, owner_reference, server_urls, train_job
from components.cluster.termination import Termination
from components.cluster.watch import DeletedError, Phase, StalledError, Watch
from components.shared.environment import POD_VARIABLE, SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say

_PASSED_ON = (WEIGHTS_VARIABLE, "HF_HUB_OFFLINE")
"""Environment variables of this process that its ranks get."""
_VISIBLE_S, _RESULTS_POLL_S = 90.0, 3.0
"""Time until a shared file system shows here what a rank has written elsewhere."""
_GONE_S, _GONE_POLL_S = 300.0, 2.0
"""Time for a deleted job to disappear, in addition to that for its pods to end."""
_LINES_SHOWN = 20


_RETRIED = (StalledError, DeletedError, UnavailableError)
"""Errors of the watch after which the step tries again by itself."""


def run_on_cluster(job: Job, stage: ClusterStage, clock: Clock | None = None) -> dict[str, float]:
    """Have a cluster run a job; return the first rank's result.

    Ranks write outputs beside the job, and these are moved into place once all ranks have succeeded: an adopted job
    writes to the same folders whichever attempt of the step waits for it.

    Raises:
        PipelineError: The job, its data or the cluster's configuration is wrong.
        RetryableError: The failure may pass; the same job goes on where this one stopped.
        SystemExit: This process was asked to stop. The job is deleted, unless this pod is, which another may follow.
    """
    inside = replace(job, outputs={name: str(job.folder / "outputs" / name) for name in job.outputs})
    results = _ClusterRun(inside, stage, clock or SystemClock()).results()
    for name, place in job.outputs.items():
        Path(place).rmdir()
        Path(inside.outputs[name]).rename(place)
    return results[0]


class _ClusterRun:
    """A job from its submission to its end, over all attempts."""

    def __init__(self, job: Job, stage: ClusterStage, clock: Clock) -> None:
        self._job, self._stage, self._clock = job, stage, clock
        here, pod = kube.own_namespace(), os.environ.get(POD_VARIABLE)
        self._jobs = TrainJobs(kube.connect(), stage.config.namespace or here)
        # Kubernetes takes an owner in another namespace for one that is gone, and would delete the job with it.
        owner = self._owner(pod) if pod and self._jobs.namespace == here else None
        self._name = job_name(job, stage)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if job.with_samplers:
            environment[SERVERS_VARIABLE] = ",".join(server_urls(self._name, stage.config.rollout_servers))
        self._manifest = train_job(job, stage, environment, owner, clock.now().isoformat())
        self._submission = Submission(self._jobs, clock, stage.stage, job.grace_s)
        self._termination = Termination(
            stage.stage, self._jobs.namespace, self._name, pod=(here, pod) if pod else None, work=job.folder.parent
        )

    def _owner(self, pod: str) -> Json | None:
        return owner_reference(RetryPolicy(self._clock).call(f"read the pod {pod}", lambda: self._jobs.pod(pod)))

    def results(self) -> list[dict[str, float]]:
        """Return the results of all ranks, after as many attempts as the configuration allows."""
        with self._termination.handled(), self._deleted_on_bugs():
            for retries_left in range(self._stage.config.max_restarts, -1, -1):
                outcome = self._attempt(last=not retries_left)
                if not isinstance(outcome, RetryableError):
                    return outcome
                if not retries_left:
                    raise RetriesExhaustedError(str(outcome)) from outcome
                after = f"{retries_left - 1} more times after that" if retries_left > 1 else "for the last time"
                say(self._stage.stage, f"{outcome}; trying again with {self._name}, {after}")
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, *, last: bool) -> list[dict[str, float]] | RetryableError:
        """Return the results, or an error after which to try again; raise any other error."""
        try:
            # The cluster has to answer first: a job may end while it does not.
            labels = {kube.RUN_ID: self._stage.run_id}
            RetryPolicy(self._clock).call("list training jobs", lambda: self._jobs.find(labels))
            results = self._earlier_results()
            return self._run_once(last=last) if results is None else results
        except UnavailableError as error:
            return error

    def _earlier_results(self) -> list[dict[str, float]] | None:
        """Return the results of this job, if it succeeded while no step was waiting for it."""
        results = self._job.results() if self._job.is_written() else None
        if results is None or not all(Path(path).is_dir() for path in self._job.outputs.values()):
            return None
        say(self._stage.stage, f"{self._name} has succeeded before")
        self._remove()
        return results

    @contextmanager
    def _deleted_on_bugs(self) -> Iterator[None]:
        """Leave no job behind when this code itself fails."""
        try:
            yield
        except PipelineError:
            raise
        except Exception:
            with suppress(client.ApiException, HTTPError):
                self._jobs.delete(self._name, pods_first=True)
            raise

    def _run_once(self, *, last: bool) -> list[dict[str, float]] | RetryableError:
        """As `_attempt`; with `last`, a job that has not ended is removed in any case."""
        watch = Watch(self._jobs, self._stage, self._clock, self._submit())
        self._termination.stop_other_requests = watch.stop
        phase: Phase | None = None
        watch_error: PipelineError | None = None
        try:
            phase = watch.until_end()
        except PipelineError as error:
            watch_error = error
        results = self._results(phase)
        tails = self._record(watch)
        if results is not None:
            self._leave(watch.seen, succeeded=True, ended=phase is not None)
            return results
        failure = watch_error or self._failure(watch.seen, tails)
        transient = isinstance(failure, RetryableError) and (watch_error is None or isinstance(failure, _RETRIED))
        if transient and not last:
            if not isinstance(failure, UnavailableError):  # such a job runs on, and is adopted
                self._submission.remove(self._name)  # or one that hangs would be adopted, too
            return RetryableError(str(failure))
        self._print_ends(tails)
        self._leave(watch.seen, succeeded=False, ended=phase is not None)
        if transient:
            raise RetriesExhaustedError(str(failure)) from failure
        raise failure

    def _submit(self) -> Json:
        self._manifest["metadata"]["annotations"][kube.HEARTBEAT] = self._clock.now().isoformat()
        self._termination.is_creating = True
        job = self._submission.submit(self._manifest, self._job.write)
        self._termination.is_creating = False
        return job

    def _results(self, phase: Phase | None) -> list[dict[str, float]] | None:
        """Return the results of all ranks; where they exist, it does not matter what happened to the job later."""
        deadline = self._clock.monotonic() + _VISIBLE_S
        while phase is Phase.COMPLETE and self._job.results() is None and self._clock.monotonic() < deadline:
            self._clock.sleep(_RESULTS_POLL_S)
        return self._job.results()

    def _record(self, watch: Watch) -> dict[str, list[str]]:
        """Write the records of this attempt; return the ends of its logs."""
        watch.finish()
        tails = log_tails(self._jobs, self._job, watch.seen, watch.log.lines if watch.log else ())
        try:
            folder = write_records(self._stage.records, self._jobs, self._job, watch.seen, tails)
            say(self._stage.stage, f"logs, events and manifest of {self._name} are in {folder}")
        except OSError as error:
            say(self._stage.stage, f"could not write logs, events and manifest of {self._name}: {error}")
        return tails

    def _failure(self, seen: Snapshot, tails: Mapping[str, Sequence[str]]) -> Exception:
        reason = failure_reason(seen.job, seen.pods, tails, error_of_ranks(self._job))
        if isinstance(reason, PipelineError | OSError):
            return reason
        # A bug: its traceback is in the log of the rank, and this process has none to show.
        return PipelineError(str(reason).split("\n", 1)[0])

    def _print_ends(self, tails: Mapping[str, Sequence[str]]) -> None:
        """Print the ends of logs, without the first rank's, which has been printed already."""
        for where, lines in tails.items():
            if where != "rank 0" and lines:
                print("\n".join([f"the end of the log of {where}:", *lines[-_LINES_SHOWN:]]), flush=True)

    def _leave(self, seen: Snapshot, *, succeeded: bool, ended: bool) -> None:
        """Remove the job, or leave one that has ended for inspection; one that has not would run on unattended."""
        delete = self._stage.config.delete
        if not ended or delete == "always" or (succeeded and delete == "on_success"):
            self._remove()
            return
        with suppress(client.ApiException, HTTPError):
            self._jobs.beat(seen.job, None)  # the reaper ignores it then
        say(self._stage.stage, f"{self._name} is left in the cluster (cluster.delete is {delete})")

    def _remove(self) -> None:
        try:
            self._submission.remove(self._name)
        except PipelineError as error:
            say(self._stage.stage, f"{self._name} may be left in the cluster until the reaper removes it: {error}")


@dataclass(frozen=True)
class Submission:
    """How a job gets into the cluster and out of it."""

    jobs: TrainJobs
    clock: Clock
    stage: str
    grace_s: float
    """Time for the job's pods to end."""

    def submit(self, manifest: Json, write: Callable[[], None]) -> Json:
        """Return the job as it is in the cluster: adopted where it is there already, else created after `write`.

        Another job of this stage, or one that has ended, is removed first. So is a job of another run with the same
        work: this step holds the lock of that folder, so the step that waited for the job is gone.

        Raises:
            PipelineError: The cluster refuses the job.
            UnavailableError: The API server does not answer, or an old job does not disappear.
        """
        for job in self._find(manifest, kube.RUN_ID, kube.STAGE):
            if _is_same(job, manifest) and not _is_over(job):
                return self._adopt(job, manifest)
            self.remove(job["metadata"]["name"])
        for job in self._find(manifest, kube.WORK):
            name = job["metadata"]["name"]
            say(self.stage, f"removing {name}, a job of another run with the same work; its checkpoints are used")
            self.remove(name)
        self._wait_until_gone(manifest["metadata"]["name"])
        write()
        return self._create(manifest)

    def remove(self, name: str) -> None:
        """Delete a job; UnavailableError where it does not disappear with its pods in time."""
        self._retries.call(f"delete the training job {name}", lambda: self.jobs.delete(name, pods_first=True))
        self._wait_until_gone(name)

    def _find(self, manifest: Json, *labels: str) -> list[Json]:
        """Return the jobs in the cluster whose values of these labels are those of the manifest."""
        values = {label: manifest["metadata"]["labels"][label] for label in labels}
        return self._retries.call("list training jobs", lambda: self.jobs.find(values))

    def _wait_until_gone(self, name: str) -> None:
        """Wait until neither a job nor a pod of it is left: two would write the same checkpoints."""
        limit_s = self.grace_s + _GONE_S
        deadline = self.clock.monotonic() + limit_s
        while self._exists(name):
            if self.clock.monotonic() > deadline:
                raise UnavailableError(f"{name}: its pods still exist {limit_s:g} s after it was deleted")
            self.clock.sleep(_GONE_POLL_S)

    def _exists(self, name: str) -> bool:
        return self._read(name) is not None or bool(self._retries.call("list pods", lambda: self.jobs.pods(name)))

    def _read(self, name: str) -> Json | None:
        return self._retries.call(f"read the training job {name}", lambda: self.jobs.get(name))

    def _adopt(self, job: Json, manifest: Json) -> Json:
        """Take over a job: its heartbeat and its owner are now those of this step."""
        name, metadata = job["metadata"]["name"], manifest["metadata"]
        say(self.stage, f"{name} exists already and is adopted")
        changes = {"annotations": {kube.HEARTBEAT: metadata["annotations"][kube.HEARTBEAT]}}
        if "ownerReferences" in metadata:
            changes["ownerReferences"] = metadata["ownerReferences"]
        self._retries.call(f"adopt the training job {name}", lambda: self.jobs.patch(job, changes))
        return job

    def _create(self, manifest: Json) -> Json:
        name = manifest["metadata"]["name"]
        self._retries.call(f"create the training job {name}", lambda: self.jobs.create(manifest))
        job = self._read(name)
        if job is None:
            raise RetryableError(f"{name}: somebody deleted it as soon as it was submitted")
        if not _is_same(job, manifest):
            raise PipelineError(f"{name}: another training job has this name; delete it")
        say(self.stage, f"submitted {name}")
        return job

    @property
    def _retries(self) -> RetryPolicy:
        return RetryPolicy(self.clock)


def _is_same(job: Json, manifest: Json) -> bool:
    """Tell whether a job is what would be submitted."""
    annotations, wanted = job["metadata"].get("annotations") or {}, manifest["metadata"]
    is_named = job["metadata"]["name"] == wanted["name"]
    return bool(is_named and annotations.get(kube.SPEC_DIGEST) == wanted["annotations"][kube.SPEC_DIGEST])


def _is_over(job: Json) -> bool:
    """Tell whether a job has ended or is being deleted."""
    ended = any(condition(job, kind)["status"] == "True" for kind in ("Complete", "Failed"))
    return ended or "deletionTimestamp" in job["metadata"]
