"""What a person sees of a local run: a numbered header per stage, what the stage says, its seconds, its error."""

import os
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TextIO

_INDENT = " " * 6
_RETURN_AND_CLEAR = "\r\x1b[K"


class Style(StrEnum):
    """The few ways in which text stands out on a terminal."""

    BOLD = "1"
    DIM = "2"
    RED = "31"
    GREEN = "32"
    YELLOW = "33"


class Screen:
    """Writes for people: with colour and live bars on a terminal, plain lines anywhere else."""

    def __init__(self, out: TextIO, error: TextIO) -> None:
        self._out, self._error = out, error
        self.live = out.isatty()
        """Whether stages draw their bars on this terminal themselves."""
        self._colour = self.live and not os.environ.get("NO_COLOR")

    def terminal(self) -> str | None:
        """The name by which stages open the terminal to draw on, if there is one."""
        return os.ttyname(self._out.fileno()) if self.live else None

    def styled(self, text: str, *styles: Style) -> str:
        """Return `text` as it stands out here; unchanged where there is no colour."""
        return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if self._colour and styles else text

    def show(self, line: str = "", *styles: Style) -> None:
        """Write one line; a bar that a stage has drawn on the terminal makes way for it."""
        self._write(self._out, line, *styles)

    def header(self, number: int, total: int, title: str) -> None:
        """Announce a stage."""
        self.show(f"[{number}/{total}] {title}", Style.BOLD)

    def detail(self, text: str, *styles: Style) -> None:
        """Write a line that belongs to the stage announced last."""
        self.show(f"{_INDENT}{text}", *styles)

    def error(self, text: str, *more: str) -> None:
        """Write what went wrong, in one line, and more lines to find out why, on standard error."""
        self._write(self._error, f"{_INDENT}error: {text}", Style.RED)
        for line in more:
            self._write(self._error, f"{_INDENT}{line}")

    def _write(self, stream: TextIO, line: str, *styles: Style) -> None:
        clear = _RETURN_AND_CLEAR if self.live else ""
        print(f"{clear}{self.styled(line, *styles)}", file=stream, flush=True)


class StageLines:
    """Tells what stages say from what KFP and libraries print around it."""

    def __init__(self, stages: Sequence[str]) -> None:
        names = "|".join(re.escape(stage) for stage in sorted(set(stages)))
        # KFP lists outputs in lines like `report: Artifact( name='report',`.
        text = r": (?!\w+\( name=)(?P<text>.+)"
        progress = r" (?P<done>\d+)/(?P<total>\d+)\s+(?P<figures>.*)"
        self._said = re.compile(rf"\s*(?P<stage>{names})(?:{text}|{progress})")

    def said(self, line: str, *, live: bool) -> tuple[str, str] | None:
        """Return (stage, what it says), or None for noise and for progress that a live bar shows already."""
        match = self._said.fullmatch(line)
        if not match:
            return None
        if match["text"]:
            return match["stage"], match["text"]
        if live and match["done"] != match["total"]:
            return None
        return match["stage"], f"{match['done']}/{match['total']}  {match['figures']}"
