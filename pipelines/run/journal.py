"""Shows the events in the journal of a running run on the screen; components/shared/journal.py lists them."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from components.report.formatting import duration
from components.shared.live import LIVE
from pipelines.run.screen import INDENT, Screen, Style
from pipelines.run.watch import TRAININGS, Training, view

_DRAW_INTERVAL_S = 0.5  # shortest time between two updates of the changing lines


class Tracker:
    """Reads the journal of a run, keeps track of the running stage, and shows the events."""

    def __init__(self, screen: Screen, journal: TextIO, stages: Sequence[str]) -> None:
        self.stages, self.num_finished = stages, 0
        self.exit_code: int | None = None
        """Exit code of the stage that reported an error; None also if a stage ended without a report."""
        self._screen, self._journal, self._partial_line = screen, journal, ""
        self._last_drawn, self._progress = 0.0, ""
        self._training: Training | None = None
        self._announce()

    @property
    def running(self) -> str | None:
        """The first stage that is not finished; None if all are."""
        return self.stages[self.num_finished] if self.num_finished < len(self.stages) else None

    def read(self) -> None:
        """Show the new events of the journal; an incomplete line waits for its end."""
        *lines, self._partial_line = (self._partial_line + self._journal.read()).split("\n")
        for line in lines:
            self._show_event(json.loads(line))
        self._draw()

    def _draw(self) -> None:
        """On a terminal, draw the view of a training, or the last line of progress of another stage."""
        now = time.monotonic()
        if not self._screen.live or now - self._last_drawn < _DRAW_INTERVAL_S:
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

    def _show_event(self, event: dict[str, Any]) -> None:
        """Show one event of the running stage; `stage` of a message may also be a part of it, such as vLLM."""
        stage, kind = self.running, event["event"]
        assert stage is not None, f"{event['stage']} {kind} although all stages have finished"
        if kind == "message":
            self._screen.detail(event["text"] if event["stage"] == stage else f"{event['stage']}: {event['text']}")
        elif kind == "progress" and self._screen.live and event["done"] != event["total"]:
            self._progress = event["text"]  # on a terminal only the last line of progress stays
        elif kind == "progress":
            self._screen.detail(event["text"])
        elif kind == "work" and stage in TRAININGS:
            self._training = Training(stage, Path(event["folder"]) / LIVE)
        elif kind == "finished":
            self._finish_stage(event)
        elif kind == "failed":
            self.exit_code = event["exit_code"]
            self._screen.error(event["error"].removeprefix(f"{stage}: "))

    def _finish_stage(self, event: dict[str, Any]) -> None:
        """Show how long the running stage took, or whose outputs it reuses, and announce the next stage."""
        self._training, self._progress = None, ""
        self._screen.draw([])
        reused_from = event.get("reused_from")
        result = f"unchanged: from {reused_from}" if reused_from else f"took {duration(event['seconds'])}"
        self._screen.detail(result, Style.DIM)
        self.num_finished += 1
        self._announce()

    def _announce(self) -> None:
        """Show the header of the running stage."""
        if self.running:
            self._screen.header(self.num_finished + 1, len(self.stages), self.running)
