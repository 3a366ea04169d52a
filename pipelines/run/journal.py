"""The events in the journal of a running run, on the screen."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from components.shared.live import LIVE
from pipelines.run.screen import INDENT, Screen, Style, duration
from pipelines.run.watch import TRAININGS, Training, view

_DRAW_S = 0.5
"""Time between two updates of the changing lines."""


class Tracker:
    """Tracks which stage runs or has failed, and shows it."""

    def __init__(self, screen: Screen, journal: TextIO, stages: Sequence[str]) -> None:
        self.stages, self.num_finished = stages, 0
        self.exit_code: int | None = None
        """Exit code of the stage that failed with an error for people."""
        self._screen, self._journal, self._partial = screen, journal, ""
        self._last_end, self._last_drawn = time.monotonic(), 0.0
        self._progress = ""
        self._training: Training | None = None
        self._announce()

    @property
    def running(self) -> str | None:
        """The first stage that is not finished."""
        return self.stages[self.num_finished] if self.num_finished < len(self.stages) else None

    def read(self) -> None:
        """Show the new events of the journal; an incomplete line waits for its end."""
        *lines, self._partial = (self._partial + self._journal.read()).split("\n")
        for line in lines:
            self._take(json.loads(line))
        self._draw()

    def _draw(self) -> None:
        """Draw the view of a training, or the last line of progress, if the screen is a terminal."""
        now = time.monotonic()
        if not self._screen.live or now - self._last_drawn < _DRAW_S:
            return
        self._last_drawn = now
        lines: list[Text] = []
        if self._training:
            self._training.refresh()
            width, height = self._screen.size
            lines = view(self._training, width - len(INDENT), height)
        if not lines and self._progress:
            lines = [Text(self._progress)]
        self._screen.draw([Text(INDENT).append_text(line) for line in lines])

    def _take(self, event: dict[str, Any]) -> None:
        stage, kind = self.running, event["event"]
        assert stage is not None, f"{event['stage']} {kind} although every stage was done"
        if kind == "message":
            self._screen.detail(event["text"] if event["stage"] == stage else f"{event['stage']}: {event['text']}")
        elif kind == "progress" and self._screen.live and event["done"] != event["total"]:
            self._progress = event["text"]  # on a terminal only the last line of progress stays
        elif kind == "progress":
            self._screen.detail(event["text"])
        elif kind == "work" and stage in TRAININGS:
            self._training = Training(stage, Path(event["folder"]) / LIVE)
        elif kind == "finished":
            self._finish(event.get("reused_from"))
        elif kind == "failed":
            self.exit_code = event["exit_code"]
            self._screen.error(event["error"].removeprefix(f"{stage}: "))

    def _finish(self, reused_from: str | None) -> None:
        self._training, self._progress = None, ""
        self._screen.draw([])
        now = time.monotonic()
        end = f"unchanged: from {reused_from}" if reused_from else f"took {duration(now - self._last_end)}"
        self._last_end = now
        self._screen.detail(end, Style.DIM)
        self.num_finished += 1
        self._announce()

    def _announce(self) -> None:
        if self.running:
            self._screen.header(self.num_finished + 1, len(self.stages), self.running)
