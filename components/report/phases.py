"""Where the time of a GRPO step goes: seconds of each phase over the steps, as one process sees them."""

from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from components.report.charts import PHASE_COLORS, phase_chart
from components.report.curves import curve
from components.shared import jsonl

_PHASES = {
    "sampling_s": "sampling",
    "scoring_s": "scoring",
    "sync_s": "weights to the sampler",
    "reference_s": "reference",
    "update_s": "update",
    "other_s": "waiting and the rest",
}


def phases(timings: Path) -> dict[str, Any]:
    """Return what the page shows of train_grpo's timings: the chart, and each phase's color and share of the time."""
    rows = [dict(row) for _, row in jsonl.read_rows(timings / "timings.jsonl")]
    for row in rows:
        # With sampling ahead, phases run beside one another: nothing may be left then.
        row["other_s"] = max(0.0, row["step_s"] - sum(row.get(phase, 0.0) for phase in _PHASES))
    curves = {name: line for phase, name in _PHASES.items() if (line := curve(rows, phase, name))}
    total = sum(sum(line.values) for line in curves.values())
    shares = {name: sum(line.values) / total for name, line in curves.items()}
    colors = dict(zip(curves, PHASE_COLORS, strict=False))
    chart = Markup(phase_chart(list(curves.values())))
    return {"chart": chart, "shares": shares, "colors": colors, "step_s": median(row["step_s"] for row in rows)}
