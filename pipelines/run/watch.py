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

from markupsafe import Markup, escape
from rich.text import Text

from components.report.formatting import duration, value_range
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.live import COMPLETIONS, LIVE, RUN, STEPS
from components.shared.progress import brief
from pipelines.run.history import Run, StageRun, resolve
from pipelines.run.screen import Screen, Style, printable

TRAININGS = ("train_sft", "train_grpo")
_LABELS = {
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
"""Labels of the figures that have a curve, in order."""
_BARS = "▁▂▃▄▅▆▇█"
_NAME_WIDTH, _VALUE_WIDTH, _RANGE_WIDTH, _MIN_WIDTH_WITH_RANGE = 21, 9, 22, 68
_STEPS_FOR_RATE = 20  # number of latest steps from which the time left is estimated
_COMPLETION_LINES = 4
_POLL_S = 0.5
COLORS = ("#e0803a", "#4a8fd4", "#4aa36c", "#b56bc4", "#c9b458", "#8b93a1")
"""Colors of the curves in a plot, in order; a plot has at most as many curves."""
_MAX_POINTS = 80
_TEXT_ROWS, _LABEL_WIDTH = 12, 8
"""Height of a plot on a terminal, and width of the labels of its vertical axis, in characters."""
Curve = Sequence[tuple[float, float]]
"""(step, value) points; each value is the mean over the steps after the previous point."""


class Training:
    """The steps and completions of a training, running or finished, in the folder of its files."""

    def __init__(self, stage: str, folder: Path) -> None:
        self.stage, self._folder = stage, folder
        self._files = _Lines(folder / STEPS), _Lines(folder / COMPLETIONS)
        self.rows, self.completions = (each.values for each in self._files)  # lists that grow
        self._num_steps: int | None = None

    @property
    def num_steps(self) -> int | None:
        """Total steps; None before they are known, and for a finished training, whose outputs lack run.json."""
        if self._num_steps is None:
            with suppress(PipelineError):
                self._num_steps = jsonl.read_json(self._folder / RUN).get("num_steps")
        return self._num_steps

    @property
    def seconds_left(self) -> float | None:
        """Time left if the remaining steps take as long as the latest ones; None if it cannot be estimated."""
        seconds = [row["step_s"] for row in self.rows[-_STEPS_FOR_RATE:] if row.get("step_s")]
        if not seconds or self.num_steps is None:
            return None
        return fmean(seconds) * (self.num_steps - len(self.rows))

    def refresh(self) -> None:
        """Read new steps and completions."""
        for each in self._files:
            each.read()


class _Lines:
    """Reads a growing file of JSON lines, which may be replaced or removed."""

    def __init__(self, path: Path) -> None:
        self.values: list[dict[str, Any]] = []
        self._path, self._offset, self._inode = path, 0, 0

    def read(self) -> None:
        """Add the new complete lines to `values`; clear these first if the file was replaced, but not if it is gone."""
        with suppress(FileNotFoundError, NotADirectoryError), self._path.open("rb") as file:
            inode = self._path.stat().st_ino
            if inode != self._inode:  # a resumed training has replaced it
                self.values.clear()
                self._offset, self._inode = 0, inode
            file.seek(self._offset)
            content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._offset += len(complete)
            self.values += map(json.loads, complete.splitlines())


# Drawing --------------------------------------------------------------------------------------------------------------


def view(training: Training, width: int, height: int) -> list[Text]:
    """Return the progress, curves and latest completion of a training; no lines before its first step.

    There are at most `height` lines of `width` columns. In a terminal narrower than a figure they wrap.
    """
    if not training.rows:
        return []
    width = max(width, _NAME_WIDTH + _VALUE_WIDTH)
    lines = [_headline(training, width), *_curves(training.rows, width)]
    if training.completions and height - len(lines) > _COMPLETION_LINES:
        lines += [Text(), *_shortened_completion(training.completions[-1], width)]
    lines = lines[:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _headline(training: Training, width: int) -> Text:
    """Return the line with the number of finished steps, a bar if there is space, and the time left."""
    done, total, left_s = len(training.rows), training.num_steps, training.seconds_left
    if total is None:
        return Text(f"step {done}", Style.BOLD)
    line = Text(f"step {done}/{total}", Style.BOLD)
    if width >= 60:
        filled = round(20 * min(1.0, done / total))
        line.append("  ").append("=" * filled, Style.GREEN).append("-" * (20 - filled), Style.DIM)
    line.append(f"  {done / total:.0%}")
    if left_s and done != total:
        line.append(f"  {duration(left_s)} left")
    return line


def _curves(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[Text]:
    """Yield a line for each figure: its name, its latest value, its curve, and its range if there is space."""
    has_range = width >= _MIN_WIDTH_WITH_RANGE
    curve_width = max(1, width - _NAME_WIDTH - _VALUE_WIDTH - (_RANGE_WIDTH if has_range else 0))
    for name, label in _LABELS.items():
        values = [row.get(name) for row in rows] if name in rows[-1] else []
        numbers = [value for value in values if value is not None]
        if not numbers or (name == "loss" and "reward" in rows[-1]):  # GRPO's loss says nothing about progress
            continue
        line = Text(f"{label:<{_NAME_WIDTH}}{brief(numbers[-1]):<{_VALUE_WIDTH}}")
        line.append(sparkline(values, curve_width), Style.GREEN)
        if has_range:
            line.append(f"  {value_range(numbers)}", Style.DIM)
        yield line


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return at most `width` bars, each for the mean of some values; a space stands for values that are all None."""
    parts = [[value for value in part if value is not None] for part in chunks(values, width)]
    means = [fmean(part) if part else None for part in parts]
    measured = [mean for mean in means if mean is not None]
    low, span, highest_bar = min(measured), max(measured) - min(measured), len(_BARS) - 1
    curve = ""
    for mean in means:
        if mean is None:
            curve += " "
        else:
            curve += _BARS[round((mean - low) / span * highest_bar) if span else highest_bar // 2]
    return curve


def _shortened_completion(record: Mapping[str, Any], width: int) -> list[Text]:
    """Return `_COMPLETION_LINES` lines with the rewards, the question, and the end of a logged completion."""
    texts = (printable(record[key]).split("\n") for key in ("question", "completion"))
    question, answer = (" | ".join(filter(str.strip, lines)) for lines in texts)
    max_characters = (_COMPLETION_LINES - 2) * width
    if len(answer) > max_characters:
        answer = f"...{answer[3 - max_characters :]}"  # the final answer is at the end
    lines = [answer[start : start + width] for start in range(0, len(answer), width)]
    return [_rewards(record), Text(question, Style.DIM), *map(Text, lines)]


def completion_lines(record: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the rewards, question and answer of a logged completion; the environment's answers are indented and dim."""
    yield _rewards(record)
    yield from map(Text, printable(record["question"]).split("\n"))
    if not record.get("turns"):
        yield from map(Text, printable(record["completion"]).split("\n"))
        return
    for turn in record["turns"]:
        yield from map(Text, printable(turn["text"]).strip("\n").split("\n"))
        if turn["observation"]:
            lines = printable(turn["observation"]).strip("\n").split("\n")
            yield from (Text(f"  | {line}", Style.DIM) for line in lines)


def _rewards(record: Mapping[str, Any]) -> Text:
    """Return a line with the step, verdict, reward, its parts if there are several, and advantage of a completion."""
    reward = "none" if record["reward"] is None else brief(record["reward"])
    style = Style.GREEN if record["verdict"] == "right" else Style.RED
    line = Text.assemble(f"step {record['step']}  ", (record["verdict"], style), f"  reward {reward}")
    if len(record["rewards"]) > 1:
        for name, values in record["rewards"].items():  # a value for each step that is rewarded
            numbers = [value for value in values if value is not None]
            if numbers:
                line.append(f"  {name} {brief(sum(numbers))}")
    return line.append(f"  advantage {record['advantage']:+.3g}")


# The command ----------------------------------------------------------------------------------------------------------


def watch(
    name: str, *, plain: bool = False, completions: bool = False, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the trainings of a run until it ends; with `plain` a line per step, with `completions` every completion."""
    screen, run = Screen(sys.stdout, sys.stderr), resolve(name)
    displays: dict[str, _Display] = {}
    try:
        while True:
            for stage in (run.stages[each] for each in TRAININGS if each in run.stages):
                if stage.name not in displays:
                    source = f", from {stage.reused_from}" if stage.reused_from else ""
                    screen.show(Text(f"{run.name}  {stage.name}{source}", Style.BOLD))
                    displays[stage.name] = _Display(screen, plain=plain or not screen.live, completions=completions)
                displays[stage.name].update(stage, has_ended=stage.finished is not None or not run.is_running)
            if not run.is_running:
                screen.show(f"{run.name}: {run.state}")
                return
            sleep(_POLL_S)
            run = resolve(run.name)
    finally:
        screen.draw([])


class _Display:
    """Shows a training on the screen, and remembers what it has shown."""

    def __init__(self, screen: Screen, *, plain: bool, completions: bool) -> None:
        self._screen, self._plain, self._with_completions = screen, plain, completions
        self._training: Training | None = None
        self._num_rows = self._num_completions = 0
        self._has_ended = False

    def update(self, stage: StageRun, *, has_ended: bool) -> None:
        """Show new steps and completions; when the training has ended, its last view stays on the screen."""
        if self._has_ended:
            return
        self._has_ended = has_ended
        if stage.finished is not None and stage.outputs:
            self._training = Training(stage.name, stage.outputs["training"])
        elif self._training is None and stage.work is not None:
            self._training = Training(stage.name, stage.work / LIVE)
        if self._training is None:
            return
        self._training.refresh()
        self._show_new(self._training)
        if self._plain:
            return
        lines = view(self._training, *self._screen.size)
        if not has_ended:
            self._screen.draw(lines)
            return
        self._screen.draw([])
        for line in lines:
            self._screen.show(line)

    def _show_new(self, training: Training) -> None:
        """Print the new completions, or else a line for each new step if no view is drawn."""
        if self._with_completions:
            for record in training.completions[self._num_completions :]:
                for line in completion_lines(record):
                    self._screen.show(line)
                self._screen.show()
        elif self._plain:
            for row in training.rows[self._num_rows :]:
                known = ((label, row.get(name)) for name, label in _LABELS.items())
                figures = "  ".join(f"{label} {brief(value)}" for label, value in known if value is not None)
                total = "" if training.num_steps is None else f"/{training.num_steps}"
                self._screen.show(f"{training.stage} {row['step']}{total}  {figures}")
        self._num_completions, self._num_rows = len(training.completions), len(training.rows)


# Curves of several runs, on a terminal and as SVG ---------------------------------------------------------------------


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Return the figures of each finished GRPO step of a run; empty if there are none or their file is damaged."""
    stage = run.stages.get("train_grpo")
    if stage is None:
        return []
    # The output of a finished training, or the live files of an unfinished one.
    for folder in filter(None, (stage.outputs.get("training"), stage.work and stage.work / LIVE)):
        with suppress(PipelineError):
            return [row for _, row in jsonl.read_rows(folder / STEPS)]
    return []


def curve_of(steps: Sequence[Mapping[str, Any]], column: str) -> Curve:
    """Return the values of a column, averaged to at most `_MAX_POINTS` points; empty if no step has the column."""
    points = [(float(row["step"]), float(row[column])) for row in steps if row.get(column) is not None]
    return [(part[-1][0], fmean(value for _, value in part)) for part in chunks(points, _MAX_POINTS)]


def chunks(values: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return the values in `count` consecutive parts of about equal length, or in fewer if there are fewer values."""
    count = min(count, len(values))
    bounds = [len(values) * part // count for part in range(count + 1)] if count else []
    return [values[start:stop] for start, stop in pairwise(bounds)]


def text_plot(curves: Mapping[str, Curve], width: int, to_text: Callable[[float], str]) -> list[Text]:
    """Return the lines of a legend, and of a plot that draws each curve with its number; empty without points."""
    columns = max(16, width - _LABEL_WIDTH - 1)
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return []
    last_step = max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    cells = [[(" ", "")] * columns for _ in range(_TEXT_ROWS)]
    legend = []
    for number, ((name, curve), color) in enumerate(zip(curves.items(), COLORS, strict=False), start=1):
        legend.append(Text.assemble(" " * (_LABEL_WIDTH + 1), (f"{number} {name}", color)))
        for step, value in curve:
            row = round((high - value) / (high - low) * (_TEXT_ROWS - 1)) if high > low else _TEXT_ROWS // 2
            column = round((columns - 1) * step / last_step)
            cells[row][column] = (str(number), color) if cells[row][column][0] in (" ", str(number)) else ("*", "")
    if any(cell[0] == "*" for row in cells for cell in row):
        legend.append(Text(" " * (_LABEL_WIDTH + 1) + "* several curves"))
    labels = {0: to_text(high), _TEXT_ROWS - 1: to_text(low)} if high > low else {_TEXT_ROWS // 2: to_text(high)}
    lines = [Text.assemble(f"{labels.get(row, ''):>{_LABEL_WIDTH}} ", *line) for row, line in enumerate(cells)]
    axis = Text(f"{'step':>{_LABEL_WIDTH}} {'0':<{columns - 8}}{last_step:>8g}")
    return [*legend, *lines, axis]


def svg_plot(curves: Mapping[str, Curve], label: str) -> Markup:
    """Return an SVG plot of named curves, which shows a curve's name on hover.

    Its vertical axis begins at 0 or below and ends at 1 or above; the horizontal axis is at 0.
    """
    width, height = 160, 36
    points = [point for curve in curves.values() for point in curve]
    last_step = max(step for step, _ in points)
    low, high = min(0.0, *(value for _, value in points)), max(1.0, *(value for _, value in points))
    zero = height * high / (high - low)
    lines = []
    for number, ((name, curve), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
        pixels = ((width * step / last_step, height * (high - value) / (high - low)) for step, value in curve)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        dashes = ' stroke-dasharray="4 3"' if number % 2 else ""  # of two curves that coincide, both are visible
        line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}>'
        lines.append(f"{line}<title>{escape(name)}</title></polyline>")
    axis = f'<path d="M0,0 V{height} M0,{zero:.1f} H{width}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
    view = f'viewBox="0 -4 {width} {height + 8}" width="{width}" style="max-width: 100%" role="img"'
    return Markup(f'<svg {view} aria-label="{escape(label)}">{axis}{"".join(lines)}</svg>')
