"""A stage's folders on the volume that a cluster's pods share.

<mount>/grpo-pipeline/work/<stage>/<key>/        unfinished work, found again by what it is made from
<mount>/grpo-pipeline/<run id>/inputs/<digest>/  inputs that came from elsewhere
<mount>/grpo-pipeline/<run id>/<stage>/<output>/ outputs; models stay here and are passed on by reference
<mount>/grpo-pipeline/<run id>/<stage>/job/      logs, events and manifests of the stage's jobs
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared import jsonl, lineage
from components.shared.config import Config
from components.shared.errors import PipelineError
from components.shared.lineage import same_fingerprint
from components.shared.model import holds_model, resolve_reference, write_reference

_METRICS = "metrics.json"


@dataclass(frozen=True)
class StageFolders:
    """Where a stage of a run has its folders."""

    mount: Path
    run_id: str
    stage: str

    def __post_init__(self) -> None:
        if not self.mount.is_dir():
            raise PipelineError(f"cluster.mount: {self.mount} is not there; does this pod mount the shared volume?")

    @property
    def work_root(self) -> Path:
        """Of the unfinished work of all runs."""
        return self.mount / "grpo-pipeline" / "work"

    @property
    def records(self) -> Path:
        """For what is kept of the stage's jobs."""
        return self._own / "job"

    @property
    def _run(self) -> Path:
        return self.mount / "grpo-pipeline" / self.run_id

    @property
    def _own(self) -> Path:
        return self._run / self.stage

    def output(self, name: str) -> Path:
        """Return where an output is made."""
        return self._own / name

    def input(self, given: Path) -> Path:
        """Return an input that is on the volume, or is a reference to what is; else a copy of it there."""
        if resolve_reference(given).resolve().is_relative_to(self.mount.resolve()):
            return given
        place = self._run / "inputs" / lineage.digest(given)[:16]
        if not place.exists():
            aside = place.with_name(f".{place.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(given, aside)
            aside.rename(place)
        return place

    def keep_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write down what the stage has returned: before its outputs stand."""
        self._own.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(self._own / _METRICS, metrics)

    def finished(
        self, outputs: Sequence[str], config: Config, made_by: Callable[[], Mapping[str, Any]]
    ) -> dict[str, float] | None:
        """Return what the stage has returned, where its outputs stand and are of the same work; None otherwise."""
        if not (self._own / _METRICS).is_file():
            return None
        wanted = made_by()
        if not all(same_fingerprint(config, wanted, lineage.read(self.output(name))) for name in outputs):
            return None
        metrics: dict[str, float] = jsonl.read_json(self._own / _METRICS)
        return metrics

    def hand_over(self, name: str, path: Path) -> None:
        """Give an output to Kubeflow: a model by reference, all else as a copy."""
        made = self.output(name)
        if holds_model(made):
            write_reference(path, made)
        else:
            shutil.copytree(made, path, dirs_exist_ok=True)
