"""The log of a pod, passed on line by line while it is written, through connections that break."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError, ReadTimeoutError

from components.cluster.clock import Clock
from components.cluster.trainjob.manifest import NODE
from components.cluster.trainjob.objects import Json, Objects
from components.cluster.trainjob.patience import is_passing

_LINES_KEPT = 1000
_FINISH_S = 5.0
_TRIES = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_ABSENT = 404
Moment = tuple[datetime, int]
"""Whole seconds, and nanoseconds beyond them."""


class LogStream:
    """Passes on each line of a pod's log once, whatever happens to the connection; never fails itself.

    Lines carry their times, so after a break reading goes on where it stopped.
    """

    def __init__(self, objects: Objects, pod: Json, clock: Clock, pass_on: Callable[[str], None]) -> None:
        self.uid: str = pod["metadata"]["uid"]
        self.lines: deque[str] = deque(maxlen=_LINES_KEPT)
        """The last that were passed on."""
        self.last_sign_s = clock.monotonic()
        """When there was a line, or no telling whether there was."""
        self._objects, self._pod, self._clock, self._pass_on = objects, pod["metadata"]["name"], clock, pass_on
        self._place: Moment | None = None
        self._num_at_place = 0
        self._response: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log of {self._pod}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop following, and pass on what is there to be read still."""
        self.stop()
        self._thread.join(_FINISH_S)
        if self._thread.is_alive():
            return  # it would take the same lines
        for turn in range(_TRIES):
            try:
                self._read(follow=False)
                return
            except (client.ApiException, HTTPError) as error:
                if not is_passing(error):
                    return
            self._clock.sleep(min(2**turn * _FIRST_PAUSE_S, _LONGEST_PAUSE_S))

    def stop(self) -> None:
        """Stop following at once."""
        self._over.set()
        response = self._response
        if response is not None:
            with suppress(OSError, ValueError):  # it may just have ended
                response.shutdown()

    def _follow(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            before = len(self.lines), self._place
            try:
                self._read(follow=True)
            except client.ApiException as error:
                if error.status == _ABSENT:
                    return
                self.last_sign_s = self._clock.monotonic()
            except ReadTimeoutError:
                pass  # silence
            except HTTPError:
                self.last_sign_s = self._clock.monotonic()
            silent = before == (len(self.lines), self._place)
            pause = min(2 * pause, _LONGEST_PAUSE_S) if silent else _FIRST_PAUSE_S

    def _read(self, *, follow: bool) -> None:
        place, known = self._place, self._num_at_place
        since = place and place[0].strftime("%Y-%m-%dT%H:%M:%SZ")
        self._response = response = self._objects.log(self._pod, NODE, follow=follow, since=since)
        try:
            for line in _lines(response, ended=not follow):
                if follow and self._over.is_set():
                    return
                moment, text = _parted(line)
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
        self._pass_on(text)


def _lines(response: Any, *, ended: bool) -> Iterator[str]:
    """Yield whole lines; what a broken connection leaves of one comes again, what a container leaves at its end not."""
    rest = b""
    for chunk in response.stream(2**16):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if ended and rest:
        yield rest.decode(errors="replace")


def _parted(line: str) -> tuple[Moment, str]:
    """Return the time of a line, and the line."""
    stamp, _, text = line.partition(" ")
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return (datetime.fromisoformat(f"{seconds}+00:00"), int(fraction.ljust(9, "0") or 0)), text
