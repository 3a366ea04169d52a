"""Watches a TrainJob until it ends or exceeds a time limit of a phase; records its manifest, pods, events and logs."""

import re
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError, ReadTimeoutError

from components.cluster import failures
from components.cluster.config import ClusterStage
from components.cluster.job import Job
from components.cluster.kube import HEARTBEAT, JOB_SET, Clock, Json, RetryPolicy, TrainJobs
from components.cluster.manifest import NODE
from components.shared import jsonl
from components.shared.errors import PipelineError, RetriesExhaustedError, RetryableError
from components.shared.progress import say, say_line

_POLL_S, _HEARTBEAT_S = 10.0, 30.0
_FIRST_REPORT_S, _REPORT_S = 20.0, 180.0
"""Time from the start of a wait to the first line with its reason, and between such lines."""
_NEVER_ADMITTED = re.compile(
    r"\bLocalQueue \S+ doesn't exist"
    r"|^(?!.*insufficient unused quota).*(?:> maximum capacity \(|unavailable in ClusterQueue)"
)
"""Kueue's messages when waiting is in vain. Where a flavor only lacks unused quota, the job may still be admitted."""
_UNSTARTABLE = re.compile("InvalidImageName|ErrImage(Never)?Pull|ImagePullBackOff|(Create|Run)Container(Config)?Error")
"""Reasons for which a waiting container is not going to start."""
_HINTS = {
    "Pull": "; is cluster.image right, and may this namespace pull it?",
    "Config": "; does each of cluster.secrets have its keys?",
}
"""What the user should check, by a part of such a reason."""
_UNSTARTABLE_S = 300.0  # time for which such a reason is accepted: a registry may be busy, or a secret come late
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(Z|[+-]\d\d:\d\d)")
"""Time before each log line, as the kubelet writes it: always with nine decimals, in the time zone of its node."""
_RECORD_TRIES, _LINES_KEPT = 3, 1000
_JOIN_S, _FINISH_S = 5.0, 40.0  # time for the thread that follows a log to end, and time to read the rest of the log
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


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
        self.job = job  # the job and its pods as of the latest poll
        self.pods: list[Json] = []
        self._log: LogStream | None = None
        self._jobs, self._stage, self._clock = jobs, stage, clock
        self._name: str = job["metadata"]["name"]
        self._retries = RetryPolicy(clock)
        self._phase: Phase | None = None
        self._past_phases: set[Phase] = set()
        self._phase_began_s = self._heartbeat_s = clock.monotonic()
        self._unstartable_since: dict[str, float] = {}  # by pod name, when it began to wait for one of _UNSTARTABLE
        self._reported_problem, self._next_report_s = "", 0.0
        self._ready_before: set[str] = set()  # names of pods that are ready or have been
        self._failed_pods: dict[str, str] = {}  # by name, how and why pods failed while the job went on
        self._start_errors: set[str] = set()  # causes of the failures of pods that had never been ready
        self._records = stage.records / f"attempt-{1 + len(list(stage.records.glob('attempt-*')))}"

    def until_end(self, in_phase: Callable[[Phase], None] = lambda _: None) -> Phase:
        """Poll the job until it ends; return COMPLETE or FAILED. Each poll calls `in_phase` with the current phase.

        Raises:
            PipelineError: Pods cannot start, or two fail for the same cause before they were ready.
            RetriesExhaustedError: The job waits too long in the queue, or for its pods to start.
            RetryableError: The job prints nothing for too long, was deleted, or cannot be read.
        """
        while True:
            job = self._retries.call(f"read the training job {self._name}", lambda: self._jobs.get(self._name))
            if job is None or job["metadata"]["uid"] != self.job["metadata"]["uid"]:
                raise RetryableError(f"{self._name}: somebody has deleted the training job")
            self.job, self.pods = job, self._retries.call("list pods", lambda: self._jobs.pods(JOB_SET, self._name))
            phase = self._current_phase()
            if phase is not self._phase:
                self._begin_phase(phase)
            in_phase(phase)
            self._follow_first_rank()
            if phase in (Phase.COMPLETE, Phase.FAILED):
                return phase
            self._report_failed_pods()
            self._check_time(phase)
            if self._clock.monotonic() - self._heartbeat_s >= _HEARTBEAT_S:
                with suppress(client.ApiException, HTTPError):  # the next poll reports why
                    self._jobs.patch(self.job, {"annotations": {HEARTBEAT: self._clock.now().isoformat()}})
                    self._heartbeat_s = self._clock.monotonic()
            self._clock.sleep(_POLL_S)

    def _begin_phase(self, phase: Phase) -> None:
        say(self._stage.stage, f"{self._name} {phase}{' again' if phase in self._past_phases else ''}")
        self._past_phases.add(phase)
        self._phase, self._phase_began_s, self._reported_problem = phase, self._clock.monotonic(), ""
        self._next_report_s = self._phase_began_s + _FIRST_REPORT_S

    def stop(self) -> None:
        """Stop following the log at once, so that no request is under way."""
        if self._log is not None:
            self._log.stop()

    def record(self, job: Job) -> dict[str, list[str]]:
        """Print the rest of the log; write logs, manifest, pods and events to the records; return the ends of logs."""
        tails, folder = self._log_tails(job), self._records
        events = [event for document in (self.job, *self.pods) for event in _retried(self._jobs.events, document)]
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
        """Return the last lines of logs by origin: "rank 0" (also printed), "rank 1" ..., and names of other pods."""
        tails: dict[str, list[str]] = {"rank 0": []}
        if self._log is not None:
            self._log.finish()
            tails["rank 0"] = list(self._log.lines)
        for pod in self.pods:
            lines = self._save_log(pod)
            is_rank_0 = self._log is not None and self._log.uid == pod["metadata"]["uid"]
            if lines and not is_rank_0 and _name(pod) not in self._failed_pods:  # the causes of those have been printed
                tails[_name(pod)] = lines[-_LINES_KEPT:]
        for rank in range(1, job.num_processes):
            if job.log(rank).is_file():
                text = job.log(rank).read_text(encoding="utf-8", errors="replace")
                tails[f"rank {rank}"] = text.splitlines()[-_LINES_KEPT:]
        return tails

    def _save_log(self, pod: Json) -> list[str]:
        """Write a pod's log to the records; return its lines, or no lines if it cannot be read."""
        name, container = _name(pod), pod["spec"]["containers"][0]["name"]
        timestamped_lines = _retried(
            lambda: self._jobs.log(name, container, follow=False).data.decode(errors="replace").splitlines()
        )
        lines = [line.partition(" ")[2] for line in timestamped_lines]
        if lines:
            with suppress(OSError):
                self._records.mkdir(parents=True, exist_ok=True)
                text = "".join(f"{line}\n" for line in lines)
                (self._records / f"{name}.log").write_text(text, encoding="utf-8")
        return lines

    def _report_failed_pods(self) -> None:
        """Print why pods failed while the job goes on; PipelineError if two failed for one cause before being ready."""
        ranks = {_name(pod) for pod in self._rank_pods()}
        for pod in self.pods:
            name = _name(pod)
            # Ranks are ready as soon as they run.
            if name in ranks or failures.condition(pod, "Ready")["status"] == "True":
                self._ready_before.add(name)
            state = failures.failed_state(pod)
            if state is None or name in self._failed_pods:
                continue
            cause = failures.first_error(self._save_log(pod)) or "its log names no error"
            if state.get("reason") == "OOMKilled":
                cause = "it ran out of memory (OOMKilled)"
            when = "" if name in self._ready_before else " before it was ready"
            where = failures.pod_on_node(pod)
            self._failed_pods[name] = f"{where} ended with exit code {state['exitCode']}{when}: {cause}"
            say(self._stage.stage, self._failed_pods[name])
            if name in self._ready_before:
                continue
            if cause in self._start_errors:
                raise PipelineError(f"{cause}: {name} is the second pod that ends with it; logs are in {self._records}")
            self._start_errors.add(cause)

    def _current_phase(self) -> Phase:
        for kind, phase in (("Complete", Phase.COMPLETE), ("Failed", Phase.FAILED)):
            if failures.condition(self.job, kind)["status"] == "True":
                return phase
        if self.job["spec"].get("suspend"):
            return Phase.QUEUED
        started = [pod for pod in self._rank_pods() if pod["status"].get("phase", "Pending") != "Pending"]
        return Phase.RUNNING if len(started) >= self._stage.config.nodes else Phase.PENDING

    def _rank_pods(self) -> list[Json]:
        label = "jobset.sigs.k8s.io/replicatedjob-name"  # its value is ROLLOUT for pods of vLLM servers
        return [pod for pod in self.pods if pod["metadata"]["labels"].get(label) == NODE]

    def _follow_first_rank(self) -> None:
        """Follow the log of the first node's newest pod that has started; a restart of the job makes a new pod."""
        index = "batch.kubernetes.io/job-completion-index"
        pods = [pod for pod in self._rank_pods() if pod["metadata"]["labels"].get(index) == "0"]
        kinds = ("running", "terminated")
        started = [pod["metadata"] for pod in pods if any(failures.container_states(pod, kind) for kind in kinds)]
        newest = max(started, key=lambda metadata: str(metadata.get("creationTimestamp", "")), default=None)
        if newest is None or (self._log is not None and self._log.uid == newest["uid"]):
            return
        if self._log is not None:
            self._log.finish()
        self._log = LogStream(self._jobs, newest, self._clock, say_line)

    def _check_time(self, phase: Phase) -> None:
        """Raise if the current phase takes too long; print why the job waits."""
        config = self._stage.config
        if phase is Phase.QUEUED:
            self._check_wait("not admitted by the queue", "queue_timeout_s", config.queue_timeout_s)
        elif phase is Phase.PENDING:
            self._check_waiting_containers()
            self._check_wait("not all pods run", "start_timeout_s", config.start_timeout_s)
        elif phase is Phase.RUNNING:
            # If the queue has suspended the job, the last line may be older than the phase.
            active_s = max(self._log.last_active_s, self._phase_began_s) if self._log else self._phase_began_s
            if self._clock.monotonic() - active_s > config.stall_timeout_s:
                limit = f"{config.stall_timeout_s:g} s (cluster.stall_timeout_s)"
                raise RetryableError(f"{self._name}: nothing was printed for {limit}")

    def _check_wait(self, what: str, key: str, limit_s: float) -> None:
        """Print why the job waits, if the reason has changed; raise if it waits in vain or beyond `limit_s`."""
        now = self._clock.monotonic()
        if now - self._phase_began_s > limit_s:
            raise RetriesExhaustedError(f"{self._name}: {what} within {limit_s:g} s (cluster.{key}): {self._problem()}")
        if now < self._next_report_s:
            return
        self._next_report_s, problem = now + _REPORT_S, self._problem()
        if _NEVER_ADMITTED.search(problem):
            raise PipelineError(f"{self._name}: {problem}; name another queue (cluster.queue), or ask for less")
        if problem != self._reported_problem:
            self._reported_problem = problem
            say(self._stage.stage, f"{self._name} {self._phase}: {problem}")

    def _problem(self) -> str:
        """Return why the job waits: from Kueue's workload, a failed pod, or the states of pods and their events."""
        events: list[Json] = []
        with suppress(client.ApiException, HTTPError):
            if self._phase is Phase.QUEUED:
                workload = self._jobs.workload(self.job)
                return failures.queueing_problem(workload, self._jobs.queue_position(workload) if workload else None)
            if self._phase is Phase.PENDING and self._failed_pods:
                return list(self._failed_pods.values())[-1]
            events = self._jobs.events((self.pods or [self.job])[0])
        return failures.scheduling_problem(self.pods, events)

    def _check_waiting_containers(self) -> None:
        """Raise PipelineError if a container has waited for `_UNSTARTABLE_S` without a chance to start."""
        now, before = self._clock.monotonic(), self._unstartable_since
        self._unstartable_since = {}  # without the pods that no longer wait for such a reason
        waiting = [(_name(pod), state) for pod in self.pods for state in failures.container_states(pod, "waiting")]
        for name, state in waiting:
            reason = state.get("reason", "")
            if _UNSTARTABLE.fullmatch(reason):
                self._unstartable_since[name] = before.get(name, now)
                if now - self._unstartable_since[name] >= _UNSTARTABLE_S:
                    hint = next((text for part, text in _HINTS.items() if part in reason), "")
                    raise PipelineError(f"{name}: {reason}: {state.get('message', 'no message')}{hint}")


