"""Progress: lines in a log, a bar on a terminal, and neither spoils the other."""

import io
import sys
from unittest.mock import Mock

import pytest

from components.shared import progress
from components.shared.environment import CLUSTER_VARIABLE

_LAST = "train_sft 5/5 steps  loss 0.2  tokens per s 12,346  phase warm up"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A clock that each step moves; standard output is no terminal unless a test makes it one."""
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(progress, "time", Mock(monotonic=clock))
    return clock


def _run(clock: Mock, *, total: int = 5, steps: int = 5, seconds: float = 1.0, skipped: int = 0) -> None:
    with progress.progress("train_sft", total) as shown:
        shown.skip(skipped)
        for step in range(steps):
            clock.return_value += seconds
            shown.advance(loss=1 / (step + 1), tokens_per_s=12345.6, phase="warm up")
    progress.say("train_sft", "done")


def test_lines_per_interval(clock: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the steps, the figures and the time left; the last step has a line of its own."""
    monkeypatch.setattr(progress, "_INTERVAL_S", 2.0)
    _run(clock)
    assert capsys.readouterr().out.splitlines() == [
        "train_sft 2/5 steps  loss 0.5  tokens per s 12,346  phase warm up  00:03 left",
        "train_sft 4/5 steps  loss 0.25  tokens per s 12,346  phase warm up  00:01 left",
        _LAST,
        "train_sft: done",
    ]


def test_the_time_left_is_estimated_from_this_runs_steps(clock: Mock, capsys: pytest.CaptureFixture[str]) -> None:
    """Not from those of an earlier run, which took no time now."""
    _run(clock, total=1000, skipped=900, steps=1, seconds=100.0)
    assert capsys.readouterr().out.splitlines()[0].endswith("  2:45:00 left")


def test_a_terminal_has_a_bar_and_no_lines_between(clock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would tear it; it is gone when the last line comes."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    _run(clock, seconds=100.0)
    drawn = terminal.getvalue()
    assert "train_sft:   0%|" in drawn
    assert "left" not in drawn
    assert drawn.endswith(f"\r{_LAST.replace('00:05', '08:20')}\ntrain_sft: done\n")


@pytest.mark.parametrize(
    "text",
    [
        f"train_grpo: {'x' * 200} and {'y' * 60}",
        f"two lines: {'a b ' * 30}c\nof which one is short",
        "train_grpo 906/20000  reward -0.0312  accuracy 0  length 1.06  kl 5.07  tokens per s 12,345  3:20 left",
    ],
)
def test_lines_of_a_pod_fit(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At most 72 characters each, from which `status` and `logs` make the text again; elsewhere it stays one line."""
    progress.say_line(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv(CLUSTER_VARIABLE, "10.0.0.1")
    progress.say_line(text)
    printed = capsys.readouterr().out
    assert all(len(line) <= 72 for line in printed.splitlines())
    assert sum(not line.startswith(" ") for line in printed.splitlines()) == text.count("\n") + 1
    assert " ".join(progress.unwrapped(printed).split()) == " ".join(text.split())
    progress.say_line(printed.rstrip("\n"))
    assert capsys.readouterr().out == printed, "a launcher prints the lines of a rank as they are"


def test_figures_are_short() -> None:
    """Three digits, and from 100 on whole numbers."""
    texts = [progress.brief(figure) for figure in (1234567.8, 100, 99.96, 0.012345, 2e-7, "warm")]
    assert texts == ["1,234,568", "100", "100", "0.0123", "2e-07", "warm"]
