"""Watches a TrainJob until it ends, or until one of its phases takes longer than it may."""

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster.config import ClusterStage
from components.cluster.failures import condition, container_states, scheduling_problem
from components.cluster.kube import Clock, Json, RetryPolicy, Snapshot, TrainJobs
from components.cluster.logs import LogStream
from components.cluster.manifest import NODE
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say, say_line

_POLL_S = 10.0
_BEAT_S = 30.0
_MARGIN_S = 300.0
"""Beyond the job's own deadline, for the cluster to end it."""
_UNSTARTABLE_AFTER_S = {
    "InvalidImageName": 0.0,
    "ErrImageNeverPull": 0.0,
    "CreateContainerConfigError": 60.0,
    "CreateContainerError": 120.0,
    "RunContainerError": 120.0,
    "ErrImagePull": 300.0,
    "ImagePullBackOff": 300.0,
}
"""Reasons for which a container waits, and for how long it may: a registry may be busy, a secret may come late."""
_IMAGE_HINT = "; is cluster.image right, and may this namespace pull it?"
_HINTS = {
    "CreateContainerConfigError": "; does each of cluster.secrets have its keys?",
    "ErrImagePull": _IMAGE_HINT,
    "ImagePullBackOff": _IMAGE_HINT,
}


class StalledError(RetryableError):
    """The pods run and print nothing."""


class DeletedError(RetryableError):
    """Somebody has deleted the job."""


class Phase(StrEnum):
    """What a job is doing."""

    QUEUED = "waits in the queue"
    PENDING = "waits for its pods to run"
    RUNNING = "runs"
    COMPLETE = "is complete"
    FAILED = "has failed"

    @property
    def is_final(self) -> bool:
        """Whether no other phase follows."""
        return self in (Phase.COMPLETE, Phase.FAILED)


