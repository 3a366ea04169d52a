import io

import pytest

from pipelines.run.screen import Screen, StageLines, Style

LINES = StageLines(["train_sft", "evaluate", "report", "evaluate"])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
def test_noise_is_kept_off_the_screen(line: str) -> None:
    """What KFP and libraries print is not taken for what a stage says."""
    assert LINES.said(line, live=False) is None


def test_what_a_stage_says_is_shown_without_its_name() -> None:
    """The header above it says already which stage runs."""
    assert LINES.said("    train_sft: scratch:tiny with 1,000 parameters", live=False) == (
        "train_sft",
        "scratch:tiny with 1,000 parameters",
    )


def test_progress_lines_are_for_logs_only() -> None:
    """Where a live bar is drawn, its last figures remain and the lines in between are left out."""
    between, last = "    evaluate 2/4  accuracy 0.5  0:01 left", "    evaluate 4/4  accuracy 0.5  done in 0:02"
    assert LINES.said(between, live=False) == ("evaluate", "2/4  accuracy 0.5  0:01 left")
    assert LINES.said(between, live=True) is None
    assert LINES.said(last, live=True) == ("evaluate", "4/4  accuracy 0.5  done in 0:02")


def test_colour_is_for_terminals_that_did_not_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets plain text; so does a terminal where NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert _shown(_Terminal()).endswith("\x1b[31mtext\x1b[0m\n")
    assert _shown(io.StringIO()) == "text\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in _shown(_Terminal())


def _shown(stream: io.StringIO) -> str:
    Screen(stream, stream).show("text", Style.RED)
    return stream.getvalue()
