"""Progress: lines in a log, a bar on a terminal, and neither spoils the other."""

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from components.shared.environment import TERMINAL_VARIABLE

_ROOT = Path(__file__).parents[2]
_STEPS = """
import sys, time
from components.shared import progress
progress._INTERVAL_S = {interval}
with progress.progress("train_sft", {total}) as shown:
    for step in range({steps}):
        time.sleep({seconds})
        shown.advance(loss=1 / (step + 1), tokens_per_s=12345.6, phase="warm up")
progress.say("train_sft", "done")
"""


def _code(*, total: int = 5, steps: int = 5, seconds: float = 0.05, interval: float = 0.0) -> list[str]:
    code = _STEPS.format(total=total, steps=steps, seconds=seconds, interval=interval)
    return [sys.executable, "-c", code]


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != TERMINAL_VARIABLE}
    # Draw every step: by default tqdm draws no more than ten times a second.
    return {**kept, "PYTHONPATH": str(_ROOT), "TQDM_MININTERVAL": "0", **more}


def _in_pipe(command: list[str], **environment: str) -> list[str]:
    done = subprocess.run(
        command, cwd=_ROOT, env=_environment(**environment), capture_output=True, text=True, check=True, timeout=60
    )
    assert not done.stderr
    assert "\r" not in done.stdout
    return done.stdout.splitlines()


class _Terminal:
    """A terminal of its own, and all that is drawn on it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 160))
        self.name = os.ttyname(self.slave)
        self._drawn = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                content = os.read(self._master, 4096)
            except OSError:  # the last one that had it open has closed it
                return
            self._drawn += content

    def end(self) -> str:
        """Close the terminal and return what was drawn, with every carriage return."""
        os.close(self.slave)
        self._reader.join(timeout=30)
        os.close(self._master)
        return self._drawn.decode().replace("\r\n", "\n")


def _seen(drawn: str) -> list[str]:
    """The lines that remain on the screen: a carriage return begins a line again and what follows overwrites it."""
    seen = []
    for line in drawn.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        seen.append(shown.rstrip())
    return seen


def test_a_log_has_a_line_per_interval_with_the_time_left() -> None:
    """Stage, steps done, figures, and how long it will take."""
    lines = _in_pipe(_code(steps=5, total=5))
    assert len(lines) == 6
    for number, line in enumerate(lines[:4], start=1):
        assert re.fullmatch(
            rf"train_sft {number}/5  loss [\d.]+  tokens per s 12,346  phase warm up  0:0\d left", line
        ), line


def test_the_time_left_is_what_the_steps_so_far_foretell() -> None:
    """Three steps of half a second to go at first, one at the end."""
    lines = _in_pipe(_code(steps=3, total=4, seconds=0.5))
    left = [int(line.removesuffix(" left").rpartition(":")[2]) for line in lines[:3]]
    assert left[0] in {2, 3}
    assert left[2] in {0, 1}


def test_a_log_ends_with_what_it_came_to() -> None:
    """The last step is shown though no interval is over, and says so."""
    lines = _in_pipe(_code(interval=1000.0))
    assert len(lines) == 2
    assert re.fullmatch(r"train_sft 5/5  loss 0.2  tokens per s 12,346  phase warm up  done in 0:00", lines[0])
    assert lines[1] == "train_sft: done"


def test_nothing_is_shown_between_intervals() -> None:
    """A log of thousands of steps stays one that can be read."""
    lines = _in_pipe(_code(total=100, steps=40, seconds=0.02, interval=0.3))
    assert 1 <= sum(line.startswith("train_sft ") for line in lines) <= 4


def test_a_terminal_shows_a_bar_and_no_lines_between() -> None:
    """The bar is drawn in one place and gone at the end; the last line and what follows have lines of their own."""
    terminal = _Terminal()
    subprocess.run(
        _code(), cwd=_ROOT, env=_environment(), stdout=terminal.slave, stderr=terminal.slave, check=True, timeout=60
    )
    drawn = terminal.end()
    bars = re.findall(r"\rtrain_sft: +(\d+)%\|[^\r\n]*loss [\d.]+  tokens per s 12,346", drawn)
    assert {"20", "40", "60", "80"} <= set(bars)
    last, said, end = _seen(drawn)
    assert re.fullmatch(r"train_sft 5/5  loss 0.2  tokens per s 12,346  phase warm up  done in 0:00", last)
    assert (said, end) == ("train_sft: done", "")


def test_an_error_in_the_middle_takes_the_bar_away() -> None:
    """What is printed next does not stand behind half a bar."""
    terminal = _Terminal()
    code = _code(steps=3)
    code[-1] = code[-1].replace("progress.say(", "    sys.exit('error: out of apples')\n#")
    run = subprocess.run(
        code, cwd=_ROOT, env=_environment(), stdout=terminal.slave, stderr=terminal.slave, check=False, timeout=60
    )
    drawn = terminal.end()
    assert (run.returncode, _seen(drawn)) == (1, ["error: out of apples", ""])
    assert "60%|" in drawn


def test_the_bar_is_drawn_on_the_named_terminal_where_output_is_a_pipe() -> None:
    """A runner that reads the lines itself still lets the stage draw; its lines hold no trace of the bar."""
    terminal = _Terminal()
    lines = _in_pipe(_code(), **{TERMINAL_VARIABLE: terminal.name})
    drawn = terminal.end()
    assert "\rtrain_sft: " in drawn
    assert "60%|" in drawn
    assert "\n" not in drawn
    assert _seen(drawn) == [""]
    assert [line.split("  ")[0] for line in lines] == [*(f"train_sft {done}/5" for done in range(1, 6)), lines[-1]]


@pytest.mark.parametrize(
    ("figure", "shown"),
    [("1234567.8", "1,234,568"), ("100", "100"), ("99.96", "100"), ("0.012345", "0.0123"), ("2e-7", "2e-07")],
)
def test_figures_are_short(figure: str, shown: str) -> None:
    """Three digits tell enough; from 100 on, whole numbers."""
    code = _code(total=1, steps=1)
    code[-1] = code[-1].replace("12345.6", figure)
    assert f"tokens per s {shown}  phase" in _in_pipe(code)[0]
