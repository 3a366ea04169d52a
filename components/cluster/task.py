"""How a stage of several processes runs as a Kubeflow task: here, or as a job of its own on the cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.cluster.cluster import Cluster, active
from components.cluster.config import ClusterConfig
from components.cluster.volume import StageFolders
from components.shared import lineage, task
from components.shared.config import Config, validate
from components.shared.model import resolve_reference
from components.shared.progress import say
from components.shared.stage import Stage, exit_on_error, run


def run_task(
    stage: Stage, config: Mapping[str, Any], *, cluster: Mapping[str, Any], run_id: str, **folders: str
) -> dict[str, float]:
    """Run a stage as a Kubeflow task: plain values in, metrics out, the exit code as from the command line.

    With an empty `cluster` its ranks run here. Otherwise they are a job on the cluster, everything lies on the volume
    that they share, and the task's own folders get models by reference and copies of all else.
    """
    if not cluster:
        return task.run_task(stage, config, **folders)
    with exit_on_error(stage.name):
        wanted = validate(ClusterConfig, dict(cluster), name="cluster")
        place = StageFolders(Path(wanted.mount), run_id, stage.name)
        there = Cluster(wanted, run_id, stage.name, place.records)
        settings = validate(stage.config, dict(config), name=stage.name)
        paths = {name: Path(path) for name, path in folders.items()}
        task.keep_files_in_group()
        return task.with_retries(stage.name, lambda: _on_volume(stage, settings, there, place, paths))


def _on_volume(
    stage: Stage, config: Config, cluster: Cluster, place: StageFolders, folders: Mapping[str, Path]
) -> dict[str, float]:
    inputs = {name: place.input(folders[name]) for name in stage.inputs}
    read = {name: resolve_reference(path) for name, path in inputs.items()}
    metrics = place.finished(
        stage.outputs, config, lambda: lineage.describe(stage.name, config.model_dump(mode="json"), read)
    )
    if metrics is None:
        on_volume = {**inputs, **{name: place.output(name) for name in stage.outputs}}
        with active(cluster):
            metrics = run(stage, config, on_volume, work_root=place.work_root, before_publish=place.keep_metrics)
    else:
        say(stage.name, "has been finished before, by an earlier attempt of this run")
    for name in stage.outputs:
        place.hand_over(name, folders[name])
    return metrics
