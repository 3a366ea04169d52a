"""A run as it goes by: the journal and the output of its stages, brought into order and onto the screen."""

import json
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from pipelines.run.screen import INDENT, Screen, Style, duration
from pipelines.run.watch import TRAININGS, Training, view

Event = dict[str, Any]
_DRAW_S = 0.5
"""Between two drawings of what changes."""


@dataclass
class Task:
    """The task of one stage, and what is known of it so far."""

    name: str
    outputs: dict[str, Path] = field(default_factory=dict)
    seconds: float | None = None
    """Wall time until it was finished, with the start of its process; None before."""
    reused_from: str | None = None
    """Run whose outputs it took; None where it computed its own."""


class Tracker:
    """Knows at any time which task runs, which are finished and which has failed, and shows it.

    Two sources are read: the journal, to which stages append a line when they start and end, and the output of the
    graph, which arrives a little later than what the journal says of the same moment.
    """

    def __init__(self, screen: Screen, journal: TextIO) -> None:
        self.tasks: list[Task] = []
        self.exit_code: int | None = None
        """That of the stage that failed with an error meant for people."""
        self._screen, self._journal, self._partial = screen, journal, ""
        self._pending: deque[tuple[float, Event]] = deque()
        self._last_end = self._last_drawn = 0.0
        self._progress = ""
        self._training: Training | None = None

    @property
    def finished(self) -> list[Task]:
        """The tasks that are done, in their order."""
        return [task for task in self.tasks if task.seconds is not None]

    @property
    def running(self) -> Task | None:
        """The first task that is not done."""
        return next((task for task in self.tasks if task.seconds is None), None)

    def line(self, text: str) -> None:
        """Take one line of raw output: show it if it is a stage's message, below the header of that stage."""
        if not self.tasks:
            self._read()
            self._handle_while(lambda: not self.tasks)
        stage, message = self._parse(text)
        if message:
            if self.running and self.running.name != stage:
                self._read()
                self._handle_while(lambda: self.running is not None and self.running.name != stage)
            self._screen.detail(message)
        self._draw()

    def idle(self) -> None:
        """Take what the journal said before a moment without output: there is no more output to wait for.

        What is new in the journal is taken the next time.
        """
        self._handle_while(lambda: True)
        self._read()
        self._draw()

    def _draw(self) -> None:
        """Draw what the running stage does now, on a terminal: the view of a training, or the last progress."""
        now = time.monotonic()
        if not self._screen.live or now - self._last_drawn < _DRAW_S:
            return
        self._last_drawn = now
        lines: list[Text] = []
        if self._training:
            self._training.refresh()
            width, height = self._screen.size
            lines = view(self._training, width - len(INDENT), height, unicode=self._screen.is_unicode)
        if not lines and self._progress:
            lines = [Text(self._progress)]
        self._screen.draw([Text(INDENT).append_text(line) for line in lines])

    def _parse(self, text: str) -> tuple[str, str]:
        """The stage and its message; no message for noise, and for progress that is drawn where it changes."""
        stages = "|".join({re.escape(task.name) for task in self.tasks}) or "(?!)"
        # KFP lists outputs in lines like `report: Artifact( name='report',`.
        message = r": (?!\w+\( name=)(?P<text>.+)"
        progress = r" (?P<done>\d+)/(?P<total>\d+)\s+(?P<figures>.*)"
        match = re.fullmatch(rf"\s*(?P<stage>{stages})(?:{message}|{progress})", text)
        if not match:
            return "", ""
        message = match["text"] or f"{match['done']}/{match['total']}  {match['figures']}"
        if self._screen.live and match["done"] != match["total"]:
            self._progress, message = message, ""
        return match["stage"], message

    def _read(self) -> None:
        """Read the lines added to the journal; one still being written waits for its end."""
        now = time.monotonic()
        *lines, self._partial = (self._partial + self._journal.read()).split("\n")
        self._pending.extend((now, json.loads(line)) for line in lines)

    def _handle_while(self, wanted: Callable[[], bool]) -> None:
        while self._pending and wanted():
            at, event = self._pending.popleft()
            if event["event"] == "planned":
                self.tasks, self._last_end = [Task(name) for name in event["tasks"]], at
                self._announce()
            else:
                self._take(event, at)

    def _take(self, event: Event, at: float) -> None:
        task = self.running
        assert task is not None, f"{event['stage']} {event['event']} although every task was done"
        assert task.name == event["stage"], f"{event['stage']} {event['event']} in place of {task.name}"
        if event["event"] == "started":
            task.outputs = {name: Path(path) for name, path in event["outputs"].items()}
        elif event["event"] == "work":
            if task.name in TRAININGS:
                self._training = Training.in_work(task.name, Path(event["folder"]))
        elif event["event"] == "finished":
            self._training, self._progress = None, ""
            self._screen.draw([])
            task.seconds, self._last_end = round(at - self._last_end, 1), at
            task.reused_from = event.get("reused_from")
            end = f"unchanged: from {task.reused_from}" if task.reused_from else f"took {duration(task.seconds)}"
            self._screen.detail(end, Style.DIM)
            self._announce()
        else:
            self.exit_code = event["exit_code"]
            self._screen.error(event["error"].removeprefix(f"{task.name}: "))

    def _announce(self) -> None:
        if self.running:
            self._screen.header(self.tasks.index(self.running) + 1, len(self.tasks), self.running.name)
