"""A run as it goes on, for people: a line when a stage begins and when it ends, and the seconds on a terminal."""

import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from components.shared.errors import RetryableError
from pipelines.cluster.logs import LOOK_EVERY, LOST, failures, is_lost
from pipelines.cluster.runs import Cluster
from pipelines.cluster.tasks import CACHED, FINISHED, NOT_REACHED, planned, tasks, was_stopped
from pipelines.run.journal import duration
from pipelines.run.screen import Screen, Style

_POLL_S = 10.0
_PATIENCE_S = 600.0
"""Longest time without an answer: a server that is restarted, a laptop that sleeps."""
_ENDINGS = {
    "SUCCEEDED": ("done in {}", Style.GREEN),
    "SKIPPED": ("skipped", Style.DIM),
    "FAILED": ("failed after {}", Style.RED),
    "CANCELED": ("stopped after {}", Style.YELLOW),
    CACHED: ("not run: the cache has its outputs", Style.DIM),
}


class Progress:
    """Tells what has changed since it was last told."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._begun: set[str] = set()
        self._ended: set[str] = set()

    def show(self, run: Any) -> None:
        """Show the stages that have begun or ended since the last time."""
        total = len(planned(run))
        for task in tasks(run):
            if task.state not in ("PENDING", NOT_REACHED) and task.name not in self._begun:
                self._begun.add(task.name)
                self._screen.header(len(self._begun), total, task.title)
            if task.state in FINISHED and task.name not in self._ended:
                self._ended.add(task.name)
                ending, style = _ENDINGS[task.state]
                self._screen.detail(f"{task.title} {ending.format(duration(task.seconds or 0.0))}", style)

    def pulse(self, run: Any, waited_s: float) -> None:
        """Draw what is under way over the last line, on a terminal."""
        if self._screen.live:
            running = [task.title for task in tasks(run) if task.state == "RUNNING"]
            what = ", ".join(running) or str(run.state or "pending").lower()
            print(f"\r\x1b[K      {what}  {duration(waited_s)}", end="", flush=True)


def wait(
    cluster: Cluster,
    run_id: str,
    screen: Screen,
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Show a run until it has ended or nothing is left of it, and return 0 if it succeeded and 1 if it did not."""
    progress = Progress(screen)
    started = reached = now()
    for poll in count(1):
        try:
            run = cluster.get(run_id)
            reached = now()
        except RetryableError as error:
            if now() - reached > _PATIENCE_S:
                raise
            print(f"{error}; trying again", file=sys.stderr)
            sleep(_POLL_S)
            continue
        progress.show(run)
        if run.state in FINISHED:
            return _end(cluster, run, screen)
        if poll % LOOK_EVERY == 0 and is_lost(cluster, run):
            screen.error(LOST)
            return 1
        progress.pulse(run, now() - started)
        sleep(_POLL_S)
    raise AssertionError("a run is waited for until it ends")


def _end(cluster: Cluster, run: Any, screen: Screen) -> int:
    """Say how a run ended, and why where it failed."""
    if run.state == "SUCCEEDED":
        screen.show(f"succeeded  {cluster.url(run.run_id)}", Style.GREEN)
        return 0
    for reason, *more in failures(cluster, run):
        screen.error(reason, *more)
    screen.show(f"{'stopped' if was_stopped(run) else 'failed'}  {cluster.url(run.run_id)}", Style.RED)
    return 1
