"""How a stage of several processes runs as a Kubeflow task: here, or as a job of its own on the cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.cluster.cluster import Cluster, active
from components.cluster.config import ClusterConfig
from components.cluster.volume import StageFolders
from components.shared import lineage, step
from components.shared.config import Config, validate
from components.shared.model_reference import followed
from components.shared.pod import keep_files_in_group
from components.shared.progress import say
from components.shared.retries import with_retries
from components.shared.step import Step


def run_task(
    stage: Step, section: str, config: Mapping[str, Any], *, cluster: Mapping[str, Any], run_id: str, **folders: str
) -> dict[str, float]:
    """Run a stage as a Kubeflow task: plain values in, metrics out, the exit code as from the command line.

    With an empty `cluster` its ranks run here. Otherwise they are a job on the cluster, everything lies on the volume
    that they share, and the task's own folders get models by reference and copies of all else.
    """
    if not cluster:
        return step.run_task(stage, section, config, **folders)
    with step.errors_in_one_line(section):
        wanted = validate(ClusterConfig, dict(cluster), name="cluster")
        place = StageFolders(Path(wanted.mount), run_id, section)
        there = Cluster(wanted, run_id, section, place.records)
        settings = validate(step.config_type(stage), dict(config), name=section)
        paths = {name: Path(path) for name, path in folders.items()}
        keep_files_in_group()
        return with_retries(section, lambda: _on_volume(stage, section, settings, there, place, paths))


def _on_volume(
    stage: Step, section: str, config: Config, cluster: Cluster, place: StageFolders, folders: Mapping[str, Path]
) -> dict[str, float]:
    kinds = step.kinds_of(stage)
    outputs = [name for name in folders if kinds[name] == "output"]
    inputs = {name: place.input(path) for name, path in folders.items() if kinds[name] == "input"}
    read = {name: followed(path) for name, path in inputs.items()}
    metrics = place.finished(outputs, config, lambda: lineage.describe(section, config.model_dump(mode="json"), read))
    if metrics is None:
        on_volume = {**inputs, **{name: place.output(name) for name in outputs}}
        with active(cluster):
            metrics = step.run(
                stage,
                section,
                config,
                on_volume,
                work_root=place.work_root,
                before_outputs_stand=place.keep_metrics,
            )
    else:
        say(section, "has been finished before, by an earlier attempt of this run")
    for name in outputs:
        place.hand_over(name, folders[name])
    return metrics
