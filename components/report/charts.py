"""Charts as inline SVG: small, the same bytes every time, legible on light and dark pages."""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from components.shared import jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERIES_COLORS = ("#e0803a", "#4a8fd4", "#4aa36c")
_PHASE_COLORS = ("#e0803a", "#4a8fd4", "#b56bc4", "#8b93a1", "#4aa36c", "#c9b458", "#d9d9d9")
_MAX_POINTS = 400
"""Points of a curve; of more steps, means over neighbours are drawn."""
_MAX_STRIPS = 50
"""Strips over a chart, each with values that are shown when the pointer is on it."""
_POINTS_PER_INCH = 72
_MIN_SMOOTHED = 20
"""Number of steps from which a running mean is drawn over the noisy single values."""
_PHASES = {
    "sampling_s": "sampling",
    "scoring_s": "scoring",
    "sync_s": "weight sync",
    "reference_s": "reference",
    "update_s": "update",
    "validation_s": "validation",
    "other_s": "waiting and other",
}
_TEXT = "#010203"
"""Placeholder for the color of the page's text while matplotlib draws; becomes `currentColor`."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo-pipeline",
    "font.family": "DejaVu Sans",
    "font.size": 9.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width", "grid.linewidth"), 0.6),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "path.simplify"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "grid.color": "#88888840",
    "lines.solid_capstyle": "round",
}


class _Curve(NamedTuple):
    """One quantity over the optimizer steps, with at most `_MAX_POINTS` points."""

    name: str
    steps: list[float]
    values: list[float]

    @property
    def smoothed(self) -> list[float] | None:
        """Running mean over a tenth of the points, centered; None for a short curve."""
        if len(self.values) < _MIN_SMOOTHED:
            return None
        reach = len(self.values) // 20
        return [fmean(self.values[max(0, at - reach) : at + reach + 1]) for at in range(len(self.values))]


def curve_chart(
    steps: Sequence[Mapping[str, Any]], title: str, names: Mapping[str, str], *, fraction: bool = False
) -> tuple[Markup | None, list[tuple[str, str]]]:
    """Draw columns of the steps: running means, and thin raw values of the first column; fractions from 0 % to 100 %.

    `names` has each column's name in the legend. Return the chart, None if no step has any of the columns, and the
    legend of names and colors, empty for one column.
    """
    curves = _curves(steps, names)
    if not curves:
        return None, []
    scale = 100 if fraction else 1
    legend = [(curve.name, color) for curve, color in zip(curves, _SERIES_COLORS, strict=False)]
    with _figure() as (figure, axes):
        # All but the first curve are dashed, so that curves that coincide are visible.
        style: dict[str, Any] = {"linewidth": 1.6}
        for curve, (_, color) in zip(curves, legend, strict=True):
            if curve.smoothed and curve is curves[0]:
                axes.plot(curve.steps, [scale * y for y in curve.values], color=color, linewidth=0.7, alpha=0.4)
            values = [scale * value for value in curve.smoothed or curve.values]
            marker = "o" if len(values) == 1 else None
            axes.plot(curve.steps, values, color=color, marker=marker, markersize=4, **style)
            style = {"linestyle": (0, (3, 2)), "linewidth": 1.3}
        low, high = (-4, 104) if fraction else (0, 0)
        _fit(axes, low, high)
        _label(axes, percent=fraction)
        axes.grid(axis="y")
        chart = _svg(figure, title, curves, percent=fraction)
    return chart, (legend if len(names) > 1 else [])


def _fit(axes: Any, low: float, high: float) -> None:
    """Set the y axis to the range from `low` to `high`, extended to data outside of it, with a margin."""
    smallest, largest = axes.dataLim.intervaly
    margin = 0.05 * (max(largest, high) - min(smallest, low)) or 1.0  # 1 if all data are 0
    bottom = smallest - margin if smallest < low else low
    top = largest + margin if largest >= high else high
    axes.set_ylim(bottom, top)


def validation_chart(rows: Sequence[Mapping[str, Any]], title: str, policy_step: int) -> Markup:
    """Draw the accuracy of each validation with the band of its 95 % interval, and a dot at the step of the policy."""
    curve = _Curve("accuracy", [float(row["step"]) for row in rows], [row["accuracy"] for row in rows])
    low = [100 * row["interval"][0] for row in rows]
    high = [100 * row["interval"][1] for row in rows]
    color = _SERIES_COLORS[0]
    with _figure() as (figure, axes):
        axes.fill_between(curve.steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(curve.steps, [100 * value for value in curve.values], color=color, linewidth=1.6)
        for row in rows:
            if row["step"] == policy_step:
                accuracy = 100 * row["accuracy"]
                axes.plot(policy_step, accuracy, color=color, marker="o", markersize=6, markeredgecolor=_TEXT)
        axes.set_ylim(-4, 104)
        _label(axes, percent=True)
        axes.grid(axis="y")
        return _svg(figure, title, [curve], percent=True)


def phase_chart(timings: Path) -> dict[str, Any]:
    """Draw the seconds of each phase of the GRPO steps, from the output `timings` of train_grpo.

    Return the `chart`, each phase's color and share of the time by name, and the median time of a step in seconds.
    """
    rows = [row for _, row in jsonl.read_rows(timings / "timings.jsonl")]
    for row in rows:
        # Phases that overlap, as with prefetching, may add up to more than the step.
        row["other_s"] = max(0.0, row["step_s"] - sum(row.get(phase, 0.0) for phase in _PHASES))
    curves = _curves(rows, _PHASES)
    total = sum(sum(curve.values) for curve in curves)
    with _figure() as (figure, axes):
        values = [curve.smoothed or curve.values for curve in curves]
        axes.stackplot(curves[0].steps, values, colors=_PHASE_COLORS[: len(curves)], alpha=0.85, linewidth=0)
        _fit(axes, 0, 0)
        _label(axes)
        axes.set_ylabel("seconds")
        axes.margins(x=0)
        chart = _svg(figure, "Seconds of each phase of a GRPO step", curves)
    return {
        "chart": chart,
        "shares": {curve.name: sum(curve.values) / total for curve in curves},
        "colors": {curve.name: color for curve, color in zip(curves, _PHASE_COLORS, strict=False)},
        "step_s": median(row["step_s"] for row in rows),
    }


def _curves(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[_Curve]:
    """Return the curve of each column that any row has (KL is missing without a KL term); `names` by column."""
    curves = []
    for key, name in names.items():
        points = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
        if points:
            size = math.ceil(len(points) / _MAX_POINTS)
            bins = [points[start : start + size] for start in range(0, len(points), size)]
            steps = [fmean(step for step, _ in each) for each in bins]
            curves.append(_Curve(name, steps, [fmean(value for _, value in each) for each in bins]))
    return curves


def _label(axes: "Axes", *, percent: bool = False) -> None:
    """Label the axes: steps, and with `percent` every 25 % from 0 to 100."""
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_xlabel("step")
    if percent:
        axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])


@contextmanager
def _figure() -> "Iterator[tuple[Figure, Axes]]":
    """Yield a figure and its axes, in a size that gives text of 12 pixels in the page's narrowest column."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.2, 1.9), layout="constrained")
        yield figure, figure.add_subplot()


