"""The curves of several runs in one plot: on a terminal, and as SVG for the index."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup, escape
from rich.text import Text

from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.live import LIVE, STEPS
from components.shared.progress import brief
from pipelines.run.history import Run

COLORS = ("#e0803a", "#4a8fd4", "#4aa36c", "#b56bc4", "#c9b458", "#8b93a1")
"""Colors of the curves in a plot, in order; a plot has at most as many curves."""
_MAX_POINTS = 80
_TEXT_ROWS, _LABEL_WIDTH = 12, 8
"""Height of a plot on a terminal, and width of the labels of its vertical axis, in characters."""
Curve = Sequence[tuple[float, float]]
"""(step, value) points; each value is the mean over the steps after the previous point."""


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Return the figures of each finished GRPO step of a run; empty if there are none or their file is damaged."""
    stage = run.stages.get("train_grpo")
    if stage is None:
        return []
    # The output of a finished training, or the live files of an unfinished one.
    for folder in (stage.outputs.get("training", Path()), (stage.work or Path()) / LIVE):
        if (folder / STEPS).is_file():
            with suppress(PipelineError):
                return [row for _, row in jsonl.read_rows(folder / STEPS)]
            return []
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


def text_plot(curves: Mapping[str, Curve], width: int) -> list[Text]:
    """Return the lines of a plot, which draws each curve with its number, and of a legend; empty without points."""
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
            cells[row][round((columns - 1) * step / last_step)] = (str(number), color)
    labels = {0: brief(high), _TEXT_ROWS - 1: brief(low)}
    lines = [Text.assemble(f"{labels.get(row, ''):>{_LABEL_WIDTH}} ", *line) for row, line in enumerate(cells)]
    axis = Text(f"{'step':>{_LABEL_WIDTH}} {'0':<{columns - 8}}{last_step:>8g}")
    return [*lines, axis, *legend]


def svg_plot(curves: Mapping[str, Curve], label: str) -> Markup:
    """Return an SVG plot of named curves, which shows a curve's name on hover; its vertical axis ends at 1 or above."""
    width, height = 160, 36
    points = [point for curve in curves.values() for point in curve]
    last_step = max(step for step, _ in points)
    top = max(1.0, *(value for _, value in points))
    lines = []
    for number, ((name, curve), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
        pixels = ((width * step / last_step, height * (1 - max(0.0, value) / top)) for step, value in curve)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        dashes = ' stroke-dasharray="4 3"' if number % 2 else ""  # of two curves that coincide, both are visible
        line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}>'
        lines.append(f"{line}<title>{escape(name)}</title></polyline>")
    axis = f'<path d="M0,0 V{height} H{width}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
    view = f'viewBox="0 -4 {width} {height + 8}" width="{width}" style="max-width: 100%" role="img"'
    return Markup(f'<svg {view} aria-label="{escape(label)}">{axis}{"".join(lines)}</svg>')
