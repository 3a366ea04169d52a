"""What charts show: all of the data, with room around it."""

from unittest.mock import Mock

import pytest

from components.report import charts


@pytest.mark.parametrize(
    ("fraction", "values", "limits"),
    [(True, [0.2, 0.9], (-4, 104)), (True, [-0.3, 1.7], (-40, 180)), (False, [0.0, 0.0], (0, 1))],
)
def test_all_of_a_curve_is_within_its_axes(
    monkeypatch: pytest.MonkeyPatch, fraction: bool, values: list[float], limits: tuple[float, float]
) -> None:
    """A reward may be negative, and a line along the upper edge would be cut in half."""
    drawn = Mock()
    monkeypatch.setattr(charts, "_svg", drawn)
    steps = [{"step": step, "reward": value} for step, value in enumerate(values)]
    charts.curve_chart(steps, "Reward", {"reward": "reward"}, fraction=fraction)
    assert drawn.call_args.args[0].axes[0].get_ylim() == pytest.approx(limits)