def _values_on_hover(figure: "Figure", curves: Sequence[_Curve], *, percent: bool) -> str:
    """Return SVG strips over the chart, transparent, one for each step or every few; tooltips have the values there."""
    axes, (width, height) = figure.axes[0], _POINTS_PER_INCH * figure.get_size_inches()
    left, right = axes.get_xlim()
    box = axes.get_position()  # in fractions of the figure, from its bottom left
    by_step: dict[float, list[str]] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            text = f"{100 * value:.1f} %" if percent else f"{value:.3g}"
            by_step.setdefault(step, []).append(f"{curve.name} {text}")
    steps = sorted(by_step)[:: math.ceil(len(by_step) / _MAX_STRIPS)]
    edges = [left, *((one + other) / 2 for one, other in pairwise(steps)), right]
    points_per_step = width * box.width / (right - left)
    strips = []
    for step, (start, end) in zip(steps, pairwise(edges), strict=True):
        x = width * box.x0 + points_per_step * (start - left)
        position = f'x="{x:.1f}" y="{height * (1 - box.y1):.1f}"'
        size = f'width="{points_per_step * (end - start):.1f}" height="{height * box.height:.1f}"'
        text = ", ".join(by_step[step])
        strips.append(f'<rect class="strip" {position} {size}><title>step {step:g}: {text}</title></rect>')
    return "\n".join(strips)


def _svg(figure: "Figure", title: str, curves: Sequence[_Curve], *, percent: bool = False) -> Markup:
    """Return the figure as an SVG element for HTML: without prolog, namespaces and fixed size, in the page's colors."""
    figure.draw_without_rendering()  # the first layout may change the ticks, and with them the size of the labels
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[a-z0-9.]+_\d+"', "", text)  # ids of groups, which would occur in every figure of the page
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    text = re.sub(r"<svg [^>]*>", f'<svg class="chart" role="img" aria-label="{title}" {view.group()}>', text, count=1)
    text = text.replace("xlink:href", "href").replace(_TEXT, "currentColor").replace("'DejaVu Sans'", "sans-serif")
    text = text.replace("</svg>", _values_on_hover(figure, curves, percent=percent) + "\n</svg>")
    return Markup(re.sub(r"\n\s*", "\n", text).strip())
