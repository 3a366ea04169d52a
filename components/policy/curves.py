"""The curves of a training run: one row per step, as JSON lines for programs and as CSV for plots."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.shared import jsonl


def write_curves(folder: Path, rows: Sequence[Mapping[str, float | None]]) -> None:
    """Write steps.jsonl and curves.csv; all rows have the same columns, None where nothing was measured."""
    jsonl.write_rows(folder / "steps.jsonl", (dict(row) for row in rows))
    with (folder / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