def _name(pod: Json) -> str:
    name: str = pod["metadata"]["name"]
    return name


def _retried(request: Callable[..., list[Any]], *arguments: object) -> list[Any]:
    """Return the answer to a request, which is tried a few times; an empty list if each try fails."""
    for _ in range(_RECORD_TRIES):
        with suppress(client.ApiException, HTTPError):
            return request(*arguments)
    return []


class LogStream:
    """A thread that prints each line of a pod's log once, even if connections break; it raises no error."""

    def __init__(self, jobs: TrainJobs, pod: Json, clock: Clock, print_line: Callable[[str], None]) -> None:
        self.uid: str = pod["uid"]
        self.lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self.last_active_s = clock.monotonic()  # when a line was last read, or reading the log last failed
        self._jobs, self._pod, self._clock, self._print_line = jobs, pod["name"], clock, print_line
        self._last_time = ""  # timestamp of the last line; all have the same width, so that text order is time order
        self._num_at_last_time = 0  # lines with that timestamp so far
        self._response: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log of {self._pod}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop following, and print the rest of the log."""
        self.stop()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # otherwise both would print the same lines
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
        """Print new lines until `stop`, or until the pod is gone."""
        pause = 0.0
        while not self._stopped.wait(pause):
            before = self._last_time, self._num_at_last_time
            try:
                self._read(follow=True)
            except ReadTimeoutError:
                pass  # the pod prints nothing
            except (client.ApiException, HTTPError) as error:
                if getattr(error, "status", None) == 404:
                    return
                self.last_active_s = self._clock.monotonic()
            is_silent = before == (self._last_time, self._num_at_last_time)
            pause = min(max(2 * pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S) if is_silent else _FIRST_PAUSE_S

    def _read(self, *, follow: bool) -> None:
        """Print the lines that follow those already printed: up to now, or with `follow` as they appear."""
        printed_until, num_to_skip = self._last_time, self._num_at_last_time
        since = None
        if printed_until:  # in UTC and whole seconds, so that some lines are read again
            since = datetime.fromisoformat(printed_until).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._response = response = self._jobs.log(self._pod, NODE, follow=follow, since=since)
        try:
            for raw_line in response:
                if follow and (self._stopped.is_set() or not raw_line.endswith(b"\n")):
                    return  # a line that was cut off is read again
                line = raw_line.removesuffix(b"\n").decode(errors="replace")
                timestamp, _, text = line.partition(" ")
                if not _TIMESTAMP.fullmatch(timestamp):  # a message of the kubelet, such as that it cannot read the log
                    self._print_line(line)
                    continue
                if timestamp < printed_until:
                    continue
                if timestamp == printed_until and num_to_skip > 0:
                    num_to_skip -= 1
                    continue
                printed_until = ""  # all further lines are new
                self._num_at_last_time = self._num_at_last_time + 1 if timestamp == self._last_time else 1
                self._last_time, self.last_active_s = timestamp, self._clock.monotonic()
                self.lines.append(text)
                self._print_line(text)
        finally:
            self._response = None
            response.close()