class Watch:
    """Polls a job every ten seconds, prints the first rank's log, and renews the job's heartbeat."""

    def __init__(self, jobs: TrainJobs, stage: ClusterStage, clock: Clock, job: Json) -> None:
        self.seen = Snapshot(job)
        self.log: LogStream | None = None
        self._jobs, self._stage, self._clock = jobs, stage, clock
        self._name: str = job["metadata"]["name"]
        self._retries = RetryPolicy(clock)
        self._phase: Phase | None = None
        self._past: set[Phase] = set()
        self._phase_began_s = self._beat_s = clock.monotonic()
        self._waiting_since: dict[str, float] = {}
        """When containers were first seen to wait, by the reason."""
        self._reported = ""

    def until_end(self) -> Phase:
        """Return how the job has ended.

        Raises:
            RetriesExhaustedError: It waits for the queue or for its pods to start for longer than it may.
            StalledError: Its pods run and print nothing for longer than they may.
            DeletedError: Somebody has deleted it.
            UnavailableError: The API server does not answer.
            PipelineError: Its pods cannot start.
        """
        while True:
            self._look()
            phase = _phase_of(self.seen, self._stage.config.nodes)
            self._enter(phase)
            self._follow_first_rank()
            if phase.is_final:
                return phase
            self._check_time(phase)
            self._beat()
            self._clock.sleep(_POLL_S)

    def finish(self) -> None:
        """Print the rest of the log."""
        if self.log is not None:
            self.log.finish()

    def stop(self) -> None:
        """Make no further requests."""
        if self.log is not None:
            self.log.stop()

    def _look(self) -> None:
        job = self._retries.call(f"read the training job {self._name}", lambda: self._jobs.get(self._name))
        if job is None or job["metadata"]["uid"] != self.seen.job["metadata"]["uid"]:
            raise DeletedError(f"{self._name}: somebody has deleted the training job")
        self.seen.job = job
        self.seen.pods = self._retries.call("list pods", lambda: self._jobs.pods(self._name))

    def _enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        say(self._stage.stage, f"{self._name} {phase}{' again' if phase in self._past else ''}")
        self._past.add(phase)
        self._phase, self._phase_began_s, self._reported = phase, self._clock.monotonic(), ""

    def _follow_first_rank(self) -> None:
        """Follow the log of the first node's pod, which is another one after a restart."""
        pod = _first_node(self.seen.pods)
        if pod is None or (self.log is not None and self.log.uid == pod["metadata"]["uid"]):
            return
        self.finish()
        self.log = LogStream(self._jobs, pod, self._clock, say_line)

    def _check_time(self, phase: Phase) -> None:
        config, spent_s = self._stage.config, self._clock.monotonic() - self._phase_began_s
        if phase is Phase.QUEUED and spent_s > config.queue_timeout_s:
            limit = _limit("queue", config.queue_timeout_s)
            reason = scheduling_problem([], self._events(self.seen.job))
            raise RetriesExhaustedError(f"{self._name}: not admitted by the queue within {limit}: {reason}")
        if phase is Phase.PENDING:
            self._check_start(spent_s)
        if phase is Phase.RUNNING:
            self._check_progress(spent_s)

    def _check_start(self, spent_s: float) -> None:
        self._check_waiting_containers()
        late = spent_s > self._stage.config.start_timeout_s
        if not late and spent_s < 2 * _POLL_S:
            return
        reason = scheduling_problem(self.seen.pods, self._events((self.seen.pods or [self.seen.job])[0]))
        if late:
            limit = _limit("start", self._stage.config.start_timeout_s)
            raise RetriesExhaustedError(f"{self._name}: not all pods run within {limit}: {reason}")
        if reason != self._reported:
            self._reported = reason
            say(self._stage.stage, reason)

    def _check_waiting_containers(self) -> None:
        """Raise PipelineError where a container waits for something that waiting does not bring."""
        waiting = [
            (pod["metadata"]["name"], state.get("reason", ""), state.get("message", "no message"))
            for pod in self.seen.pods
            for state in container_states(pod, "waiting")
        ]
        now = self._clock.monotonic()
        kinds = {_kind(reason) for _, reason, _ in waiting}
        self._waiting_since = {kind: self._waiting_since.get(kind, now) for kind in kinds}
        for pod, reason, message in waiting:
            limit_s = _UNSTARTABLE_AFTER_S.get(reason)
            if limit_s is not None and now - self._waiting_since[_kind(reason)] >= limit_s:
                raise PipelineError(f"{pod}: {reason}: {message}{_HINTS.get(reason, '')}")

    def _check_progress(self, spent_s: float) -> None:
        config = self._stage.config
        silent_s = self._clock.monotonic() - (self.log.last_sign_s if self.log else self._phase_began_s)
        if min(silent_s, spent_s) > config.stall_timeout_s:
            raise StalledError(f"{self._name}: nothing was printed for {_limit('stall', config.stall_timeout_s)}")
        if spent_s > config.training_timeout_s + _MARGIN_S:
            raise PipelineError(f"{self._name}: runs for longer than {_limit('training', config.training_timeout_s)}")

    def _events(self, document: Json) -> list[Json]:
        """Return the events of an object, or none where they cannot be read: no decision depends on them."""
        with suppress(client.ApiException, HTTPError):
            return self._jobs.events(document)
        return []

    def _beat(self) -> None:
        """Renew the heartbeat; where that fails, the next look reports why."""
        if self._clock.monotonic() - self._beat_s < _BEAT_S:
            return
        with suppress(client.ApiException, HTTPError):
            self._jobs.beat(self.seen.job, self._clock.now())
            self._beat_s = self._clock.monotonic()


def _limit(what: str, limit_s: float) -> str:
    return f"{limit_s:g} s (cluster.{what}_timeout_s)"


def _kind(reason: str) -> str:
    """Reasons about an image alternate while it is pulled again and again."""
    return "image" if "Image" in reason else reason


def _phase_of(seen: Snapshot, num_nodes: int) -> Phase:
    for kind, phase in (("Complete", Phase.COMPLETE), ("Failed", Phase.FAILED)):
        if condition(seen.job, kind)["status"] == "True":
            return phase
    if seen.job["spec"].get("suspend"):
        return Phase.QUEUED
    started = [pod for pod in _nodes(seen.pods) if pod["status"].get("phase", "Pending") != "Pending"]
    return Phase.RUNNING if len(started) >= num_nodes else Phase.PENDING


def _first_node(pods: Sequence[Json]) -> Json | None:
    """Return the newest pod of the first rank, once it has started."""
    index = "batch.kubernetes.io/job-completion-index"
    firsts = [pod for pod in _nodes(pods) if pod["metadata"]["labels"].get(index) == "0"]
    started = [pod for pod in firsts if container_states(pod, "running") or container_states(pod, "terminated")]
    return max(started, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def _nodes(pods: Sequence[Json]) -> list[Json]:
    """Return the pods of ranks, without those of vLLM servers."""
    label = "jobset.sigs.k8s.io/replicatedjob-name"
    return [pod for pod in pods if pod["metadata"]["labels"].get(label) == NODE]
