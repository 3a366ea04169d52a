"""Runs a stage of several processes as a Kubeflow task: here, or as a TrainJob with the stage's folders on a volume.

<mount>/grpo-pipeline/work/<stage>/<key>/        unfinished work, found again by what it is made from
<mount>/grpo-pipeline/<run id>/inputs/<digest>/  copies of inputs that are not on the volume
<mount>/grpo-pipeline/<run id>/<stage>/<output>/ outputs; models stay here and are passed on by reference
<mount>/grpo-pipeline/<run id>/<stage>/job/      logs, events and manifests of the stage's jobs
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.cluster.config import ClusterConfig, ClusterStage, on_cluster
from components.shared import jsonl, lineage
from components.shared import stage as stages
from components.shared.config import Config, validate
from components.shared.errors import PipelineError
from components.shared.model import holds_model, resolve_reference, write_reference
from components.shared.progress import say
from components.shared.stage import Stage, exit_on_error, run

_METRICS = "metrics.json"


def run_task(
    stage: Stage, config: Mapping[str, Any], *, cluster: Mapping[str, Any], run_id: str, **folders: str
) -> dict[str, float]:
    """Run a stage as a Kubeflow task: plain values in, metrics out, the exit code as from the command line.

    With an empty `cluster`, its ranks run here. Otherwise they are a TrainJob, everything lies on the shared volume,
    and the task's own folders get models by reference and copies of all else.
    """
    if not cluster:
        return stages.run_task(stage, config, **folders)
    with exit_on_error(stage.name):
        cluster_config = validate(ClusterConfig, dict(cluster), name="cluster")
        volume = StageFolders(Path(cluster_config.mount), run_id, stage.name)
        cluster_stage = ClusterStage(cluster_config, run_id, stage.name, volume.records)
        settings = validate(stage.config, dict(config), name=stage.name)
        paths = {name: Path(path) for name, path in folders.items()}
        stages.keep_files_in_group()
        return stages.with_retries(stage.name, lambda: _run_on_volume(stage, settings, cluster_stage, volume, paths))


def _run_on_volume(
    stage: Stage, config: Config, cluster: ClusterStage, volume: "StageFolders", folders: Mapping[str, Path]
) -> dict[str, float]:
    inputs = {name: volume.input(folders[name]) for name in stage.inputs}
    metrics = volume.finished(stage, config, {name: resolve_reference(path) for name, path in inputs.items()})
    if metrics is None:
        on_volume = {**inputs, **{name: volume.output(name) for name in stage.outputs}}
        with on_cluster(cluster):
            metrics = run(stage, config, on_volume, work_root=volume.work_root, before_publish=volume.write_metrics)
    else:
        say(stage.name, "was finished by an earlier attempt of this run")
    for name in stage.outputs:
        volume.pass_on(name, folders[name])
    return metrics


@dataclass(frozen=True)
class StageFolders:
    """The folders of a stage of a run on the volume."""

    mount: Path
    run_id: str
    stage: str

    def __post_init__(self) -> None:
        if not self.mount.is_dir():
            raise PipelineError(f"cluster.mount: {self.mount} does not exist; does this pod mount the shared volume?")

    @property
    def work_root(self) -> Path:
        """Folder for the unfinished work of all runs."""
        return self.mount / "grpo-pipeline" / "work"

    @property
    def records(self) -> Path:
        """Folder for the records of the stage's jobs."""
        return self._own / "job"

    @property
    def _run(self) -> Path:
        return self.mount / "grpo-pipeline" / self.run_id

    @property
    def _own(self) -> Path:
        return self._run / self.stage

    def output(self, name: str) -> Path:
        """Return the folder of an output."""
        return self._own / name

    def input(self, path: Path) -> Path:
        """Return an input that is on the volume, or refers to a model there; otherwise a copy of it there."""
        if resolve_reference(path).resolve().is_relative_to(self.mount.resolve()):
            return path
        copy = self._run / "inputs" / lineage.digest(path)[:16]
        if not copy.exists():
            partial = copy.with_name(f".{copy.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(path, partial)
            partial.rename(copy)
        return copy

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write the stage's metrics, before its outputs are in place."""
        self._own.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(self._own / _METRICS, metrics)

    def finished(self, stage: Stage, config: Config, inputs: dict[str, Path]) -> dict[str, float] | None:
        """Return the stage's metrics where all its outputs exist and are of the same work; None otherwise."""
        if not (self._own / _METRICS).is_file():
            return None
        wanted = lineage.describe(stage.name, config.model_dump(mode="json"), inputs)
        made_by = [lineage.read(self.output(name)) for name in stage.outputs]
        if not all(lineage.same_fingerprint(config, wanted, each) for each in made_by):
            return None
        metrics: dict[str, float] = jsonl.read_json(self._own / _METRICS)
        return metrics

    def pass_on(self, name: str, path: Path) -> None:
        """Give an output to Kubeflow: a model by reference, anything else as a copy."""
        output = self.output(name)
        if holds_model(output):
            write_reference(path, output)
        else:
            shutil.copytree(output, path, dirs_exist_ok=True)
