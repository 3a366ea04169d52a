"""Logs of a training job: the first rank's while it is written, and the files that outlive the job."""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError, ReadTimeoutError

from components.cluster.job import Job
from components.cluster.kube import Clock, Json, Snapshot, TrainJobs, is_transient
from components.cluster.manifest import NODE
from components.shared import jsonl

_LINES_KEPT = 1000
_FINISH_S = 5.0
_TRIES = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_NOT_FOUND = 404
_RECORD_TRIES = 3
Moment = tuple[datetime, int]
"""Whole seconds, and the nanoseconds in addition."""


class LogStream:
    """Prints each line of a pod's log once, over connections that break; it never fails itself.

    Lines carry their times, so after a break reading resumes where it stopped.
    """

    def __init__(self, jobs: TrainJobs, pod: Json, clock: Clock, print_line: Callable[[str], None]) -> None:
        self.uid: str = pod["metadata"]["uid"]
        self.lines: deque[str] = deque(maxlen=_LINES_KEPT)
        """The last lines."""
        self.last_sign_s = clock.monotonic()
        """When there was a line, or no way to know."""
        self._jobs, self._pod, self._clock, self._print_line = jobs, pod["metadata"]["name"], clock, print_line
        self._place: Moment | None = None
        """Time of the last line."""
        self._num_at_place = 0
        """Lines so far of that time."""
        self._response: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log of {self._pod}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop following, and print the rest of the log."""
        self.stop()
        self._thread.join(_FINISH_S)
        if self._thread.is_alive():
            return  # it would print the same lines
        for attempt in range(_TRIES):
            try:
                self._read(follow=False)
                return
            except (client.ApiException, HTTPError) as error:
                if not is_transient(error):
                    return
            self._clock.sleep(min(2**attempt * _FIRST_PAUSE_S, _LONGEST_PAUSE_S))

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
            except client.ApiException as error:
                if error.status == _NOT_FOUND:
                    return
                self.last_sign_s = self._clock.monotonic()
            except ReadTimeoutError:
                pass  # the pod prints nothing
            except HTTPError:
                self.last_sign_s = self._clock.monotonic()
            silent = before == (len(self.lines), self._place)
            pause = min(2 * pause, _LONGEST_PAUSE_S) if silent else _FIRST_PAUSE_S

    def _read(self, *, follow: bool) -> None:
        place, known = self._place, self._num_at_place
        since = place and place[0].strftime("%Y-%m-%dT%H:%M:%SZ")
        self._response = response = self._jobs.log(self._pod, NODE, follow=follow, since=since)
        try:
            for line in _lines(response, ended=not follow):
                if follow and self._stopped.is_set():
                    return
                moment, text = _split(line)
                if place is not None and moment <= place:
                    known -= moment == place
                    if moment < place or known >= 0:
                        continue
                place = None  # all further lines are new
                self._take(moment, text)
        finally:
            self._response = None
            response.close()

    def _take(self, moment: Moment, text: str) -> None:
        self._num_at_place = self._num_at_place + 1 if moment == self._place else 1
        self._place = moment
        self.last_sign_s = self._clock.monotonic()
        self.lines.append(text)
        self._print_line(text)


def log_tails(jobs: TrainJobs, job: Job, seen: Snapshot, first_rank: Sequence[str]) -> dict[str, list[str]]:
    """Return the ends of logs by where they are from: each pod, and each rank that prints to a file.

    `first_rank` is what was read of the first rank's log, which may be gone with its pod.
    """
    tails = {"rank 0": list(first_rank)}
    for pod in seen.pods:
        for container in pod["spec"]["containers"]:
            if lines := _tail(jobs, pod["metadata"]["name"], container["name"]):
                tails[pod["metadata"]["name"]] = lines
    for rank in range(1, job.num_processes):
        if job.log(rank).is_file():
            text = job.log(rank).read_text(encoding="utf-8", errors="replace")
            tails[f"rank {rank}"] = text.splitlines()[-_LINES_KEPT:]
    return tails


def write_records(folder: Path, jobs: TrainJobs, job: Job, seen: Snapshot, tails: Mapping[str, Sequence[str]]) -> Path:
    """Write manifest, pods, events, logs and outcomes of an attempt; return its folder, at first attempt-1."""
    attempt = folder / f"attempt-{1 + len(list(folder.glob('attempt-*')))}"
    attempt.mkdir(parents=True)
    events = [event for document in (seen.job, *seen.pods) for event in _events(jobs, document)]
    for name, content in (("trainjob", seen.job), ("pods", seen.pods), ("events", events)):
        jsonl.write_json(attempt / f"{name}.json", content)
    for where, lines in tails.items():
        text = "".join(f"{line}\n" for line in lines)
        (attempt / f"{where.replace(' ', '-')}.log").write_text(text, encoding="utf-8")
    for path in job.folder.glob("*.json"):
        shutil.copy(path, attempt / path.name)
    return attempt


def _tail(jobs: TrainJobs, pod: str, container: str) -> list[str]:
    for _ in range(_RECORD_TRIES):
        with suppress(client.ApiException, HTTPError):
            text = jobs.log(pod, container, follow=False, tail=_LINES_KEPT).data.decode(errors="replace")
            return [line.partition(" ")[2] for line in text.splitlines()]
    return []


def _events(jobs: TrainJobs, document: Json) -> list[Json]:
    for _ in range(_RECORD_TRIES):
        with suppress(client.ApiException, HTTPError):
            return jobs.events(document)
    return []


def _lines(response: Any, *, ended: bool) -> Iterator[str]:
    """Yield whole lines: a broken connection's last part of a line is read again, that of a container's end is not."""
    rest = b""
    for chunk in response.stream(2**16):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if ended and rest:
        yield rest.decode(errors="replace")


def _split(line: str) -> tuple[Moment, str]:
    """Return the time of a line, and its text."""
    stamp, _, text = line.partition(" ")
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return (datetime.fromisoformat(f"{seconds}+00:00"), int(fraction.ljust(9, "0") or 0)), text
