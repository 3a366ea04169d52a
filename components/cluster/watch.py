"""Watches a TrainJob until it ends, or until one of its phases takes longer than it may; records what it has seen."""

import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from kubernetes import client
from urllib3.exceptions import HTTPError, ReadTimeoutError

from components.cluster.config import ClusterStage
from components.cluster.failures import (
    condition,
    container_states,
    ended_early,
    first_error,
    pod_on_node,
    queueing_problem,
    scheduling_problem,
)
from components.cluster.job import Job
from components.cluster.kube import HEARTBEAT, JOB_SET, Clock, Json, RetryPolicy, TrainJobs
from components.cluster.manifest import NODE
from components.shared import jsonl
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say, say_line

_POLL_S, _BEAT_S = 10.0, 30.0
_FIRST_REPORT_S, _REPORT_S = 20.0, 180.0
"""Time from the beginning of a wait to the line that tells its reason, and between such lines."""
_NEVER_ADMITTED = re.compile(
    r"\bLocalQueue \S+ doesn't exist"
    r"|^(?!.*insufficient unused quota).*(?:> maximum capacity \(|unavailable in ClusterQueue)"
)
"""How Kueue says that waiting will not help: another flavor with too little unused quota may still admit the job."""
_UNSTARTABLE = re.compile("InvalidImageName|ErrImage(Never)?Pull|ImagePullBackOff|(Create|Run)Container(Config)?Error")
_HINTS = {
    "Pull": "; is cluster.image right, and may this namespace pull it?",
    "Config": "; does each of cluster.secrets have its keys?",
}
"""Reasons for which a container waits in vain, and what helps, by a part of the reason."""
_UNSTARTABLE_S = 300.0
"""Time for which a container may wait for such a reason: a registry may be busy, a secret may come late."""
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(Z|[+-]\d\d:\d\d)")
"""Time of a line of a log, as the kubelet writes it: always with nine digits, in the time zone of its node."""
_RECORD_TRIES, _LINES_KEPT, _JOIN_S, _FINISH_S = 3, 1000, 5.0, 40.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_Item = TypeVar("_Item")


class Phase(StrEnum):
    """What a job is doing."""

    QUEUED = "waits in the queue"
    PENDING = "is waiting for its pods"
    RUNNING = "runs"
    COMPLETE = "is complete"
    FAILED = "has failed"


