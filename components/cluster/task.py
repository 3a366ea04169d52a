"""Runs a stage of several processes as a Kubeflow task: on this machine, or as a TrainJob."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.cluster.config import ClusterConfig, ClusterStage, on_cluster
from components.shared import task
from components.shared.config import validate
from components.shared.stage import Stage, exit_on_error
from components.shared.task import StageFolders, TaskResult


def run_task(
    stage: Stage,
    config: Mapping[str, Any],
    artifact: str,
    *,
    cluster: Mapping[str, Any],
    run_id: str,
    run_name: str = "",
    **inputs: str,
) -> TaskResult:
    """Run a stage as `task.run_task` does: its ranks on this machine if `cluster` is empty, otherwise as a TrainJob."""
    if not cluster:
        return task.run_task(stage, config, artifact, run_name=run_name, **inputs)
    with exit_on_error(stage.name):
        settings = validate(ClusterConfig, dict(cluster), name="cluster")
        job = StageFolders(Path(settings.mount), run_id, stage).own / "job"
        with on_cluster(ClusterStage(settings, run_id, stage.name, job, run_name)):
            # All folders are on the volume, which the pods of the job share.
            location = {"volume": settings.mount, "run_id": run_id, "run_name": run_name}
            return task.run_task(stage, config, artifact, **location, **inputs)
