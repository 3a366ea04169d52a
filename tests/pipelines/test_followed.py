import io
import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.run.journal import Followed, Journal, duration
from pipelines.run.screen import Screen

TASKS = [{"stage": "prepare_data", "title": "prepare_data"}, {"stage": "evaluate", "title": "evaluate base"}]


class Run:
    """A run whose journal and output are written by hand."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.shown = io.StringIO()
        self.followed = Followed(Screen(self.shown, self.shown), Journal(self.path))

    def journal(self, **event: Any) -> None:
        """Append one line as a stage does."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def lines(self) -> list[str]:
        """What is on the screen, without times."""
        return [line.strip() for line in self.shown.getvalue().splitlines() if not line.strip().startswith("took")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two tasks that has just been planned."""
    run = Run(tmp_path)
    run.journal(event="planned", tasks=TASKS)
    return run


def test_a_line_is_shown_below_the_header_of_its_stage(run: Run) -> None:
    """However late output arrives or early the journal is written, nothing appears under another stage."""
    run.journal(stage="prepare_data", event="started", outputs={"problems": "/run/problems"})
    run.journal(stage="prepare_data", event="finished", seconds=1.0, metrics={})
    run.journal(stage="evaluate", event="started", outputs={})
    run.followed.line("    prepare_data: 20 problems")
    run.followed.line("    evaluate 1/1  accuracy 1  done in 0:00")
    assert run.lines() == [
        "[1/2] prepare_data",
        "20 problems",
        "[2/2] evaluate base",
        "1/1  accuracy 1  done in 0:00",
    ]


def test_a_stage_without_output_is_announced_too(run: Run) -> None:
    """Silence does not hold the header back: two idle moments are enough."""
    run.journal(stage="prepare_data", event="started", outputs={})
    run.journal(stage="prepare_data", event="finished", seconds=1.0, metrics={})
    run.followed.idle()
    run.followed.idle()
    assert run.lines() == ["[1/2] prepare_data", "[2/2] evaluate base"]


def test_folders_are_those_that_the_stages_named(run: Run) -> None:
    """Outputs are found by what a stage wrote down when it started."""
    run.journal(stage="prepare_data", event="started", outputs={"problems": "/run/problems"})
    run.journal(stage="prepare_data", event="finished", seconds=1.0, metrics={})
    run.followed.end()
    assert [(task.title, task.outputs) for task in run.followed.finished] == [
        ("prepare_data", {"problems": Path("/run/problems")})
    ]


def test_a_failure_is_one_line_with_its_exit_code(run: Run) -> None:
    """The stage's name is not repeated: the header says it."""
    run.journal(stage="prepare_data", event="started", outputs={})
    run.journal(stage="prepare_data", event="failed", error="prepare_data: x.jsonl: no such file", exit_code=2)
    run.followed.end()
    assert run.followed.exit_code == 2
    assert run.lines()[-1] == "error: x.jsonl: no such file"


def test_a_line_still_being_written_waits(run: Run) -> None:
    """Half a journal line is no event yet."""
    with run.path.open("a", encoding="utf-8") as file:
        file.write('{"stage": "prepare_data", "event": "sta')
    run.followed.end()
    with run.path.open("a", encoding="utf-8") as file:
        file.write('rted", "outputs": {"problems": "/p"}}\n')
    run.followed.end()
    assert run.followed.tasks[0].outputs == {"problems": Path("/p")}


@pytest.mark.parametrize(("seconds", "words"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (245, "4 min 05 s")])
def test_durations_read_well(seconds: float, words: str) -> None:
    """Seconds with a decimal up to a minute, then minutes and seconds."""
    assert duration(seconds) == words
