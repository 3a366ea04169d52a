"""A job of several ranks on a cluster: submitted, watched, submitted again where that may help, and removed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster import names
from components.cluster.api import connect, own_namespace
from components.cluster.clock import Clock, SystemClock
from components.cluster.cluster import Cluster
from components.cluster.job import Job
from components.cluster.rank_errors import error_of_ranks
from components.cluster.trainjob.causes import cause
from components.cluster.trainjob.manifest import Json, Owner, job_name, server_urls, train_job
from components.cluster.trainjob.objects import Objects
from components.cluster.trainjob.patience import Patience, UnansweredError
from components.cluster.trainjob.records import keep, tails_of
from components.cluster.trainjob.state import Phase
from components.cluster.trainjob.submission import LingeringError, Submission, beat
from components.cluster.trainjob.termination import Termination
from components.cluster.trainjob.watch import LostError, Seen, StalledError, Watch
from components.shared.environment import POD_VARIABLE, SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say

_PASSED_ON = (WEIGHTS_VARIABLE, "HF_HUB_OFFLINE")
"""Variables of this process that ranks are told."""
_VISIBLE_S, _POLL_S = 90.0, 3.0
"""Time until a shared file system shows here what a rank has written elsewhere."""
_LINES_SHOWN = 20
_TRIED_AGAIN = (StalledError, LostError, UnansweredError)
"""Ends of the watch after which the step goes on by itself."""


def run_on_cluster(job: Job, cluster: Cluster, clock: Clock | None = None) -> dict[str, float]:
    """Have a cluster run the job; return what the first rank returns.

    What the ranks make they make beside the job, and it is moved to where it belongs once all have ended well: a job
    that is adopted meanwhile writes nowhere else.

    Raises:
        PipelineError: The job, its data or the cluster's set-up is wrong.
        RetryableError: Something that may pass; the same job goes on where this one has stopped.
        SystemExit: This process was told to stop; the job is deleted, unless this pod is, which another may follow.
    """
    inside = replace(job, outputs={name: str(job.folder / "outputs" / name) for name in job.outputs})
    results = _ClusterRun(inside, cluster, clock or SystemClock()).results()
    for name, place in job.outputs.items():
        Path(place).rmdir()
        Path(inside.outputs[name]).rename(place)
    return results[0]


class _ClusterRun:
    def __init__(self, job: Job, cluster: Cluster, clock: Clock) -> None:
        self._job, self._cluster, self._clock = job, cluster, clock
        here, pod = own_namespace(), os.environ.get(POD_VARIABLE)
        self._objects = Objects(connect(), cluster.config.namespace or here)
        # To the cluster an owner in another namespace is one that is gone, and the job would go with it.
        owner = self._owner(pod) if pod and self._objects.namespace == here else None
        self._name = job_name(job, cluster)
        told = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if job.with_samplers:
            told[SERVERS_VARIABLE] = ",".join(server_urls(self._name, cluster.config.rollout_servers))
        self._manifest = train_job(job, cluster, told, owner, clock.now().isoformat())
        self._submission = Submission(self._objects, clock, cluster.stage, job.grace_s)
        self._termination = Termination(
            cluster.stage, self._objects.namespace, self._name, pod=(here, pod) if pod else None, work=job.folder.parent
        )

    def _owner(self, pod: str) -> Owner | None:
        return Owner.of(Patience(self._clock).ask(f"tell of the pod {pod}", lambda: self._objects.pod(pod)))

    def results(self) -> list[dict[str, float]]:
        """Run the job to its end, however often it takes."""
        with self._termination.prepared(), self._removed_on_mistakes():
            for left in range(self._cluster.config.max_restarts, -1, -1):
                outcome = self._tried(last=not left)
                if not isinstance(outcome, Exception):
                    return outcome
                if not left:
                    raise RetriesExhaustedError(str(outcome)) from outcome
                after = f"{left - 1} more times after that" if left > 1 else "for the last time"
                say(self._cluster.stage, f"{outcome}; trying again with {self._name}, {after}")
        raise AssertionError("the last attempt returns or raises")

    def _tried(self, *, last: bool) -> list[dict[str, float]] | RetryableError:
        """Return what the ranks return, or why the step may try again; raise what trying again does not cure."""
        try:
            # First the cluster has to answer: a job may end while it does not.
            labels = {names.RUN_ID: self._cluster.run_id}
            Patience(self._clock).ask("list training jobs", lambda: self._objects.jobs(labels))
            results = self._results_of_before()
            return self._run_once(last=last) if results is None else results
        except (UnansweredError, LingeringError) as error:
            return error

    def _results_of_before(self) -> list[dict[str, float]] | None:
        """Return what the ranks of this very job have returned, if it has ended well while nobody looked."""
        found = self._job.results() if self._job.is_written() else None
        if found is None or not all(Path(path).is_dir() for path in self._job.outputs.values()):
            return None
        say(self._cluster.stage, f"{self._name} has ended well before")
        self._remove()
        return found

    @contextmanager
    def _removed_on_mistakes(self) -> Iterator[None]:
        """Leave no job behind when this code itself fails."""
        try:
            yield
        except PipelineError:
            raise
        except Exception:
            with suppress(client.ApiException, HTTPError):
                self._objects.delete(self._name)
            raise

    def _run_once(self, *, last: bool) -> list[dict[str, float]] | RetryableError:
        """As `_tried`; with `last` nothing of the job is left that has not ended."""
        watch = Watch(self._objects, self._cluster, self._clock, self._submitted())
        self._termination.silence = watch.stop
        phase: Phase | None = None
        given_up: PipelineError | None = None
        try:
            phase = watch.until_end()
        except PipelineError as error:
            given_up = error
        results = self._results(phase)
        tails = self._recorded(watch)
        if results is not None:
            self._leave(watch.seen, well=True, ended=phase is not None)
            return results
        failure = given_up or self._cause(watch.seen, tails)
        may_pass = isinstance(failure, RetryableError) and (given_up is None or isinstance(failure, _TRIED_AGAIN))
        if may_pass and not last:
            if not isinstance(failure, UnansweredError):  # such a job goes on, and is adopted
                self._submission.remove(self._name)  # one that hangs would be adopted, too
            return RetryableError(str(failure))
        self._show(tails)
        self._leave(watch.seen, well=False, ended=phase is not None)
        if may_pass:
            raise RetriesExhaustedError(str(failure)) from failure
        raise failure

    def _submitted(self) -> Json:
        """The job in the cluster, this attempt's."""
        self._manifest["metadata"]["annotations"][names.HEARTBEAT] = self._clock.now().isoformat()
        self._termination.is_creating = True
        made = self._submission.submit(self._manifest, self._job.write)
        self._termination.is_creating = False
        return made

    def _results(self, phase: Phase | None) -> list[dict[str, float]] | None:
        """What all ranks have returned; where they have, nothing that befell the job afterwards matters."""
        deadline = self._clock.monotonic() + _VISIBLE_S
        while phase is Phase.COMPLETE and self._job.results() is None and self._clock.monotonic() < deadline:
            self._clock.sleep(_POLL_S)
        return self._job.results()

    def _recorded(self, watch: Watch) -> dict[str, list[str]]:
        """Keep what there is of the job; return the ends of its logs."""
        watch.finish()
        tails = tails_of(self._objects, self._job, watch.seen, watch.log.lines if watch.log else ())
        try:
            kept = keep(self._cluster.records, self._objects, self._job, watch.seen, tails)
            say(self._cluster.stage, f"logs, events and manifest of {self._name} are in {kept}")
        except OSError as error:
            say(self._cluster.stage, f"logs, events and manifest of {self._name} cannot be kept: {error}")
        return tails

    def _cause(self, seen: Seen, tails: Mapping[str, Sequence[str]]) -> Exception:
        found = cause(seen.job, seen.pods, tails, error_of_ranks(self._job))
        if isinstance(found, PipelineError | OSError):
            return found
        # A mistake in the code: its traceback is in the log of the rank, and this process has none to show.
        return PipelineError(str(found).split("\n", 1)[0])

    def _show(self, tails: Mapping[str, Sequence[str]]) -> None:
        """Print the ends of logs: what the first rank says was printed already."""
        for where, lines in tails.items():
            if where != "rank 0" and lines:
                print("\n".join([f"the end of the log of {where}:", *lines[-_LINES_SHOWN:]]), flush=True)

    def _leave(self, seen: Seen, *, well: bool, ended: bool) -> None:
        """Remove the job, or leave it to be looked at; one that has not ended would go on with nobody there."""
        wanted = self._cluster.config.delete
        if not ended or wanted == "always" or (well and wanted == "on_success"):
            self._remove()
            return
        with suppress(client.ApiException, HTTPError):
            self._objects.change(seen.job, beat(None))  # the reaper leaves it alone then
        say(self._cluster.stage, f"{self._name} is left in the cluster")

    def _remove(self) -> None:
        try:
            self._submission.remove(self._name)
        except PipelineError as error:
            say(self._cluster.stage, f"{self._name} may be left in the cluster, where the reaper removes it: {error}")
