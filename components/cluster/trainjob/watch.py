"""The watch over a TrainJob until it ends, or until one of its phases has taken longer than it may."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster.clock import Clock
from components.cluster.cluster import Cluster
from components.cluster.trainjob.log_stream import LogStream
from components.cluster.trainjob.objects import Objects
from components.cluster.trainjob.obstacles import Obstacles, obstacle
from components.cluster.trainjob.patience import Patience
from components.cluster.trainjob.state import Phase, first_node, phase_of
from components.cluster.trainjob.submission import beat
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say, say_line

Json = dict[str, Any]

_POLL_S = 10.0
_BEAT_S = 30.0
_MARGIN_S = 300.0
"""Beyond the job's own deadline, for the cluster to end it."""


class StalledError(RetryableError):
    """The pods run and do nothing."""


class LostError(RetryableError):
    """The job is not there any more."""


@dataclass
class Seen:
    """What was seen of a job last."""

    job: Json
    pods: list[Json] = field(default_factory=list)


class Watch:
    """Looks at a job every ten seconds, passes on the first rank's log, and keeps the job's heart beating."""

    def __init__(self, objects: Objects, cluster: Cluster, clock: Clock, job: Json) -> None:
        self.seen = Seen(job)
        self.log: LogStream | None = None
        self._objects, self._cluster, self._clock = objects, cluster, clock
        self._name: str = job["metadata"]["name"]
        self._patience, self._obstacles = Patience(clock), Obstacles(clock)
        self._phase: Phase | None = None
        self._past: set[Phase] = set()
        self._phase_began_s = self._beaten_s = clock.monotonic()
        self._told = ""

    def until_end(self) -> Phase:
        """Return how the job has ended.

        Raises:
            RetriesExhaustedError: It waits for the queue or for its pods to start for longer than it may.
            StalledError: Its pods run and print nothing for longer than they may.
            LostError: Somebody has deleted it.
            UnansweredError: The API server does not answer.
            PipelineError: Its pods cannot start.
        """
        while True:
            self._look()
            phase = phase_of(self.seen.job, self.seen.pods, self._cluster.config.nodes)
            self._enter(phase)
            self._follow()
            if phase.is_end:
                return phase
            self._refuse_late(phase)
            self._beat()
            self._clock.sleep(_POLL_S)

    def finish(self) -> None:
        """Pass on what is left of the log."""
        if self.log is not None:
            self.log.finish()

    def stop(self) -> None:
        """Ask for nothing more."""
        if self.log is not None:
            self.log.stop()

    def _look(self) -> None:
        job = self._patience.ask(f"tell of the training job {self._name}", lambda: self._objects.job(self._name))
        if job is None or job["metadata"]["uid"] != self.seen.job["metadata"]["uid"]:
            raise LostError(f"{self._name}: somebody has deleted the training job")
        self.seen.job = job
        self.seen.pods = self._patience.ask("list pods", lambda: self._objects.pods(self._name))

    def _enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        say(self._cluster.stage, f"{self._name} {phase}{' again' if phase in self._past else ''}")
        self._past.add(phase)
        self._phase, self._phase_began_s, self._told = phase, self._clock.monotonic(), ""

    def _follow(self) -> None:
        """Follow the log of the first node's pod, which is another one after a restart."""
        pod = first_node(self.seen.pods)
        if pod is None or (self.log is not None and self.log.uid == pod["metadata"]["uid"]):
            return
        self.finish()
        self.log = LogStream(self._objects, pod, self._clock, say_line)

    def _refuse_late(self, phase: Phase) -> None:
        config, spent_s = self._cluster.config, self._clock.monotonic() - self._phase_began_s
        if phase is Phase.QUEUED and spent_s > config.queue_timeout_s:
            why = obstacle([], self._events([self.seen.job]))
            raise RetriesExhaustedError(
                f"{self._name}: not admitted by the queue within {_said('queue', config)}: {why}"
            )
        if phase is Phase.PENDING:
            self._refuse_unstarted(spent_s)
        if phase is Phase.RUNNING:
            self._refuse_stalled(spent_s)

    def _refuse_unstarted(self, spent_s: float) -> None:
        self._obstacles.refuse_hopeless(self.seen.pods)
        late = spent_s > self._cluster.config.start_timeout_s
        if not late and spent_s < 2 * _POLL_S:
            return
        why = obstacle(self.seen.pods, self._events(self.seen.pods[:1] or [self.seen.job]))
        if late:
            limit = _said("start", self._cluster.config)
            raise RetriesExhaustedError(f"{self._name}: not all pods run within {limit}: {why}")
        if why != self._told:
            self._told = why
            say(self._cluster.stage, why)

    def _refuse_stalled(self, spent_s: float) -> None:
        config = self._cluster.config
        since_s = self._clock.monotonic() - (self.log.last_sign_s if self.log else self._phase_began_s)
        if min(since_s, spent_s) > config.stall_timeout_s:
            raise StalledError(f"{self._name}: nothing was printed for {_said('stall', config)}")
        if spent_s > config.training_timeout_s + _MARGIN_S:
            raise PipelineError(f"{self._name}: runs for longer than {_said('training', config)}")

    def _events(self, objects: Sequence[Json]) -> list[Json]:
        """Events of objects, if they can be had: nothing is decided by them."""
        with suppress(client.ApiException, HTTPError):
            return [event for each in objects for event in self._objects.events(each)]
        return []

    def _beat(self) -> None:
        """Renew the heartbeat; where that fails, the next look tells why."""
        if self._clock.monotonic() - self._beaten_s < _BEAT_S:
            return
        with suppress(client.ApiException, HTTPError):
            self._objects.change(self.seen.job, beat(self._clock.now().isoformat()))
            self._beaten_s = self._clock.monotonic()


def _said(what: str, config: Any) -> str:
    return f"{getattr(config, f'{what}_timeout_s'):g} s (cluster.{what}_timeout_s)"
