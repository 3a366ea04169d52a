"""The live view of a training: what it shows, that it fits, and that it follows files as they grow."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from components.shared import durable
from components.shared.live import LIVE
from pipelines.run.watch import Training, _shortened_completion, completion_lines, sparkline, svg_plot, view, watch

NUM_STEPS = 8
ROWS = [
    {"step": step, "reward": step / 8, "kl": kl, "validation_accuracy": accuracy, "step_s": 2.0, "tokens_per_s": 1234.0}
    for step, kl, accuracy in ((1, None, None), (2, 0.02, None), (3, 0.03, None), (4, 0.04, 0.5))
]
COMPLETION = {
    **{"step": 4, "verdict": "right", "advantage": -0.71, "question": "Tom has 3 apples. " * 20},
    "completion": "3+5=8\n\x1b[2J\x07" + "and so on\n" * 60 + "#### 8",
    **{"reward": 1.2, "rewards": {"accuracy": [1.0], "length": [0.2]}},
}


def _append(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Unfinished work of which half of the steps are done."""
    folder = tmp_path / "work"
    _append(folder / LIVE / "run.json", {"name": "evening", "stage": "train_grpo", "num_steps": NUM_STEPS})
    _append(folder / LIVE / "steps.jsonl", *ROWS)
    _append(folder / LIVE / "completions.jsonl", COMPLETION)
    return folder


def _training(work: Path) -> Training:
    training = Training("train_grpo", work / LIVE)
    training.refresh()
    return training


def test_the_view_has_curves_the_time_left_and_a_completion(work: Path) -> None:
    """Each figure with its latest value; the completion with each of its rewards, its end rather than its middle."""
    lines = [line.plain for line in view(_training(work), 100, 30)]
    assert re.fullmatch(r"step 4/8  =+-+  50%  8.0 s left", lines[0])
    assert lines[1].split() == ["reward", "0.5", "▁▃▆█", "0.125", "to", "0.5"]
    assert re.split("  +", lines[2])[::3] == ["validation accuracy", "constant 0.5"]
    assert lines[6] == "step 4  right  reward 1.2  accuracy 1  length 0.2  advantage -0.71"
    assert lines[-1].endswith("#### 8")


@pytest.mark.parametrize(("width", "height"), [(200, 50), (79, 24), (31, 5), (35, 1)])
def test_the_view_fits_any_terminal(work: Path, width: int, height: int) -> None:
    """No line is too wide, there are not too many, and nothing in a completion is a command to the terminal."""
    lines = [line.plain for line in view(_training(work), width, height)]
    assert 0 < len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([0, 7, None, 3.5], 9, "▁█ ▅"),
        ([2, 2, 2], 9, "▄▄▄"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([0, None, None, None, 1, 1], 3, "▁ █"),
    ],
)
def test_a_curve_fits_its_width(values: list[float | None], width: int, curve: str) -> None:
    """Many values are averaged; where nothing was measured there is nothing."""
    assert sparkline(values, width) == curve
    assert 'points="80.0,0.0 160.0,36.0"' in svg_plot({"reward": [(1, 1.0), (2, -0.5)]}, "")


def test_files_are_followed_as_they_grow(work: Path) -> None:
    """Half a line waits; a file that a resumed training has replaced is read again; what is gone stays on view."""
    training, steps = _training(work), work / LIVE / "steps.jsonl"
    for text, num_rows in (('{"step": 5, "rew', 4), ('ard": 1}\n', 5)):
        with steps.open("a", encoding="utf-8") as file:
            file.write(text)
        training.refresh()
        assert len(training.rows) == num_rows
    _append(work / "new", *ROWS[:2])
    (work / "new").replace(steps)
    training.refresh()
    assert training.rows == ROWS[:2]
    durable.remove(work)
    training.refresh()
    assert training.rows == ROWS[:2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has begun to train."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/runs/20260102T030405Z-smoke"
    folder.mkdir(parents=True)
    _event(folder, "started", outputs={"training": str(folder / "training")})
    return folder


def _event(run: Path, event: str, **details: Any) -> None:
    _append(run / "journal.jsonl", {"stage": "train_grpo", "event": event, **details})


def test_a_run_is_followed_to_its_end(run: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step has one line, wherever it is read: while the run goes on, and from the outputs at its end."""
    lock = durable.lock_folder(run / "run.lock")
    steps = [{**row, "step": step} for step, row in zip((5, 6), ROWS, strict=False)]

    def finish() -> None:
        _append(run / "training" / "steps.jsonl", *ROWS, *steps)
        _append(run / "training" / "completions.jsonl", COMPLETION)
        durable.remove(work)
        _event(run, "finished")
        lock.release()

    moments: list[Callable[[], None]] = [
        lambda: _event(run, "work", folder=str(work)),
        lambda: _append(work / LIVE / "steps.jsonl", steps[0]),
        finish,
    ]
    watch("latest", sleep=lambda _: moments.pop(0)())
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "20260102T030405Z-smoke  train_grpo"
    assert [line.split()[1].split("/")[0] for line in lines] == ["1", "2", "3", "4", "5", "6"]
    assert lines[3] == "train_grpo 4/8  reward 0.5  validation accuracy 0.5  KL 0.04  tokens per s 1,234"
    assert last.startswith("20260102T030405Z-smoke: ")


def test_completions_are_shown_in_full(run: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With no command to the terminal; also of a run that has stopped."""
    _event(run, "work", folder=str(work))
    watch("smoke", completions=True)
    printed = capsys.readouterr().out
    assert "step 4  right  reward 1.2  accuracy 1  length 0.2  advantage -0.71" in printed
    assert printed.count("and so on\n") == 60
    assert "\x1b" not in printed


def test_what_an_environment_answers_is_set_apart() -> None:
    """Each turn of the model in full, without commands to the terminal; the short view has all as one text."""
    turns = [{"text": "```calculator\n3+5\n```\n", "observation": "8\n\x1b[2J"}, {"text": "#### 8", "observation": ""}]
    record = {**COMPLETION, "question": "3 and 5?", "completion": "(all turns)", "turns": turns}
    lines = [line.plain for line in completion_lines(record)]
    assert lines[1:] == ["3 and 5?", "```calculator", "3+5", "```", "  | 8", "  |  [2J", "#### 8"]
    assert [line.plain for line in _shortened_completion(record, 80)][-1] == "(all turns)"
