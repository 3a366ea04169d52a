"""Plans against the step times that others have published (benchmarks/published.yaml)."""

from typing import Any

import pytest
import yaml

from components.shared.model_shape import KNOWN_MODELS, ModelShape
from pipelines.plan.hardware import gpu
from pipelines.plan.run import Run
from pipelines.plan.step_time import step_time
from tests.presets import ROOT

ROWS: list[dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks/published.yaml").read_text())["rows"]


def planned_s(row: dict[str, Any]) -> float:
    """The step time of a plan with the published settings."""
    name = row["model"]
    shape = KNOWN_MODELS[name] if isinstance(name, str) else ModelShape(**name)
    return step_time(Run(shape=shape, **row["run"]), gpu(row["gpu"])).total


def as_line(row: dict[str, Any]) -> str:
    """The row of the table in docs/scaling.md."""
    seconds, published = planned_s(row), row["published_s"]
    name = f"[{row['name']}]({row['source']}) | {row['run']['num_gpus']} {row['gpu'].upper()}"
    return f"| {name} | {published:,.0f} s | {seconds:,.0f} s | {seconds / published:.2f} |"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']} on {row['run']['num_gpus']} {row['gpu']}")
def test_published_steps_take_about_as_long(row: dict[str, Any]) -> None:
    """Within a factor of 2, and as docs/scaling.md says."""
    assert 0.5 < planned_s(row) / row["published_s"] < 2
    assert as_line(row) in (ROOT / "docs/scaling.md").read_text(), as_line(row)
