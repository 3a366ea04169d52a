"""Files to watch a training: `live/` in its folder of unfinished work, written by its main process.

run.json           name of the run, stage, number of steps; the task's MLflow run, if Kubeflow has started one
steps.jsonl        a line per finished step with its metrics and timings, null if not measured
completions.jsonl  logged completions of these steps, with their rewards

A resumed training rewrites the files up to its checkpoint, so that each step is there once.
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
"""File next to the metrics of a training: whether the policy can learn, judged by the first rollout."""

Row = Mapping[str, float | None]


def base_name(run: str) -> str:
    """Return the name of a run without its time of start."""
    return re.sub(r"-?\d{8}T\d{6}Z-?", "", run)


def name_in(work: Path) -> str:
    """Return the name of the run that owns a folder of unfinished work; empty if the run has no name."""
    file = work / LIVE / RUN
    name = str(jsonl.read_json(file)["name"]) if file.is_file() else ""
    return "" if name.endswith(f"-{work.name}") else name  # `begin` writes such a name for a run without one


def begin(work: Path, stage: str) -> None:
    """Write the run and the stage into the live files, from the environment variables of the stage's launcher."""
    name = run_name() or os.environ.get(RUN_NAME_VARIABLE) or f"{stage}-{work.name}"
    about: dict[str, Any] = {"name": name, "stage": stage}
    names = (MLFLOW_RUN_VARIABLE, MLFLOW_URI_VARIABLE, MLFLOW_WORKSPACE_VARIABLE)
    mlflow = {each: os.environ[each] for each in names if each in os.environ}
    if POD_VARIABLE in os.environ and {MLFLOW_RUN_VARIABLE, MLFLOW_URI_VARIABLE} <= mlflow.keys():
        about["mlflow"] = mlflow
    (work / LIVE).mkdir(exist_ok=True)
    jsonl.write_json(work / LIVE / RUN, about)


class LiveFiles:
    """The live files of a training."""

    def __init__(self, work: Path, stage: str, num_steps: int) -> None:
        self._folder = work / LIVE
        if not (self._folder / RUN).is_file():
            begin(work, stage)
        about = jsonl.read_json(self._folder / RUN)
        self.name: str = about["name"]
        """Name of the run."""
        self.mlflow: dict[str, str] = about.get("mlflow", {})
        """Environment variables of the task's MLflow run; empty if Kubeflow has not started one."""
        jsonl.write_json(self._folder / RUN, {**about, "stage": stage, "num_steps": num_steps})

    def restart(self, rows: Iterable[Row], completions: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines with those of the steps in a checkpoint."""
        for name, lines in ((STEPS, rows), (COMPLETIONS, completions)):
            partial = self._folder / f".{name}.partial"
            jsonl.write_rows(partial, map(dict, lines))
            partial.replace(self._folder / name)

    def append(self, row: Row, completions: Iterable[Mapping[str, Any]]) -> None:
        """Add a finished step; its completions are written first, so that a reader of the step finds them."""
        for name, lines in ((COMPLETIONS, completions), (STEPS, [row])):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            if text:
                with (self._folder / name).open("a", encoding="utf-8") as file:
                    file.write(text)
