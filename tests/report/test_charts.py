"""What charts show: all of the data, with room around it."""

from collections.abc import Sequence
from typing import Any

import pytest

from components.report import charts


@pytest.mark.parametrize(
    ("fraction", "values", "expected"),
    [(True, [0.2, 0.9], (-4, 104)), (True, [-0.3, 1.7], None), (False, [0.0, 0.0], None)],
)
def test_all_of_a_curve_is_within_its_axes(
    monkeypatch: pytest.MonkeyPatch, fraction: bool, values: Sequence[float], expected: tuple[float, float] | None
) -> None:
    """A reward may be negative, and a line along the upper edge would be cut in half."""
    limits: list[tuple[float, float]] = []

    def keep(figure: Any, *_: object, **__: object) -> str:
        limits.append(figure.axes[0].get_ylim())
        return ""

    monkeypatch.setattr(charts, "_svg", keep)
    steps = [{"step": step, "reward": value} for step, value in enumerate(values)]
    charts.curve_chart(steps, "Reward", {"reward": "reward"}, fraction=fraction)
    ((low, high),) = limits
    scale = 100 if fraction else 1
    assert low <= scale * min(values)
    assert high > scale * max(values)
    assert expected in (None, (low, high))
