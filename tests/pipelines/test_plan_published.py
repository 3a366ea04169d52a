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
TRUSTED = 1.5
"""The factor where all lengths are published."""


def planned_s(row: dict[str, Any]) -> float:
    """The step time of a plan with the published settings."""
    name = row["model"]
    shape = KNOWN_MODELS[name] if isinstance(name, str) else ModelShape(**name)
    return step_time(Run(shape=shape, **row["run"]), gpu(row["gpu"])).total


def as_line(row: dict[str, Any]) -> str:
    """The row of the table in docs/scaling.md."""
    seconds, published = planned_s(row), row["published_s"]
    cells = [f"[{row['name']}]({row['source']})", f"{row['run']['num_gpus']} {row['gpu'].upper()}"]
    cells += [
        f"{published:,.0f} s",
        f"{seconds:,.0f} s",
        f"{seconds / published:.2f}",
        "yes" if row.get("chose") else "",
    ]
    return f"| {' | '.join(cells if row['within'] == TRUSTED else cells[:-1])} |"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']} on {row['run']['num_gpus']} {row['gpu']}")
def test_published_steps_take_about_as_long(row: dict[str, Any]) -> None:
    """Within 1.5 where the lengths of completions are published, else within the factor that the page states."""
    assert row["published_s"] / row["within"] < planned_s(row) < row["published_s"] * row["within"]


def test_enough_rows_are_held_to_the_small_factor() -> None:
    """From three trainers; of these rows only two were looked at when the constants were chosen."""
    trusted = [row for row in ROWS if row["within"] == TRUSTED]
    assert {row["name"].split()[0].rstrip(",") for row in trusted} == {"verl", "NeMo", "OpenRLHF"}
    assert len(trusted) >= 6
    assert sum(bool(row.get("chose")) for row in ROWS) == 2


def test_the_page_has_the_figures_of_today() -> None:
    """Each row as it is computed."""
    page = (ROOT / "docs/scaling.md").read_text()
    for row in ROWS:
        assert as_line(row) in page, as_line(row)
