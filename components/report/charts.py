"""Charts as inline SVG: small, the same bytes every time, legible on light and dark pages."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from components.report.curves import Curve
from components.shared.page import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL_COLORS = {"base": "#8b93a1", "sft": "#4a8fd4", "grpo": "#e0803a"}
_SERIES_COLORS = ("#e0803a", "#4a8fd4", "#4aa36c")
PHASE_COLORS = ("#e0803a", "#4a8fd4", "#b56bc4", "#8b93a1", "#4aa36c", "#d9d9d9")
_TEXT = "#010203"
"""Stands for the color of the page's text while matplotlib draws; becomes `currentColor`."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo-pipeline",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _TEXT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "grid.color": "#88888840",
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "path.simplify": False,
}


def accuracy_chart(models: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Draw each model's accuracy by source with its 95 % interval; `models` holds a score per model and source."""
    sources = list(next(iter(models.values())))
    with _figure(width=max(7.6, 2.2 * len(sources) + 1.0), height=2.4) as (figure, axes):
        width = 0.8 / len(models)
        for place, (model, scores) in enumerate(models.items()):
            shift = (place - (len(models) - 1) / 2) * width
            for at, source in enumerate(sources):
                _bar(axes, at + shift, scores[source], width=width * 0.82, color=MODEL_COLORS[model])
                axes.text(at + shift, -4, names[model], ha="center", va="top", fontsize=7.5)
        axes.set_xticks(range(len(sources)), sources, fontsize=9.5, fontweight="bold")
        axes.tick_params(axis="x", length=0, pad=17)
        axes.set_xlim(-0.55, len(sources) - 0.45)
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        return _svg(figure, "Accuracy of each model by source, with 95 % intervals")


def _bar(axes: "Axes", at: float, score: Mapping[str, Any], *, width: float, color: str) -> None:
    accuracy, (low, high) = 100 * score["accuracy"], (100 * bound for bound in score["interval"])
    axes.bar(at, accuracy, width=width, color=color, alpha=0.85)
    axes.plot([at, at], [low, high], color=_TEXT, linewidth=1.1)
    axes.text(at, high + 2, percent(score["accuracy"]), ha="center", va="bottom", fontsize=9, fontweight="bold")


def line_chart(curves: Sequence[Curve], *, title: str, fraction: bool = False, from_zero: bool = False) -> str:
    """Draw curves over the steps: the running mean strong over the raw values."""
    scale = 100 if fraction else 1
    with _figure(width=3.4, height=1.9) as (figure, axes):
        for place, (line, color) in enumerate(zip(curves, _SERIES_COLORS, strict=False)):
            values = [scale * value for value in line.smoothed or line.values]
            if line.smoothed and not place:
                axes.plot(line.steps, [scale * y for y in line.values], color=color, linewidth=0.7, alpha=0.4)
            # A second curve is dashed: where two are one, both are still seen.
            style = {"linestyle": (0, (3, 2)), "linewidth": 1.3} if place else {"linewidth": 1.6}
            axes.plot(line.steps, values, color=color, marker="o" if len(values) == 1 else None, markersize=4, **style)
        if from_zero:
            axes.set_ylim(bottom=0)
        if fraction:
            axes.set_ylim(-4, 104)
            axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(axis="y")
        return _svg(figure, title)


def phase_chart(curves: Sequence[Curve]) -> str:
    """Draw the seconds of each phase over the steps, one upon the other."""
    with _figure(width=7.6, height=2.2) as (figure, axes):
        smoothed = [line.smoothed or line.values for line in curves]
        axes.stackplot(curves[0].steps, smoothed, colors=PHASE_COLORS[: len(curves)], alpha=0.85, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True, nbins=10)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("seconds", fontsize=8)
        axes.margins(x=0)
        return _svg(figure, "Seconds of each phase of a GRPO step")


def series_color(index: int) -> str:
    """The color in which `line_chart` draws its curve at `index`."""
    return _SERIES_COLORS[index]


@contextmanager
def _figure(*, width: float, height: float) -> "Iterator[tuple[Figure, Axes]]":
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _svg(figure: "Figure", title: str) -> str:
    """The figure as an element to stand inside HTML: no prolog, no namespaces, no fixed size, the page's own colors."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[a-z0-9.]+_\d+"', "", text)  # groups' names, the same in every figure of the page
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    text = re.sub(r"<svg [^>]*>", f'<svg class="chart" role="img" aria-label="{title}" {view.group()}>', text, count=1)
    text = text.replace("xlink:href", "href").replace(_TEXT, "currentColor").replace("'DejaVu Sans'", "sans-serif")
    return re.sub(r"\n\s*", "\n", text).strip()
