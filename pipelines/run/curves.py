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
"""One per curve: a plot has no more curves than these."""
_MAX_POINTS = 80
_ROWS, _LABEL_WIDTH = 12, 8
_WIDTH, _HEIGHT = 160, 36
"""Pixels of a plot in the index."""

Curve = Sequence[tuple[float, float]]
"""(step, value) points; a value is the mean over the steps since the point before."""


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Return the figures of each finished GRPO step of a run."""
    trained = run.stages.get("train_grpo")
    folders = [trained.outputs.get("training", Path()), (trained.work or Path()) / LIVE] if trained else []
    path = next((folder / STEPS for folder in folders if (folder / STEPS).is_file()), None)
    rows: list[dict[str, Any]] = []
    if path:
        with suppress(PipelineError):
            rows = [row for _, row in jsonl.read_rows(path)]
    return rows


def curve_of(rows: Sequence[Mapping[str, Any]], column: str) -> Curve:
    """Return a column of the steps in at most `_MAX_POINTS` points; empty if no step has it."""
    known = [(float(row["step"]), float(row[column])) for row in rows if row.get(column) is not None]
    count = min(_MAX_POINTS, len(known))
    parts = [
        known[first:stop] for first, stop in pairwise(len(known) * each // max(count, 1) for each in range(count + 1))
    ]
    return [(part[-1][0], fmean(value for _, value in part)) for part in parts]


def text_plot(curves: Mapping[str, Curve], width: int) -> list[Text]:
    """Return the lines of a plot of named curves over common axes, each drawn by its number, and a legend."""
    columns = max(16, width - _LABEL_WIDTH - 1)
    points = [point for each in curves.values() for point in each]
    if not points:
        return []
    last = max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    cells = [[(" ", "")] * columns for _ in range(_ROWS)]
    styles = dict(zip(curves, COLORS, strict=False))
    for number, (name, each) in enumerate(curves.items(), start=1):
        for step, value in each:
            row = round((high - value) / (high - low) * (_ROWS - 1)) if high > low else _ROWS // 2
            cells[row][round((columns - 1) * step / last)] = (str(number), styles[name])
    labels = {0: brief(high), _ROWS - 1: brief(low)}
    lines = [Text.assemble(f"{labels.get(at, ''):>{_LABEL_WIDTH}} ", *row) for at, row in enumerate(cells)]
    lines.append(Text(f"{'step':>{_LABEL_WIDTH}} {'0':<{columns - 8}}{last:>8g}"))
    legend = enumerate(curves, start=1)
    return [*lines, *(Text.assemble(" " * (_LABEL_WIDTH + 1), (f"{at} {name}", styles[name])) for at, name in legend)]


def svg_plot(curves: Mapping[str, Curve], label: str) -> Markup:
    """Return a plot of named curves, from 0 to 1 or to their largest value; pointing at a curve shows its name."""
    points = [point for each in curves.values() for point in each]
    last, top = max((step for step, _ in points), default=1.0), max([1.0, *(value for _, value in points)])
    lines = []
    for number, ((name, each), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
        places = " ".join(f"{_WIDTH * step / last:.1f},{_HEIGHT * (1 - max(0.0, at) / top):.1f}" for step, at in each)
        dashes = ' stroke-dasharray="4 3"' if number % 2 else ""  # where two curves coincide both are visible
        line = f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}>'
        lines.append(f"{line}<title>{escape(name)}</title></polyline>")
    axis = f'<path d="M0,0 V{_HEIGHT} H{_WIDTH}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
    view = f'viewBox="0 -4 {_WIDTH} {_HEIGHT + 8}" width="{_WIDTH}" style="max-width: 100%" role="img"'
    return Markup(f'<svg {view} aria-label="{escape(label)}">{axis}{"".join(lines)}</svg>')
