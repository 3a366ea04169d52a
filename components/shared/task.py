"""Runs a stage as a Kubeflow task, in a separate folder or on the volume that the tasks of a run share.

<volume>/grpo-pipeline/work/<stage>/<key>/         unfinished work; the key is a digest of inputs, config and code
<volume>/grpo-pipeline/<run id>/inputs/<digest>/   copies of inputs that are not on the volume
<volume>/grpo-pipeline/<run id>/<stage>/<output>/  outputs
<volume>/grpo-pipeline/<run id>/<stage>/passed_on/ inputs of other tasks: references to models, copies of all else
<volume>/grpo-pipeline/<run id>/<stage>/job/       logs, events and manifests of the stage's jobs

`components.cluster.collector` removes old folders that are not in use.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from components.shared import durable, lineage
from components.shared.config import Config, validate
from components.shared.environment import POD_VARIABLE, RUN_NAME_VARIABLE
from components.shared.errors import PipelineError
from components.shared.model import holds_model, resolve_reference, write_reference
from components.shared.stage import Reuse, Stage, exit_on_error, keep_files_in_group, run, with_retries


class TaskResult(NamedTuple):
    """The outputs of a task."""

    metrics: dict[str, float]
    folder: str
    """Folder with a folder for each output of the stage, by its name."""
    inputs: dict[str, str]
    """Folders of the inputs for other tasks, by their names."""


def run_task(
    stage: Stage,
    config: Mapping[str, Any],
    artifact: str,
    *,
    volume: str = "",
    run_id: str = "",
    run_name: str = "",
    **inputs: str,
) -> TaskResult:
    """Run a stage as a Kubeflow task: plain values in and out, exit codes as on the command line.

    The folder `artifact` gets a folder for each output, with models by reference. Outputs are made below `volume`, the
    mount point of the shared volume; without one, the tasks share the file system of `artifact`. `run_id` names the
    run's folders there, and `run_name` the run in logs, trackers and the registry.
    """
    os.environ[RUN_NAME_VARIABLE] = run_name
    with exit_on_error(stage.name):
        settings = validate(stage.config, dict(config), name=stage.name)
        if volume or POD_VARIABLE in os.environ:
            keep_files_in_group()
        if volume:
            folders = StageFolders(Path(volume), run_id, stage)
            return with_retries(stage.name, lambda: folders.run(settings, inputs, Path(artifact)))
        outputs = {name: Path(artifact) / name for name in stage.outputs}
        paths = {**{name: Path(folder) for name, folder in inputs.items()}, **outputs}
        return TaskResult(with_retries(stage.name, lambda: run(stage, settings, paths)), artifact, inputs)


class StageFolders:
    """The folders of one stage of one run on the volume."""

    def __init__(self, mount: Path, run_id: str, stage: Stage) -> None:
        if not mount.is_dir():
            raise PipelineError(f"{mount} does not exist; does this pod mount the shared volume?")
        self._mount, self._stage, self._run_id = mount, stage, run_id
        self._run = mount / "grpo-pipeline" / run_id
        self.own = self._run / stage.name
        """Folder for outputs and records of the stage."""

    def run(self, config: Config, inputs: Mapping[str, str], artifact: Path) -> TaskResult:
        """Run the stage, unless an earlier attempt of the run has finished it, and pass its outputs on."""
        paths = {name: self.on_volume(Path(path)) for name, path in inputs.items()}
        folders = {**paths, **{name: self.own / name for name in self._stage.outputs}}
        work = self._mount / "grpo-pipeline" / "work"
        owner = f"run {os.environ.get(RUN_NAME_VARIABLE) or self._run_id}"
        metrics = run(self._stage, config, folders, work_root=work, owner=owner, reuse=Reuse.IN_PLACE)
        passed_on = self.pass_on()
        shutil.copytree(passed_on, artifact, dirs_exist_ok=True)
        return TaskResult(metrics, str(passed_on), {name: str(path) for name, path in paths.items()})

    def on_volume(self, path: Path) -> Path:
        """Return `path` if it is on the volume or refers to a model there, otherwise a copy of it on the volume."""
        if resolve_reference(path).resolve().is_relative_to(self._mount.resolve()):
            return path
        copy = self._run / "inputs" / lineage.digest(path)[:16]
        if not copy.exists():
            with durable.new_folder(copy) as partial:
                # Without the modes of the originals: Kubeflow's launcher fetched them with another umask.
                for source in (path, *path.rglob("*")):
                    target = partial / source.relative_to(path)
                    if source.is_dir():
                        target.mkdir()
                    else:
                        shutil.copyfile(source, target)
        return copy

    def pass_on(self) -> Path:
        """Fill and return the folder that other tasks read: references to models, copies of all other outputs."""
        folder = self.own / "passed_on"
        durable.remove(folder)
        with durable.new_folder(folder) as partial:
            for name in self._stage.outputs:
                if holds_model(self.own / name):
                    write_reference(partial / name, self.own / name)
                else:
                    shutil.copytree(self.own / name, partial / name)
        return folder
