"""The output of a run for people: a numbered header per stage, its messages, its time, its error."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

INDENT = " " * 6


def printable(text: str) -> str:
    """Return a text with control characters replaced: output of models and file names may contain terminal commands."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


class Style(StrEnum):
    """Style of text on a terminal."""

    BOLD = "bold"
    DIM = "dim"
    RED = "red"
    GREEN = "green"
    YELLOW = "yellow"


class Screen:
    """Writes lines for people: on a terminal in colour and with changing lines below all others, elsewhere plain."""

    def __init__(self, out: TextIO, error: TextIO) -> None:
        from rich.console import Console  # slow to import

        for stream in (out, error):  # characters that the encoding of the terminal lacks become a question mark
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        settings: dict[str, Any] = {"soft_wrap": True, "highlight": False, "markup": False, "emoji": False}
        self._out, self._error = Console(file=out, **settings), Console(file=error, **settings)
        self.live = out.isatty() and not self._out.is_dumb_terminal
        """Whether the output is a terminal that can draw changing lines."""
        self._view: Live | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows for changing lines."""
        return self._out.width - 1, self._out.height - 2

    def draw(self, lines: "Sequence[Text]") -> None:
        """Show these lines below all others, in place of those drawn before; an empty list removes them."""
        from rich.console import Group
        from rich.live import Live

        if not self.live:
            return
        if not lines:
            if self._view:
                self._view.stop()
            self._view = None
            return
        if self._view is None:
            self._view = Live(console=self._out, auto_refresh=False, transient=True, redirect_stdout=False)
            self._view.start()
        self._view.update(Group(*lines), refresh=True)

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
        """Write an error in one line, and more lines about its cause, on standard error."""
        self.draw([])  # removes the changing lines
        self._write(self._error, f"{INDENT}error: {text}", Style.RED)
        for line in more:
            self._write(self._error, f"{INDENT}{line}")

    def end(self, text: str) -> None:
        """Write on standard error how a stopped run has ended, without marking it as an error."""
        self.draw([])
        self._write(self._error, f"{INDENT}{text}")

    def _write(self, console: "Console", line: "str | Text", style: str = "") -> None:
        if self.live and self._view is None:
            console.file.write("\r\x1b[K")  # erases the ^C that a terminal shows for Ctrl-C
        console.print(line, style=style or None)
