"""The runs whose results the docs quote: `recorded_runs.json` has the lines that they printed.

After a change of what a run computes, record them again on two cores, and correct the pages that a test then names:
python -m tests.recorded_runs
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components.shared.lineage import read
from tests.pipelines.project import FinishedRun, copy_project

RECORD = Path(__file__).with_suffix(".json")
PRESETS = {"laptop": "params.yaml", "tools": "params/tools.yaml"}


def make(preset: str, folder: Path) -> dict[str, Any]:
    """Run a preset with two threads; return its results and what decides how they are rounded."""
    project = copy_project(folder)
    process = project.start("run", "--params", PRESETS[preset], variables={"OMP_NUM_THREADS": "2"})
    run = FinishedRun.of(project, process, timeout_s=3000)
    assert run.exit_code == 0, run.printed + run.errors
    made_by = read(run.outputs["train_grpo"]["policy"])
    assert made_by
    environment = made_by.environment("train_grpo")
    assert environment
    return {"processor": environment.cpu, "torch": environment.packages["torch"], "results": results(run.printed)}


def results(printed: str) -> list[str]:
    """Return the printed lines that do not depend on speed, with single spaces: validations, last step, final table."""
    lines = [re.sub(r"\s+", " ", line.strip()) for line in printed.splitlines()]
    steps = [line for line in lines if re.match(r"step \d+: validation|(\d+)/\1 steps reward", line)]
    table = lines[lines.index("on held-out problems base SFT GRPO") :]
    end = next(number for number, line in enumerate(table) if line.startswith("report "))
    return [line.partition(" tokens per s")[0] for line in [*steps, *table[:end]] if line]


if __name__ == "__main__":
    for name in PRESETS:
        with TemporaryDirectory() as made_in:
            record = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
            record[name] = make(name, Path(made_in))
            RECORD.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