class Watch:
    """Polls a job every ten seconds, prints the first rank's log, and renews the job's heartbeat."""

    def __init__(self, jobs: TrainJobs, stage: ClusterStage, clock: Clock, job: Json) -> None:
        self.job = job
        """As last seen, as are its pods."""
        self.pods: list[Json] = []
        self._log: LogStream | None = None
        self._jobs, self._stage, self._clock = jobs, stage, clock
        self._name: str = job["metadata"]["name"]
        self._retries = RetryPolicy(clock)
        self._phase: Phase | None = None
        self._past: set[Phase] = set()
        self._phase_began_s = self._beat_s = clock.monotonic()
        self._waiting_since: dict[str, float] = {}
        """When pods were first seen to wait in vain; their reasons may alternate."""
        self._reported, self._next_report_s = "", 0.0
        self._ready: set[str] = set()
        self._ends: dict[str, str] = {}
        """How pods have ended while the job went on, each with the cause."""
        self._causes: set[str] = set()
        """Why pods ended that had never been ready."""
        self._records = stage.records / f"attempt-{1 + len(list(stage.records.glob('attempt-*')))}"

    def until_end(self, in_phase: Callable[[Phase], None] = lambda _: None) -> Phase:
        """Return how the job has ended: complete or failed; every time that it is looked at, call `in_phase`.

        Raises:
            PipelineError: Its pods cannot start, or end for the same reason without having been ready.
            RetriesExhaustedError: It waits for the queue or for its pods for longer than it may.
            RetryableError: Nothing is printed for longer than may be, the job was deleted, or no server answers.
        """
        while True:
            job = self._retries.call(f"read the training job {self._name}", lambda: self._jobs.get(self._name))
            if job is None or job["metadata"]["uid"] != self.job["metadata"]["uid"]:
                raise RetryableError(f"{self._name}: somebody has deleted the training job")
            self.job, self.pods = job, self._retries.call("list pods", lambda: self._jobs.pods(JOB_SET, self._name))
            phase = self._current_phase()
            if phase is not self._phase:
                say(self._stage.stage, f"{self._name} {phase}{' again' if phase in self._past else ''}")
                self._past.add(phase)
                self._phase, self._phase_began_s, self._reported = phase, self._clock.monotonic(), ""
                self._next_report_s = self._phase_began_s + _FIRST_REPORT_S
            in_phase(phase)
            self._follow_first_rank()
            if phase in (Phase.COMPLETE, Phase.FAILED):
                return phase
            self._name_ended_pods()
            self._check_time(phase)
            if self._clock.monotonic() - self._beat_s >= _BEAT_S:
                with suppress(client.ApiException, HTTPError):  # the next look reports why
                    self._jobs.patch(self.job, {"annotations": {HEARTBEAT: self._clock.now().isoformat()}})
                    self._beat_s = self._clock.monotonic()
            self._clock.sleep(_POLL_S)

    def stop(self) -> None:
        """Make no further requests."""
        if self._log is not None:
            self._log.stop()

    def record(self, job: Job) -> dict[str, list[str]]:
        """Print the rest of the log, and write what was seen to a folder attempt-1, attempt-2 ... of the records.

        Returns the ends of logs by where they are from: each pod, and each rank; the first one's is what was printed.
        """
        tails, folder = self._log_tails(job), self._records
        events = [event for document in (self.job, *self.pods) for event in _repeated(self._jobs.events, document)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in (("trainjob", self.job), ("pods", self.pods), ("events", events)):
                jsonl.write_json(folder / f"{name}.json", content)
            (folder / "rank-0.log").write_text("".join(f"{line}\n" for line in tails["rank 0"]), encoding="utf-8")
            for path in (*job.folder.glob("rank-*.log"), *job.folder.glob("*.json")):
                shutil.copy(path, folder)
            say(self._stage.stage, f"logs, events and manifest of {self._name} are in {folder}")
        except OSError as error:
            say(self._stage.stage, f"could not write logs, events and manifest of {self._name}: {error}")
        return tails

    def _log_tails(self, job: Job) -> dict[str, list[str]]:
        tails: dict[str, list[str]] = {"rank 0": []}
        if self._log is not None:
            self._log.finish()
            tails["rank 0"] = list(self._log.lines)
        for pod in self.pods:
            lines = self._keep_log(pod)
            # The first rank's has been printed, and the others' causes have been named.
            if lines and not (self._log and self._log.uid == pod["metadata"]["uid"]) and _name(pod) not in self._ends:
                tails[_name(pod)] = lines[-_LINES_KEPT:]
        for rank in range(1, job.num_processes):
            if job.log(rank).is_file():
                text = job.log(rank).read_text(encoding="utf-8", errors="replace")
                tails[f"rank {rank}"] = text.splitlines()[-_LINES_KEPT:]
        return tails

    def _keep_log(self, pod: Json) -> list[str]:
        lines = _repeated(self._whole_log, _name(pod), pod["spec"]["containers"][0]["name"])
        if lines:
            with suppress(OSError):
                self._records.mkdir(parents=True, exist_ok=True)
                text = "".join(f"{line}\n" for line in lines)
                (self._records / f"{_name(pod)}.log").write_text(text, encoding="utf-8")
        return lines

    def _whole_log(self, pod: str, container: str) -> list[str]:
        text = self._jobs.log(pod, container, follow=False).data.decode(errors="replace")
        return [line.partition(" ")[2] for line in text.splitlines()]

    def _name_ended_pods(self) -> None:
        """Print why pods have ended although the job goes on; two that were never ready and end alike end the job."""
        ranks = {_name(pod) for pod in self._rank_pods()}
        for pod in self.pods:
            name = _name(pod)
            if name in ranks or condition(pod, "Ready")["status"] == "True":  # ranks are ready as soon as they run
                self._ready.add(name)
            state = ended_early(pod)
            if state is None or name in self._ends:
                continue
            cause = first_error(self._keep_log(pod)) or "its log names no error"
            if state.get("reason") == "OOMKilled":
                cause = "it ran out of memory (OOMKilled)"
            when = "" if name in self._ready else " before it was ready"
            self._ends[name] = f"{pod_on_node(pod)} ended with exit code {state['exitCode']}{when}: {cause}"
            say(self._stage.stage, self._ends[name])
            if name not in self._ready and cause in self._causes:
                raise PipelineError(f"{cause}: {name} is the second pod that ends with it; logs are in {self._records}")
            self._causes |= set() if name in self._ready else {cause}

    def _current_phase(self) -> Phase:
        for kind, phase in (("Complete", Phase.COMPLETE), ("Failed", Phase.FAILED)):
            if condition(self.job, kind)["status"] == "True":
                return phase
        if self.job["spec"].get("suspend"):
            return Phase.QUEUED
        started = [pod for pod in self._rank_pods() if pod["status"].get("phase", "Pending") != "Pending"]
        return Phase.RUNNING if len(started) >= self._stage.config.nodes else Phase.PENDING

    def _rank_pods(self) -> list[Json]:
        label = "jobset.sigs.k8s.io/replicatedjob-name"  # which is another one for vLLM servers
        return [pod for pod in self.pods if pod["metadata"]["labels"].get(label) == NODE]

    def _follow_first_rank(self) -> None:
        """Follow the log of the first node's newest pod, once it has started; it is another one after a restart."""
        index = "batch.kubernetes.io/job-completion-index"
        started = [
            pod["metadata"]
            for pod in self._rank_pods()
            if pod["metadata"]["labels"].get(index) == "0"
            and (container_states(pod, "running") or container_states(pod, "terminated"))
        ]
        pod = max(started, key=lambda metadata: str(metadata.get("creationTimestamp", "")), default=None)
        if pod is None or (self._log is not None and self._log.uid == pod["uid"]):
            return
        if self._log is not None:
            self._log.finish()
        self._log = LogStream(self._jobs, pod, self._clock, say_line)

    def _check_time(self, phase: Phase) -> None:
        config, now = self._stage.config, self._clock.monotonic()
        if phase is Phase.QUEUED:
            self._check_wait("not admitted by the queue", "queue_timeout_s", config.queue_timeout_s)
        elif phase is Phase.PENDING:
            self._check_waiting_containers()
            self._check_wait("not all pods run", "start_timeout_s", config.start_timeout_s)
        elif phase is Phase.RUNNING:
            # The log may be older than the phase, as after the queue suspended the job: the later of the two counts.
            heard_s = max(self._log.last_sign_s, self._phase_began_s) if self._log else self._phase_began_s
            if now - heard_s > config.stall_timeout_s:
                limit = f"{config.stall_timeout_s:g} s (cluster.stall_timeout_s)"
                raise RetryableError(f"{self._name}: nothing was printed for {limit}")

    def _check_wait(self, what: str, key: str, limit_s: float) -> None:
        """Print what the job waits for where that has changed; raise where waiting takes too long, or is in vain."""
        now = self._clock.monotonic()
        if now - self._phase_began_s > limit_s:
            raise RetriesExhaustedError(f"{self._name}: {what} within {limit_s:g} s (cluster.{key}): {self._problem()}")
        if now < self._next_report_s:
            return
        self._next_report_s, problem = now + _REPORT_S, self._problem()
        if _NEVER_ADMITTED.search(problem):
            raise PipelineError(f"{self._name}: {problem}; name another queue (cluster.queue), or ask for less")
        if problem != self._reported:
            self._reported = problem
            say(self._stage.stage, f"{self._name} {self._phase}: {problem}")

    def _problem(self) -> str:
        """Return why the job waits, as far as that can be read."""
        events: list[Json] = []
        with suppress(client.ApiException, HTTPError):
            if self._phase is Phase.QUEUED:
                workload = self._jobs.workload(self.job)
                return queueing_problem(workload, self._jobs.queue_position(workload) if workload else None)
            if self._phase is Phase.PENDING and self._ends:
                return list(self._ends.values())[-1]
            events = self._jobs.events((self.pods or [self.job])[0])
        return scheduling_problem(self.pods, events)

    def _check_waiting_containers(self) -> None:
        now, before = self._clock.monotonic(), self._waiting_since
        self._waiting_since = {}
        for pod in self.pods:
            for state in container_states(pod, "waiting"):
                reason = state.get("reason", "")
                if _UNSTARTABLE.fullmatch(reason):
                    since = self._waiting_since[_name(pod)] = before.get(_name(pod), now)
                    if now - since >= _UNSTARTABLE_S:
                        hint = next((text for part, text in _HINTS.items() if part in reason), "")
                        raise PipelineError(f"{_name(pod)}: {reason}: {state.get('message', 'no message')}{hint}")


def _name(pod: Json) -> str:
    name: str = pod["metadata"]["name"]
    return name


def _repeated(request: Callable[..., list[_Item]], *arguments: object) -> list[_Item]:
    for _ in range(_RECORD_TRIES):
        with suppress(client.ApiException, HTTPError):
            return request(*arguments)
    return []


class LogStream:
    """Prints each line of a pod's log once, over connections that break; it never fails itself.

    Lines carry their times, so after a break reading resumes where it stopped.
    """

    def __init__(self, jobs: TrainJobs, pod: Json, clock: Clock, print_line: Callable[[str], None]) -> None:
        self.uid: str = pod["uid"]
        self.lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self.last_sign_s = clock.monotonic()
        """When there was a line, or no way to know."""
        self._jobs, self._pod, self._clock, self._print_line = jobs, pod["name"], clock, print_line
        self._place = ""
        """Time of the last line: times are in the order of their texts."""
        self._num_at_place = 0
        """Lines so far of that time."""
        self._response: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log of {self._pod}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop following, and print the rest of the log."""
        self.stop()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # else it would print the same lines
            with suppress(PipelineError):
                RetryPolicy(self._clock, _FINISH_S).call("read the log", lambda: self._read(follow=False))

    def stop(self) -> None:
        """Stop following at once."""
        self._stopped.set()
        response = self._response
        if response is not None:
            with suppress(OSError, ValueError):  # it may just have ended
                response.shutdown()

    def _follow(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            before = len(self.lines), self._place
            try:
                self._read(follow=True)
            except ReadTimeoutError:
                pass  # the pod prints nothing
            except (client.ApiException, HTTPError) as error:
                if getattr(error, "status", None) == 404:
                    return
                self.last_sign_s = self._clock.monotonic()
            silent = before == (len(self.lines), self._place)
            pause = min(2 * pause, _LONGEST_PAUSE_S) if silent else _FIRST_PAUSE_S

    def _read(self, *, follow: bool) -> None:
        place, known = self._place, self._num_at_place
        since = None
        if place:  # with the offset of the node's clock
            since = datetime.fromisoformat(place).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._response = response = self._jobs.log(self._pod, NODE, follow=follow, since=since)
        try:
            for line in _lines(response, ended=not follow):
                if follow and self._stopped.is_set():
                    return
                moment, _, text = line.partition(" ")
                if not _MOMENT.fullmatch(moment):  # the kubelet's own, such as that it cannot read the log
                    self._print_line(line)
                    continue
                if moment <= place:
                    known -= moment == place
                    if moment < place or known >= 0:
                        continue
                place = ""  # all further lines are new
                self._num_at_place = self._num_at_place + 1 if moment == self._place else 1
                self._place, self.last_sign_s = moment, self._clock.monotonic()
                self.lines.append(text)
                self._print_line(text)
        finally:
            self._response = None
            response.close()


def _lines(response: Any, *, ended: bool) -> Iterator[str]:
    # The last part of a line is read again where a connection broke, but not where the container has ended.
    rest = b""
    for chunk in response.stream(2**16):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if ended and rest:
        yield rest.decode(errors="replace")
