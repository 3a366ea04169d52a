"""Progress of long work: a live bar on a terminal, one plain line per interval in a log.

Kubeflow's log window does not wrap lines and shows about 75 characters, so all output of a pod is wrapped.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TextIO

from tqdm import tqdm

from components.shared.environment import CLUSTER_VARIABLE
from components.shared.journal import log_event

_COLUMNS = 72
_WORD_INDENT, _CUT_INDENT = "  ", " "
"""Indentation of a continuation line that begins with a new word, or with the rest of a word that was cut."""
_INTERVAL_S = 5.0


class Progress:
    """Counts the finished units of a stage's work and shows the latest metrics next to them."""

    def __init__(self, stage: str, total: int, units: str) -> None:
        self._stage, self._units, self._total = stage, units, total
        self._done = self._skipped = 0
        self._started = self._last_line = self._last_rate = time.monotonic()
        no_bar = not sys.stdout.isatty()
        self._bar = tqdm(total=total, desc=stage, file=sys.stdout, disable=no_bar, leave=False, dynamic_ncols=True)

    def skip(self, steps: int) -> None:
        """Count `steps` as done by an earlier run: they do not count in the estimate of the time left."""
        self._done = self._skipped = steps
        self._bar.update(steps)

    def advance(self, steps: int = 1, /, **figures: float | str) -> None:
        """Count `steps` as done and show `figures`, with a line in the log at each interval and at the end."""
        self._done += steps
        text = "  ".join(f"{name.replace('_', ' ')} {brief(value)}" for name, value in figures.items())
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(steps)
        now = time.monotonic()
        if self._done == self._total:
            self._bar.close()  # the last line replaces the bar
            left = ""
        # On a terminal, the bar is on standard output, and lines would tear it.
        elif now - self._last_line >= _INTERVAL_S and not sys.stdout.isatty():
            step_s = (now - self._started) / (self._done - self._skipped)
            left = f"{tqdm.format_interval(step_s * (self._total - self._done))} left"
        else:
            return
        self._last_line = now
        line = "  ".join(filter(None, [f"{self._done}/{self._total} {self._units}", text, left]))
        say_line(f"{self._stage} {line}")
        log_event(self._stage, "progress", done=self._done, total=self._total, text=line)

    def rate(self, units: float) -> float:
        """Return units per second, where `units` were done since the last call."""
        now = time.monotonic()
        seconds, self._last_rate = now - self._last_rate, now
        return units / max(seconds, 1e-9)

    def close(self) -> None:
        """Remove the live bar."""
        self._bar.close()


def progress(stage: str, total: int, units: str = "steps") -> closing[Progress]:
    """Return a context that shows the progress of `total` units of a stage, such as steps or answers."""
    return closing(Progress(stage, total, units))


def say(stage: str, message: str) -> None:
    """Print one line of a stage."""
    say_line(f"{stage}: {message}")
    log_event(stage, "message", text=message)


def say_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line in one call, as other threads print too; to standard output by default."""
    print(f"{fitted(line)}\n", end="", flush=True, file=stream)


def say_error(stage: str, message: str) -> None:
    """Print the error of a stage to standard error; in a pod each sentence begins on a new line."""
    text = f"error: {stage}: {message}"
    if CLUSTER_VARIABLE in os.environ:
        text = re.sub(r"(?<=[.;]) (?=\S)", f"\n{_WORD_INDENT}", text)
    say_line(text, sys.stderr)


def fitted(text: str) -> str:
    """Return a text as this process prints it: in a pod with lines of at most 72 characters, otherwise unchanged."""
    if CLUSTER_VARIABLE not in os.environ:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line))


def unwrapped(text: str) -> str:
    """Return the output of a pod with wrapped lines joined again."""
    return re.sub(rf"\n{_CUT_INDENT}(?=\S)", "", re.sub(rf"\n{_WORD_INDENT}(?=\S)", " ", text))


def _pieces(line: str) -> Iterator[str]:
    """Yield the lines into which a line is wrapped: at spaces, or inside of words that are too long."""
    while len(line) > _COLUMNS:
        indent = len(line) - len(line.lstrip())
        space = line.rfind(" ", indent + 1, _COLUMNS + 1)
        is_cut = space < 0
        end = _COLUMNS if is_cut else space
        yield line[:end].rstrip()
        line = _CUT_INDENT + line[end:] if is_cut else _WORD_INDENT + line[end:].lstrip()
    yield line


def brief(value: float | str) -> str:
    """Return a figure with three significant digits, from 100 on as a whole number."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
