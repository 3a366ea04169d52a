"""Progress: lines in a log, a bar on a terminal, and neither spoils the other."""

import os
import pty
import re
import sys
import termios
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from components.shared import progress

_LAST = "train_sft 5/5  loss 0.2  tokens per s 12,346  phase warm up  done in 00:05"


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class _EagerBar(tqdm):  # type: ignore[type-arg]
    """Draws every step, where tqdm draws ten times a second."""

    def __init__(self, **options: Any) -> None:
        super().__init__(mininterval=0, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """A clock that each step moves; standard output is no terminal unless a test makes it one."""
    clock = _Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(progress, "tqdm", _EagerBar)
    return clock


def _run(clock: _Clock, *, total: int = 5, steps: int = 5, seconds: float = 1.0, skipped: int = 0) -> None:
    with progress.progress("train_sft", total) as shown:
        if skipped:
            shown.skip(skipped)
        for step in range(steps):
            clock.now += seconds
            shown.advance(loss=1 / (step + 1), tokens_per_s=12345.6, phase="warm up")
    progress.say("train_sft", "done")


class _Terminal:
    """A terminal of its own, and all that is drawn on it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 160))
        self.stream = os.fdopen(slave, "w")

    def close(self) -> str:
        """Close the terminal and return what was drawn, with every carriage return."""
        self.stream.close()
        drawn = bytearray()
        with suppress(OSError):  # the end
            while content := os.read(self._master, 4096):
                drawn += content
        os.close(self._master)
        return drawn.decode().replace("\r\n", "\n")


def _screen(drawn: str) -> list[str]:
    """The lines that remain: a carriage return begins a line again, and what follows overwrites it."""
    lines = []
    for line in drawn.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_log_has_a_line_per_interval(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the steps, the figures and the time left; the last step has a line of its own."""
    monkeypatch.setattr(progress, "_INTERVAL_S", 2.0)
    _run(clock)
    assert capsys.readouterr().out.splitlines() == [
        "train_sft 2/5  loss 0.5  tokens per s 12,346  phase warm up  00:03 left",
        "train_sft 4/5  loss 0.25  tokens per s 12,346  phase warm up  00:01 left",
        _LAST,
        "train_sft: done",
    ]


def test_the_time_left_is_estimated_from_this_runs_steps(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Not from those of an earlier run, which took no time now."""
    _run(clock, total=1000, skipped=900, steps=1, seconds=100.0)
    assert capsys.readouterr().out.splitlines()[0].endswith("  2:45:00 left")


def test_a_terminal_has_a_bar_and_no_lines_between(clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is gone at the end; the last line and what follows have lines of their own."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    _run(clock)
    drawn = terminal.close()
    bars = re.findall(r"\rtrain_sft: +(\d+)%\|[^\r\n]*loss [\d.]+  tokens per s 12,346", drawn)
    assert {"20", "40", "60", "80"} <= set(bars)
    assert _screen(drawn) == [_LAST, "train_sft: done", ""]


@pytest.mark.parametrize(
    ("figure", "text"),
    [(1234567.8, "1,234,568"), (100, "100"), (99.96, "100"), (0.012345, "0.0123"), (2e-7, "2e-07"), ("warm", "warm")],
)
def test_figures_are_short(clock: _Clock, capsys: pytest.CaptureFixture[str], figure: float | str, text: str) -> None:
    """Three digits, and from 100 on whole numbers."""
    with progress.progress("train_sft", 1) as shown:
        shown.advance(tokens_per_s=figure)
    assert capsys.readouterr().out == f"train_sft 1/1  tokens per s {text}  done in 00:00\n"
