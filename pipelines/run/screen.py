"""What a person sees of a run: a numbered header per stage, its messages, its seconds, its error."""

from enum import StrEnum
from typing import TextIO

from rich.console import Console
from rich.text import Text

_INDENT = " " * 6
_RETURN_AND_CLEAR = "\r\x1b[K"


class Style(StrEnum):
    """How text stands out on a terminal."""

    BOLD = "bold"
    DIM = "dim"
    RED = "red"
    GREEN = "green"
    YELLOW = "yellow"


class Screen:
    """Writes for people: in colour and below live bars on a terminal, plain lines anywhere else."""

    def __init__(self, out: TextIO, error: TextIO) -> None:
        self._out, self._error = (
            Console(file=stream, soft_wrap=True, highlight=False, markup=False, emoji=False) for stream in (out, error)
        )
        self.live = out.isatty()
        """Whether stages draw their bars on this terminal themselves."""

    def show(self, line: str | Text = "", style: str = "") -> None:
        """Write one line; it replaces a bar that a stage has drawn on the terminal."""
        self._write(self._out, line, style)

    def header(self, number: int, total: int, title: str) -> None:
        """Announce a stage."""
        self.show(f"[{number}/{total}] {title}", Style.BOLD)

    def detail(self, text: str, style: str = "") -> None:
        """Write a line that belongs to the stage announced last."""
        self.show(f"{_INDENT}{text}", style)

    def error(self, text: str, *more: str) -> None:
        """Write an error as one line, and more lines that help to find its cause, on standard error."""
        self._write(self._error, f"{_INDENT}error: {text}", Style.RED)
        for line in more:
            self._write(self._error, f"{_INDENT}{line}")

    def _write(self, console: Console, line: str | Text, style: str = "") -> None:
        if self.live:
            console.file.write(_RETURN_AND_CLEAR)
        console.print(line, style=style or None)


def duration(seconds: float) -> str:
    """Return a time as a person would say it: `3.2 s`, `4 min 05 s`, `7 h 30 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
