"""What a person sees of a run: a numbered header per stage, its messages, its seconds, its error.

On a terminal, lines that change may stand below all others: they are erased before anything else is written, and drawn
again after it. Only the width of a terminal is asked for each time, so it may be resized at any moment.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INDENT = " " * 6
_RETURN_AND_CLEAR = "\r\x1b[K"


def printable(text: str) -> str:
    """Return a text without control characters: models and names of files may hold commands for a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


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
        from rich.console import Console  # slow to import, and of no use to a command that only prints an error

        self._out, self._error = (
            Console(file=stream, soft_wrap=True, highlight=False, markup=False, emoji=False) for stream in (out, error)
        )
        self.live = out.isatty() and not self._out.is_dumb_terminal
        """Whether lines that change can be drawn."""
        self._changing: Sequence[Text] = ()
        self._drawn: list[int] = []
        """Columns of each line that stands there now."""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows that lines that change may take."""
        return self._out.width - 1, self._out.height - 2

    @property
    def is_unicode(self) -> bool:
        """Whether the terminal shows more than ASCII."""
        return self._out.encoding.startswith("utf")

    def draw(self, lines: "Sequence[Text]") -> None:
        """Have these lines stand below all others; none to remove them."""
        if self.live and (lines or self._drawn):
            self._changing = lines
            self._put("")

    def show(self, line: "str | Text" = "", style: str = "") -> None:
        """Write one line."""
        self._write(self._out, line, style)

    def header(self, number: int, total: int, title: str) -> None:
        """Announce a stage."""
        self.show(f"[{number}/{total}] {title}", Style.BOLD)

    def detail(self, text: str, style: str = "") -> None:
        """Write a line that belongs to the stage announced last."""
        self.show(f"{INDENT}{text}", style)

    def error(self, text: str, *more: str) -> None:
        """Write an error as one line, and more lines that help to find its cause, on standard error."""
        self.draw([])
        self._write(self._error, f"{INDENT}error: {text}", Style.RED)
        for line in more:
            self._write(self._error, f"{INDENT}{line}")

    def end(self, text: str) -> None:
        """Write on standard error how a run has ended that was stopped, which is no error."""
        self.draw([])
        self._write(self._error, f"{INDENT}{text}")

    def _write(self, console: "Console", line: "str | Text", style: str = "") -> None:
        if not self.live:
            console.print(line, style=style or None)
        elif console is self._out:
            with console.capture() as written:
                console.print(line, style=style or None)
            self._put(_RETURN_AND_CLEAR + written.get())
        else:
            console.file.write(_RETURN_AND_CLEAR)
            console.print(line, style=style or None)

    def _put(self, text: str) -> None:
        """Write text in the place of the lines that change, and these below it, all at once."""
        width = self._out.width
        with self._out.capture() as drawn:
            for line in self._changing:
                self._out.print(line, soft_wrap=False, no_wrap=True, overflow="crop")
        # A narrower terminal has wrapped what was wider.
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        erase = f"\r\x1b[{rows}A\x1b[J" if rows else ""
        self._out.file.write(erase + text + drawn.get())
        self._out.file.flush()
        self._drawn = [min(line.cell_len, width) for line in self._changing]


def duration(seconds: float) -> str:
    """Return a time as a person would say it: `3.2 s`, `4 min 05 s`, `7 h 30 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
