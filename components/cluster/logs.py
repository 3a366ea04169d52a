"""The first rank's log, while it is written."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError, ReadTimeoutError

from components.cluster.kube import Clock, Json, TrainJobs, is_transient
from components.cluster.manifest import NODE

LINES_KEPT = 1000
_FINISH_S = 5.0
_TRIES = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_NOT_FOUND = 404
Moment = tuple[datetime, int]
"""Whole seconds, and the nanoseconds in addition."""


class LogStream:
    """Prints each line of a pod's log once, over connections that break; it never fails itself.

    Lines carry their times, so after a break reading resumes where it stopped.
    """

    def __init__(self, jobs: TrainJobs, pod: Json, clock: Clock, print_line: Callable[[str], None]) -> None:
        """Follow the log of the pod with this metadata."""
        self.uid: str = pod["uid"]
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        """The last lines."""
        self.last_sign_s = clock.monotonic()
        """When there was a line, or no way to know."""
        self._jobs, self._pod, self._clock, self._print_line = jobs, pod["name"], clock, print_line
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
            except ReadTimeoutError:
                pass  # the pod prints nothing
            except (client.ApiException, HTTPError) as error:
                if getattr(error, "status", None) == _NOT_FOUND:
                    return
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
                self._num_at_place = self._num_at_place + 1 if moment == self._place else 1
                self._place, self.last_sign_s = moment, self._clock.monotonic()
                self.lines.append(text)
                self._print_line(text)
        finally:
            self._response = None
            response.close()


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
