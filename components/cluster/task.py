"""Runs a stage of several processes as a Kubeflow task: here, or as a TrainJob with the stage's folders on a volume.

<mount>/grpo-pipeline/work/<stage>/<key>/        unfinished work, found again by what it is made from
<mount>/grpo-pipeline/<run id>/inputs/<digest>/  copies of inputs that are not on the volume
<mount>/grpo-pipeline/<run id>/<stage>/<output>/ outputs; models stay here and are passed on by reference
<mount>/grpo-pipeline/<run id>/<stage>/job/      logs, events and manifests of the stage's jobs
"""

import shutil
from collections.abc import Mapping
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


def run_task(
    stage: Stage, config: Mapping[str, Any], artifact: str, *, cluster: Mapping[str, Any], run_id: str, **inputs: str
) -> dict[str, float]:
    """Run a stage as a Kubeflow task, as `components.shared.stage.run_task` does.

    With an empty `cluster`, its ranks run here. Otherwise they are a TrainJob, everything lies on the shared volume,
    and the task's own folders get models by reference and copies of all else.
    """
    if not cluster:
        return stages.run_task(stage, config, artifact, **inputs)
    with exit_on_error(stage.name):
        cluster_config = validate(ClusterConfig, dict(cluster), name="cluster")
        settings = validate(stage.config, dict(config), name=stage.name)
        volume = StageFolders(Path(cluster_config.mount), run_id, stage)
        cluster_stage = ClusterStage(cluster_config, run_id, stage.name, volume.own / "job")
        paths = stages.task_folders(stage, artifact, inputs)
        stages.keep_files_in_group()
        return stages.with_retries(stage.name, lambda: _run_on_volume(stage, settings, cluster_stage, volume, paths))


def _run_on_volume(
    stage: Stage, config: Config, cluster: ClusterStage, volume: "StageFolders", folders: Mapping[str, Path]
) -> dict[str, float]:
    inputs = {name: volume.input(folders[name]) for name in stage.inputs}
    metrics = volume.finished(config, inputs)
    if metrics is None:
        on_volume = {**inputs, **{name: volume.own / name for name in stage.outputs}}
        with on_cluster(cluster):
            owner = f"run {cluster.run_id}"
            metrics = run(
                stage, config, on_volume, work_root=volume.work, owner=owner, before_publish=volume.write_metrics
            )
    else:
        say(stage.name, "was finished by an earlier attempt of this run")
    for name in stage.outputs:
        volume.pass_on(name, folders[name])
    return metrics


class StageFolders:
    """The folders of a stage of a run on the volume."""

    def __init__(self, mount: Path, run_id: str, stage: Stage) -> None:
        if not mount.is_dir():
            raise PipelineError(f"cluster.mount: {mount} does not exist; does this pod mount the shared volume?")
        self._mount, self._stage = mount, stage
        self._run = mount / "grpo-pipeline" / run_id
        self.own = self._run / stage.name
        """Folder for outputs and records of the stage."""
        self.work = mount / "grpo-pipeline" / "work"
        """Folder for the unfinished work of all runs."""
        self._metrics = self.own / "metrics.json"

    def input(self, path: Path) -> Path:
        """Return an input that is on the volume, or refers to a model there; otherwise a copy of it there."""
        if resolve_reference(path).resolve().is_relative_to(self._mount.resolve()):
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
        self.own.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(self._metrics, metrics)

    def finished(self, config: Config, inputs: Mapping[str, Path]) -> dict[str, float] | None:
        """Return the stage's metrics where all its outputs exist and are of the same work; None otherwise."""
        if not self._metrics.is_file():
            return None
        models = {name: resolve_reference(path) for name, path in inputs.items()}
        wanted = lineage.describe(self._stage.name, config.model_dump(mode="json"), models)
        made_by = [lineage.read(self.own / name) for name in self._stage.outputs]
        if not all(lineage.same_fingerprint(config, wanted, each) for each in made_by):
            return None
        metrics: dict[str, float] = jsonl.read_json(self._metrics)
        return metrics

    def pass_on(self, name: str, path: Path) -> None:
        """Give an output to Kubeflow: a model by reference, anything else as a copy."""
        if holds_model(self.own / name):
            write_reference(path, self.own / name)
        else:
            shutil.copytree(self.own / name, path, dirs_exist_ok=True)
