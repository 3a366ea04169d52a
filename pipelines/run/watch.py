"""The live view of a training: curves, figures, the time left and a sampled completion, from the files of the run.

`grpo-pipeline run` draws it at the end of its output on a terminal; `grpo-pipeline runs watch` draws it for any run.
Both read the files that the training writes (components/shared/live.py), or its outputs once it has ended.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.text import Text

from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.live import COMPLETIONS, LIVE, RUN, STEPS
from components.shared.progress import brief
from pipelines.run.history import StageRun, read_run, resolve
from pipelines.run.screen import Screen, Style, duration, printable

TRAININGS = ("train_sft", "train_grpo")
_SHOWN = {
    "reward": "reward",
    "accuracy": "accuracy",
    "validation_accuracy": "validation accuracy",
    "kl": "KL",
    "entropy": "entropy",
    "completion_length_tokens": "length in tokens",
    "tool_use_fraction": "tool use",
    "turns": "turns",
    "loss": "loss",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_s": "tokens per s",
}
"""Figures that have a curve, and their names for people."""
_BARS = "▁▂▃▄▅▆▇█"
_NAME_WIDTH, _VALUE_WIDTH, _RANGE_WIDTH, _WIDTH_WITH_RANGE = 21, 9, 22, 68
_STEPS_FOR_RATE = 20
"""Number of latest steps from which the time left is estimated."""
_COMPLETION_LINES = 4
_POLL_S = 0.5


class Training:
    """The steps and completions of a training, running or finished, in the folder of its files."""

    def __init__(self, stage: str, folder: Path) -> None:
        self.stage, self._folder = stage, folder
        self._files = _Lines(folder / STEPS), _Lines(folder / COMPLETIONS)
        self.rows, self.completions = (each.values for each in self._files)
        self._num_steps: int | None = None

    @property
    def num_steps(self) -> int | None:
        """Total steps; None before they are known, and for a finished training."""
        if self._num_steps is None:
            with suppress(PipelineError):
                self._num_steps = jsonl.read_json(self._folder / RUN).get("num_steps")
        return self._num_steps

    @property
    def seconds_left(self) -> float | None:
        """Time left, if the remaining steps take as long as the latest ones."""
        seconds = [row["step_s"] for row in self.rows[-_STEPS_FOR_RATE:] if row.get("step_s")]
        return fmean(seconds) * (self.num_steps - len(self.rows)) if seconds and self.num_steps else None

    def refresh(self) -> None:
        """Read new steps and completions."""
        for each in self._files:
            each.read()


class _Lines:
    """The objects in a growing file of JSON lines, which may be replaced or removed."""

    def __init__(self, path: Path) -> None:
        self.values: list[dict[str, Any]] = []
        self._path, self._place, self._inode = path, 0, 0

    def read(self) -> None:
        """Read the new complete lines; if the file was removed, the lines read before stay."""
        with suppress(FileNotFoundError, NotADirectoryError), self._path.open("rb") as file:
            inode = self._path.stat().st_ino
            if inode != self._inode:  # a resumed training has replaced it
                self.values.clear()
                self._place, self._inode = 0, inode
            file.seek(self._place)
            content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._place += len(complete)
            self.values += map(json.loads, complete.splitlines())


# Drawing --------------------------------------------------------------------------------------------------------------


def view(training: Training, width: int, height: int) -> list[Text]:
    """Return at most `height` lines about a training, up to `width` columns wide; empty before its first step."""
    rows, width = training.rows, max(width, _NAME_WIDTH + _VALUE_WIDTH)
    if not rows:
        return []
    lines = [_headline(training, width), *_curves(rows, width)]
    if training.completions and height - len(lines) > _COMPLETION_LINES:
        lines += [Text(), *completion_lines(training.completions[-1], width, _COMPLETION_LINES)]
    lines = lines[:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _headline(training: Training, width: int) -> Text:
    done, total, left = len(training.rows), training.num_steps, training.seconds_left
    line = Text(f"step {done}/{total}" if total else f"step {done}", Style.BOLD)
    if total and width >= 60:
        filled = round(20 * min(1.0, done / total))
        line.append("  ").append("=" * filled, Style.GREEN).append("-" * (20 - filled), Style.DIM)
    if total:
        line.append(f"  {done / total:.0%}")
    if left and done != total:
        line.append(f"  {duration(left)} left")
    return line


def _curves(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[Text]:
    """Yield a line for each figure: its name, its latest value, its curve, and its range if there is space."""
    has_range = width >= _WIDTH_WITH_RANGE
    curve_width = max(1, width - _NAME_WIDTH - _VALUE_WIDTH - has_range * _RANGE_WIDTH)
    for name, shown in _SHOWN.items():
        values = [row.get(name) for row in rows] if name in rows[-1] else []
        known = [value for value in values if value is not None]
        if not known or (name == "loss" and "reward" in rows[-1]):  # GRPO's loss says nothing about progress
            continue
        line = Text(f"{shown:<{_NAME_WIDTH}}{brief(known[-1]):<{_VALUE_WIDTH}}")
        line.append(sparkline(values, curve_width), Style.GREEN)
        if has_range:
            line.append(f"  {brief(min(known))} to {brief(max(known))}", Style.DIM)
        yield line


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve of at most `width` characters, each the mean of some values, or a space without values."""
    count = min(width, len(values))
    bounds = [len(values) * place // count for place in range(count + 1)]
    parts = [[value for value in values[start:stop] if value is not None] for start, stop in pairwise(bounds)]
    means = [fmean(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, span = min(known), max(known) - min(known)
    steps = len(_BARS) - 1
    return "".join(
        " " if mean is None else _BARS[round((mean - low) / span * steps) if span else steps // 2] for mean in means
    )


def completion_lines(record: Mapping[str, Any], width: int, height: int | None = None) -> list[Text]:
    """Return a completion with its problem and its rewards; in full without a `height`."""
    rewards = {name: [value for value in values if value is not None] for name, values in record["rewards"].items()}
    parts = [f"{name} {brief(sum(values))}" for name, values in rewards.items() if values and len(rewards) > 1]
    reward = "none" if record["reward"] is None else brief(record["reward"])
    style = Style.GREEN if record["verdict"] == "right" else Style.RED
    head = Text.assemble(f"step {record['step']}  ", (record["verdict"], style), f"  reward {reward}")
    head.append("".join(f"  {part}" for part in parts)).append(f"  advantage {record['advantage']:+.3g}")
    question, answer = (printable(record[name]) for name in ("question", "completion"))
    if height is None:
        answered = _conversation(record["turns"]) if record.get("turns") else map(Text, answer.split("\n"))
        return [head, *map(Text, question.split("\n")), *answered]
    question, answer = (" | ".join(filter(str.strip, text.split("\n"))) for text in (question, answer))
    room = (height - 2) * width
    answer = answer if len(answer) <= room else f"...{answer[3 - room :]}"  # the answer is at the end
    lines = [answer[start : start + width] for start in range(0, len(answer), width)]
    return [head, Text(question, Style.DIM), *map(Text, lines)]


def _conversation(turns: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield the lines of turns; those of the environment are indented and dim."""
    for turn in turns:
        yield from map(Text, printable(turn["text"]).strip("\n").split("\n"))
        if turn["observation"]:
            lines = printable(turn["observation"]).strip("\n").split("\n")
            yield from (Text(f"  | {line}", Style.DIM) for line in lines)


# The command ----------------------------------------------------------------------------------------------------------


def watch(
    run: str, *, plain: bool = False, completions: bool = False, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the trainings of a run until the run has ended."""
    folder, screen = resolve(run), Screen(sys.stdout, sys.stderr)
    shown: dict[str, _Shown] = {}
    try:
        while True:
            now = read_run(folder)
            assert now is not None  # resolve has found it
            is_running = now.is_running
            for stage in (now.stages[name] for name in TRAININGS if name in now.stages):
                if stage.name not in shown:
                    screen.show(Text(f"{now.name}  {stage.name}", Style.BOLD))
                    shown[stage.name] = _Shown(screen, plain=plain or not screen.live, completions=completions)
                shown[stage.name].update(stage, is_over=stage.finished is not None or not is_running)
            if not is_running:
                screen.show(f"{now.name}: {now.state}")
                return
            sleep(_POLL_S)
    finally:
        screen.draw([])


class _Shown:
    """A training on the screen, and how much of it has been shown."""

    def __init__(self, screen: Screen, *, plain: bool, completions: bool) -> None:
        self._screen, self._plain, self._with_completions = screen, plain, completions
        self._training: Training | None = None
        self._num_rows = self._num_completions = 0
        self._is_over = False

    def update(self, stage: StageRun, *, is_over: bool) -> None:
        """Show new steps and completions; when the training is over, its last view stays."""
        if self._is_over:
            return
        self._is_over = is_over
        if stage.finished is not None and stage.outputs:
            self._training = Training(stage.name, stage.outputs["training"])
        elif self._training is None and stage.work is not None:
            self._training = Training(stage.name, stage.work / LIVE)
        if self._training is None:
            return
        self._training.refresh()
        self._show_new(self._training)
        if not self._plain:
            lines = view(self._training, *self._screen.size)
            self._screen.draw([] if is_over else lines)
            for line in lines if is_over else ():
                self._screen.show(line)

    def _show_new(self, training: Training) -> None:
        if self._with_completions:
            for record in training.completions[self._num_completions :]:
                for line in completion_lines(record, self._screen.size[0]):
                    self._screen.show(line)
                self._screen.show()
        elif self._plain:
            for row in training.rows[self._num_rows :]:
                known = ((shown, row.get(name)) for name, shown in _SHOWN.items())
                figures = "  ".join(f"{shown} {brief(value)}" for shown, value in known if value is not None)
                of = f"/{training.num_steps}" if training.num_steps else ""
                self._screen.show(f"{training.stage} {row['step']}{of}  {figures}")
        self._num_completions, self._num_rows = len(training.completions), len(training.rows)
