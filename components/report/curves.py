"""The curves of a training run: read from its steps, thinned to what a page can carry."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from components.shared import jsonl

_MAX_POINTS = 400
_SMOOTHED_FROM = 20
"""Steps from which single ones are noise to the eye and a running mean is drawn over them."""


@dataclass(frozen=True)
class Curve:
    """One quantity over the optimizer steps."""

    name: str
    steps: list[float]
    values: list[float]

    @property
    def smoothed(self) -> list[float] | None:
        """Centered running mean; None for a curve too short to need one."""
        if len(self.values) < _SMOOTHED_FROM:
            return None
        reach = max(1, len(self.values) // 20)
        return [fmean(self.values[max(0, at - reach) : at + reach + 1]) for at in range(len(self.values))]


def read_steps(training: Path) -> list[dict[str, Any]]:
    """Return the optimizer steps that a training stage recorded."""
    return [row for _, row in jsonl.read_rows(training / "steps.jsonl")]


def curve(steps: Sequence[dict[str, Any]], key: str, name: str) -> Curve | None:
    """Return one quantity; None where no step recorded it (KL without a KL term, for one)."""
    points = [(float(row["step"]), float(row[key])) for row in steps if row.get(key) is not None]
    if not points:
        return None
    bins = _bins(points)
    return Curve(name, [fmean(step for step, _ in part) for part in bins], [fmean(y for _, y in part) for part in bins])


def _bins(points: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    size = -(-len(points) // _MAX_POINTS)
    return [points[start : start + size] for start in range(0, len(points), size)]
