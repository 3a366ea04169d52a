"""How a run scales, drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.planning.scaling import Point


def draw(curves: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write efficiency over the number of GPUs, a line for each curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot([point.num_gpus for point in points], [point.efficiency for point in points], marker="o", label=label)
    axes.axhline(0.5, color="grey", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks([point.num_gpus for points in curves.values() for point in points])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, None)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("efficiency per GPU")
    axes.legend()
    figure.savefig(path)
