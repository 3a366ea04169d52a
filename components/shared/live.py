"""What a training shows while it goes on: `live/` in its folder of unfinished work, written by its main process.

run.json           name of the run, stage, number of steps; the task's run in MLflow, where Kubeflow has begun one
steps.jsonl        a line per finished step with its metrics and timings, None for what was not measured
completions.jsonl  completions sampled in these steps, with their rewards

Each step is there as soon as it is finished. A resumed training writes the files again as far as its checkpoint goes,
so that no step is missing and none is there twice.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.shared import jsonl
from components.shared.environment import (
    MLFLOW_RUN_VARIABLE,
    MLFLOW_URI_VARIABLE,
    MLFLOW_WORKSPACE_VARIABLE,
    POD_VARIABLE,
    RUN_NAME_VARIABLE,
)
from components.shared.journal import run_name

LIVE = "live"
RUN, STEPS, COMPLETIONS = "run.json", "steps.jsonl", "completions.jsonl"
FIRST_ROLLOUT = "first_rollout.txt"
"""Beside the curves of a training: what its first rollout said of whether the policy can learn."""

Row = Mapping[str, float | None]


def base_name(work: Path | None = None) -> str:
    """Return the name of the run that a folder of unfinished work belongs to, or of this run, without its time.

    Empty where nobody has named the run.
    """
    return re.sub(r"-?\d{8}T\d{6}Z-?", "", _name() if work is None else name_in(work))


def name_in(work: Path) -> str:
    """Return the name of the run that a folder of unfinished work belongs to; empty where nobody has named the run."""
    file = work / LIVE / RUN
    written = str(jsonl.read_json(file)["name"]) if file.is_file() else ""
    return "" if written.endswith(f"-{work.name}") else written


def _name() -> str:
    return run_name() or os.environ.get(RUN_NAME_VARIABLE, "")


def begin(work: Path, stage: str) -> None:
    """Write which run of which stage the folder of unfinished work belongs to; the stage's launcher knows that."""
    name = _name()
    names = (MLFLOW_RUN_VARIABLE, MLFLOW_URI_VARIABLE, MLFLOW_WORKSPACE_VARIABLE)
    mlflow = {each: os.environ[each] for each in names if each in os.environ}
    is_of_kubeflow = POD_VARIABLE in os.environ and {MLFLOW_RUN_VARIABLE, MLFLOW_URI_VARIABLE} <= mlflow.keys()
    (work / LIVE).mkdir(exist_ok=True)
    about = {"name": name or f"{stage}-{work.name}", "stage": stage, **({"mlflow": mlflow} if is_of_kubeflow else {})}
    jsonl.write_json(work / LIVE / RUN, about)


class LiveFiles:
    """The files of a training, as far as its steps are finished."""

    def __init__(self, work: Path, stage: str, num_steps: int) -> None:
        self._folder = work / LIVE
        if not (self._folder / RUN).is_file():
            begin(work, stage)
        about = jsonl.read_json(self._folder / RUN)
        self.name: str = about["name"]
        """That of the run."""
        self.mlflow: dict[str, str] = about.get("mlflow", {})
        """Environment variables about the run of the task in MLflow; none where Kubeflow has not begun one."""
        jsonl.write_json(self._folder / RUN, {**about, "stage": stage, "num_steps": num_steps})

    def restart(self, rows: Iterable[Row], completions: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines with those of the steps that a checkpoint holds."""
        for name, lines in ((STEPS, rows), (COMPLETIONS, completions)):
            partial = self._folder / f".{name}.partial"
            jsonl.write_rows(partial, map(dict, lines))
            partial.replace(self._folder / name)

    def append(self, row: Row, completions: Iterable[Mapping[str, Any]]) -> None:
        """Add a step that is finished; its completions come first, so that they are there when the step is."""
        for name, lines in ((COMPLETIONS, completions), (STEPS, [row])):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            if text:
                with (self._folder / name).open("a", encoding="utf-8") as file:
                    file.write(text)
