"""A run as it goes by: the journal and the output of its stages, brought into order and onto the screen."""

import json
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.run.screen import Screen, Style

Event = dict[str, Any]


@dataclass
class Task:
    """One task of the graph, and what is known of it so far."""

    title: str
    outputs: dict[str, Path] = field(default_factory=dict)
    seconds: float | None = None
    """Wall time until it was finished, with the start of its process; None before."""

    @property
    def stage(self) -> str:
        """The stage that the task runs: `evaluate sft` is one that evaluates."""
        return self.title.partition(" ")[0]


class Tracker:
    """Knows at any time which task runs, which are finished and which has failed, and shows it."""

    def __init__(self, screen: Screen, journal: "Journal") -> None:
        self.tasks: list[Task] = []
        self.exit_code: int | None = None
        """That of the stage that failed with an error meant for people."""
        self._screen, self._journal = screen, journal
        self._stage_lines = StageLines([])
        self._pending: deque[tuple[float, Event]] = deque()
        self._last_end = 0.0

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
        parsed = self._stage_lines.parse(text, live=self._screen.live)
        if parsed is None:
            return
        stage, message = parsed
        if self.running and self.running.stage != stage:
            self._read()
            self._handle_while(lambda: self.running is not None and self.running.stage != stage)
        self._screen.detail(message)

    def idle(self) -> None:
        """There was no output for a moment: events from before it have no more output to wait for."""
        self._handle_while(lambda: True)
        self._read()

    def end(self) -> None:
        """Take what is left in the journal."""
        self._read()
        self._handle_while(lambda: True)

    def _read(self) -> None:
        now = time.monotonic()
        self._pending.extend((now, event) for event in self._journal.new())

    def _handle_while(self, wanted: Callable[[], bool]) -> None:
        while self._pending and wanted():
            at, event = self._pending.popleft()
            if event["event"] == "planned":
                self.tasks = [Task(title) for title in event["tasks"]]
                self._stage_lines = StageLines([task.stage for task in self.tasks])
                self._last_end = at
                self._announce()
            else:
                self._take(event, at)

    def _take(self, event: Event, at: float) -> None:
        task = self.running
        assert task is not None, f"{event['stage']} {event['event']} although every task was done"
        assert task.stage == event["stage"], f"{event['stage']} {event['event']} in place of {task.stage}"
        if event["event"] == "started":
            task.outputs = {name: Path(path) for name, path in event["outputs"].items()}
        elif event["event"] == "finished":
            task.seconds, self._last_end = round(at - self._last_end, 1), at
            self._screen.detail(f"took {duration(task.seconds)}", Style.DIM)
            self._announce()
        else:
            self.exit_code = event["exit_code"]
            self._screen.error(event["error"].removeprefix(f"{task.stage}: "))

    def _announce(self) -> None:
        if self.running:
            self._screen.header(self.tasks.index(self.running) + 1, len(self.tasks), self.running.title)


class StageLines:
    """Tells messages of stages from what KFP and libraries print around them."""

    def __init__(self, stages: Sequence[str]) -> None:
        names = "|".join(re.escape(stage) for stage in sorted(set(stages)))
        # KFP lists outputs in lines like `report: Artifact( name='report',`.
        text = r": (?!\w+\( name=)(?P<text>.+)"
        progress = r" (?P<done>\d+)/(?P<total>\d+)\s+(?P<figures>.*)"
        self._message = re.compile(rf"\s*(?P<stage>{names})(?:{text}|{progress})")

    def parse(self, line: str, *, live: bool) -> tuple[str, str] | None:
        """Return (stage, message), or None for noise and for progress that a live bar shows already."""
        match = self._message.fullmatch(line)
        if not match:
            return None
        if match["text"]:
            return match["stage"], match["text"]
        if live and match["done"] != match["total"]:
            return None
        return match["stage"], f"{match['done']}/{match['total']}  {match['figures']}"


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
