"""A run on this machine: messages below the headers of their stages, noise kept out, and a process that ends."""

import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kfp.local import subprocess_task_handler

from pipelines.run import local
from pipelines.run.journal import Tracker
from pipelines.run.process import lines, output, process
from pipelines.run.screen import Screen, Style, duration


class Terminal(io.StringIO):
    """A terminal as far as a screen can tell."""

    def isatty(self) -> bool:
        """It is one."""
        return True


class Run:
    """A run whose journal and output are written by hand."""

    def __init__(self, folder: Path, screen: io.StringIO) -> None:
        self.path, self.screen = folder / "journal.jsonl", screen
        self.tracker = Tracker(Screen(screen, screen), self.path.open("a+", encoding="utf-8"))
        self.journal(event="planned", tasks=["prepare_data", "evaluate", "train_sft", "report"])
        self.journal(stage="prepare_data", event="started", outputs={"problems": "/run/problems"})

    def journal(self, **event: Any) -> None:
        """Append one line as a stage does."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def wait(self) -> None:
        """Let time pass without output: at the second idle moment all events so far are taken."""
        self.tracker.idle()
        self.tracker.idle()

    def lines(self) -> list[str]:
        """What is on the screen, without times."""
        lines = [line.strip() for line in self.screen.getvalue().replace("\r\x1b[K", "").splitlines()]
        return [line for line in lines if not line.startswith("took")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose first task has just started."""
    return Run(tmp_path, io.StringIO())


def test_a_line_is_shown_below_the_header_of_its_stage(run: Run) -> None:
    """However late output arrives or early the journal is written, nothing appears under another stage."""
    run.journal(stage="prepare_data", event="finished", seconds=1.0, metrics={})
    run.journal(stage="evaluate", event="started", outputs={})
    run.tracker.line("    prepare_data: 20 problems")
    run.tracker.line("    evaluate 1/1  accuracy 1  done in 0:00")
    assert run.lines() == [
        "[1/4] prepare_data",
        "20 problems",
        "[2/4] evaluate",
        "1/1  accuracy 1  done in 0:00",
    ]


def test_a_stage_without_output_is_announced_too(run: Run) -> None:
    """Silence does not hold the header back; outputs are those that the stage named when it started."""
    run.journal(stage="prepare_data", event="finished", seconds=1.0, metrics={})
    run.wait()
    assert run.lines() == ["[1/4] prepare_data", "[2/4] evaluate"]
    assert [task.outputs for task in run.tracker.finished] == [{"problems": Path("/run/problems")}]


def test_a_failure_is_one_line_with_its_exit_code(run: Run) -> None:
    """The stage's name is not repeated: the header has it."""
    run.journal(stage="prepare_data", event="failed", error="prepare_data: x.jsonl: no such file", exit_code=2)
    run.wait()
    assert run.tracker.exit_code == 2
    assert run.lines()[-1] == "error: x.jsonl: no such file"


def test_a_line_still_being_written_waits(run: Run) -> None:
    """Half a journal line is no event yet."""
    for half, num_finished in (('{"stage": "prepare_data", "event": "fini', 0), ('shed", "seconds": 1.0}\n', 1)):
        with run.path.open("a", encoding="utf-8") as file:
            file.write(half)
        run.wait()
        assert len(run.tracker.finished) == num_finished


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (245, "4 min 05 s"), (27_000, "7 h 30 min")]
)
def test_durations_read_well(seconds: float, words: str) -> None:
    """Seconds with a decimal up to a minute, then minutes and seconds."""
    assert duration(seconds) == words


@pytest.mark.parametrize(
    "line",
    [
        "12:00:01.123 - INFO - Executing task \x1b[96m'train-sft'\x1b[0m",
        "    [KFP Executor 2026-01-01 12:00:00,000 INFO]: Looking for component `train_sft` in --component_module_path",
        '        "train_sft": 3,',
        "    report: Artifact( name='report',",
        "    /site-packages/torch/x.py:1: UserWarning: evaluate: this",
        "    train_sftx: not a stage",
        "-" * 80,
        "",
    ],
)
def test_noise_is_kept_off_the_screen(run: Run, line: str) -> None:
    """What KFP and libraries print is not taken for a stage's message."""
    run.tracker.line(line)
    assert run.lines() == ["[1/4] prepare_data"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("    prepare_data: tiny with [1,000] weights", "tiny with [1,000] weights"),
        ("    prepare_data 2/4  accuracy 0.5  0:01 left", "2/4  accuracy 0.5  0:01 left"),
        ("    prepare_data 4/4  accuracy 0.5  done in 0:02", "4/4  accuracy 0.5  done in 0:02"),
    ],
)
@pytest.mark.parametrize("screen", [io.StringIO, Terminal])
def test_messages_are_shown_without_the_name_of_their_stage(
    tmp_path: Path, screen: type[io.StringIO], line: str, shown: str
) -> None:
    """The header above has it."""
    run = Run(tmp_path, screen())
    run.tracker.line(line)
    assert run.lines()[1:] == [shown]


def test_on_a_terminal_progress_makes_room_for_what_follows(tmp_path: Path) -> None:
    """It stands below all messages, and is erased before another line is written."""
    run = Run(tmp_path, Terminal())
    run.tracker.line("    prepare_data 2/4  accuracy 0.5  0:01 left")
    run.tracker.line("    prepare_data: half done")
    run.journal(stage="prepare_data", event="finished", seconds=1.0, metrics={})
    run.wait()
    written = run.screen.getvalue()
    erase = "\r\x1b[1A\x1b[J"
    assert written.index("2/4") < written.index(erase) < written.index("half done") < written.rindex("0:01 left")
    assert written.rindex("0:01 left") < written.rindex(erase) < written.index("took")


def test_colour_is_for_terminals_that_did_not_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets plain text, however long; so does a terminal where NO_COLOR is set."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    long = "[bold] " + 300 * "long "
    assert _shown(Terminal(), long).endswith(f"\x1b[31m{long}\x1b[0m\n")
    assert _shown(io.StringIO(), long) == f"{long}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in _shown(Terminal(), long)


def _shown(stream: io.StringIO, text: str) -> str:
    Screen(stream, stream).show(text, Style.RED)
    return stream.getvalue()


def test_no_stage_starts_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the process of the graph while a stage starts, which may miss it: the next one is not started."""
    started: list[str] = []

    def start(full_command: Sequence[str], env_vars: Mapping[str, str] | None = None) -> int:
        started.extend(full_command)
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    monkeypatch.setattr(subprocess_task_handler, "run_local_subprocess", start)
    before = signal.getsignal(signal.SIGINT)
    try:
        local._start_nothing_after_stop()
        codes = [subprocess_task_handler.run_local_subprocess([name], {}) for name in ("report", "register")]
    finally:
        signal.signal(signal.SIGINT, before)
    assert started == ["report"]
    assert codes == [0, 128 + signal.SIGINT]


_STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(30)
"""


def test_a_process_that_ignores_signals_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Ctrl-C nor SIGTERM ends it; nothing that was started outlives the block."""
    monkeypatch.setattr("pipelines.run.process._GRACE_S", 0.1)
    with process([sys.executable, "-c", _STUBBORN], os.environ, grace_s=0.1) as started:
        assert next(line for line in lines(output(started)) if line is not None) == b"ready"
    assert started.returncode == -signal.SIGKILL
