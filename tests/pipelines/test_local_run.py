"""A run on this machine: what its stages say on the screen, their processes, and their end."""

import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from components.shared.stage import Stage
from pipelines.run import stages
from pipelines.run.journal import Tracker
from pipelines.run.process import process
from pipelines.run.screen import Screen, Style


def test_a_stage_is_announced_when_the_one_before_it_ends(tmp_path: Path) -> None:
    """Messages come below its header, those of a helper with its name; half a line of the journal is none yet."""
    path, screen = tmp_path / "journal.jsonl", io.StringIO()
    stages = ["prepare_data", "evaluate", "train_sft", "report"]
    tracker = Tracker(Screen(screen, screen), path.open("a+", encoding="utf-8"), stages)

    def write(text: str) -> list[str]:
        """Append to the journal; return what is on the screen then."""
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        tracker.read()
        return [line.strip() for line in screen.getvalue().splitlines()]

    def journal(stage: str, event: str, **details: Any) -> list[str]:
        return write(json.dumps({"stage": stage, "event": event, **details}) + "\n")

    journal("prepare_data", "started", outputs={"problems": "/run/problems"})
    journal("prepare_data", "message", text="20 problems")
    write('{"stage": "prepare_data", "event": "fini')
    assert tracker.num_finished == 0
    write('shed", "seconds": 1.0, "metrics": {}}\n')
    journal("evaluate", "started", outputs={})
    journal("vllm", "message", text="all servers answer")
    shown = ["[1/4] prepare_data", "20 problems", "took 1.0 s", "[2/4] evaluate", "vllm: all servers answer"]
    progress = "1/1  accuracy 1  done in 0:00"
    assert journal("evaluate", "progress", done=1, total=1, text=progress) == [*shown, progress]
    assert (tracker.num_finished, tracker.running) == (1, "evaluate")
    lines = journal("evaluate", "failed", error="evaluate: x.jsonl: no such file", exit_code=2)
    assert (lines[-1], tracker.exit_code) == ("error: x.jsonl: no such file", 2)


def test_what_is_no_terminal_gets_plain_lines() -> None:
    """However long, without colour and changing lines; a bar or arrow that the encoding lacks must not end a run."""
    stream, long = io.StringIO(), "[bold] " + 300 * "long "
    screen = Screen(stream, stream)
    screen.draw([Text("step 1")])
    screen.show(long, Style.RED)
    assert stream.getvalue() == f"{long}\n"
    written = io.BytesIO()
    latin = io.TextIOWrapper(written, encoding="latin-1", write_through=True)
    Screen(latin, latin).show("é ▁▂ →")
    assert written.getvalue().decode("latin-1") == "é ?? ?\n"


def test_no_stage_starts_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the process of the stages while one starts, which may miss it: the next one is not started."""
    started: list[str] = []

    def start(stage: Stage, options: list[str]) -> int:
        started.append(stage.name)
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    monkeypatch.setattr(stages, "_run_in_process", start)
    monkeypatch.setattr(stages, "_has_accelerator", lambda: True)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert stages.run_stages(tmp_path, fresh_from="") == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
        stages._received_signals.clear()
    assert started == ["prepare_data"]


_STUBBORN = """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, {})
print("ready", flush=True); time.sleep(30)"""


@pytest.mark.parametrize(
    ("on_sigint", "grace_s"), [("signal.SIG_IGN", 0.1), ("lambda *_: os.kill(os.getppid(), signal.SIGINT)", 1000.0)]
)
def test_a_process_that_ignores_signals_is_killed(
    on_sigint: str, grace_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither Ctrl-C nor SIGTERM ends it; nothing that was started outlives the block, and another Ctrl-C ends it."""
    monkeypatch.setattr("pipelines.run.process._GRACE_S", 0.1)
    log = tmp_path / "log"
    with (
        log.open("wb") as file,
        process([sys.executable, "-c", _STUBBORN.format(on_sigint)], os.environ, grace_s=grace_s, log=file) as started,
    ):
        while not log.read_text():
            time.sleep(0.01)
    assert started.returncode == -signal.SIGKILL
