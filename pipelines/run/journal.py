"""A run as it goes by: the journal and the output of its stages, brought into order and onto the screen."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.run.screen import Screen, StageLines, Style

Event = dict[str, Any]


@dataclass
class Task:
    """One task of the graph, and what is known of it so far."""

    stage: str
    title: str
    outputs: dict[str, Path] = field(default_factory=dict)
    seconds: float | None = None
    """Wall time until it was finished, with the start of its process; None while it is not."""


class Followed:
    """Knows at any time which task runs, what is finished and what has failed."""

    def __init__(self, screen: Screen, journal: "Journal") -> None:
        self.tasks: list[Task] = []
        self.exit_code: int | None = None
        """That of the stage that failed with an error meant for people."""
        self._screen, self._journal = screen, journal
        self._stage_lines = StageLines([])
        self._waiting: deque[tuple[float, Event]] = deque()
        self._since = 0.0

    @property
    def finished(self) -> list[Task]:
        """The tasks that are done, in their order."""
        return [task for task in self.tasks if task.seconds is not None]

    @property
    def running(self) -> Task | None:
        """The first task that is not done."""
        return next((task for task in self.tasks if task.seconds is None), None)

    def line(self, text: str) -> None:
        """Take one line of raw output: show it if a stage says it."""
        if not self.tasks:
            self._read()
            self._handle_while(lambda: not self.tasks)
        said = self._stage_lines.said(text, live=self._screen.live)
        if said is None:
            return
        stage, message = said
        if self.running and self.running.stage != stage:
            self._read()
            self._handle_while(lambda: self.running is not None and self.running.stage != stage)
        self._screen.detail(message)

    def idle(self) -> None:
        """Nothing came for a while: what the journal said before that while has no more output to wait for."""
        self._handle_while(lambda: True)
        self._read()

    def end(self) -> None:
        """Take what is left in the journal."""
        self._read()
        self._handle_while(lambda: True)

    def _read(self) -> None:
        now = time.monotonic()
        self._waiting.extend((now, event) for event in self._journal.new())

    def _handle_while(self, wanted: Callable[[], bool]) -> None:
        handlers = {
            "planned": self._planned,
            "started": self._started,
            "finished": self._finished,
            "failed": self._failed,
        }
        while self._waiting and wanted():
            at, event = self._waiting.popleft()
            handlers[event["event"]](event, at)

    def _planned(self, event: Event, at: float) -> None:
        self.tasks = [Task(task["stage"], task["title"]) for task in event["tasks"]]
        self._since = at
        self._stage_lines = StageLines([task.stage for task in self.tasks])
        self._announce()

    def _started(self, event: Event, at: float) -> None:
        self._running(event).outputs = {name: Path(path) for name, path in event["outputs"].items()}

    def _finished(self, event: Event, at: float) -> None:
        task = self._running(event)
        task.seconds, self._since = round(at - self._since, 1), at
        self._screen.detail(f"took {duration(task.seconds)}", Style.DIM)
        self._announce()

    def _failed(self, event: Event, at: float) -> None:
        task = self._running(event)
        self.exit_code = event["exit_code"]
        self._screen.error(event["error"].removeprefix(f"{task.stage}: "))

    def _running(self, event: Event) -> Task:
        task = self.running
        assert task is not None, f"{event['stage']} {event['event']} although every task was done"
        assert task.stage == event["stage"], f"{event['stage']} {event['event']} in place of {task.stage}"
        return task

    def _announce(self) -> None:
        if self.running:
            self._screen.header(self.tasks.index(self.running) + 1, len(self.tasks), self.running.title)


class Journal:
    """Reads the lines that have been added to a journal since the last time."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open(encoding="utf-8")
        self._partial = ""

    def new(self) -> list[Event]:
        """Return the events not returned before; a line still being written waits for its end."""
        *lines, self._partial = (self._partial + self._file.read()).split("\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Stop reading."""
        self._file.close()


def duration(seconds: float) -> str:
    """Return a time as a person would say it: `3.2 s`, `4 min 05 s`, `7 h 30 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
