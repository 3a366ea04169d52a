"""A `dvc repro` whose longest stage is killed on the way, and that is then run again."""

import os
import signal
import subprocess
import time

from tests.pipelines.project import Project


def repeat_after_kill(project: Project) -> Project:
    """Reproduce the project's graph to its end, after train_grpo was killed in the middle of its work."""
    command = ["dvc", "repro", "train_grpo"]
    with subprocess.Popen(command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE) as repro:
        os.kill(_wait_for_training(project), signal.SIGKILL)
        repro.communicate(timeout=60)
    assert repro.returncode != 0
    assert not (project.folder / "outputs/stages/train_grpo/policy").exists()
    again = project.run("dvc", "repro")
    assert again.returncode == 0, again.stdout + again.stderr
    return project


def _wait_for_training(project: Project) -> int:
    """Return the process of train_grpo once it has begun to write its outputs aside."""
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        if (project.folder / "outputs/stages/train_grpo/.policy.partial").exists():
            (stage,) = project.processes("components.train_grpo")
            return stage
        time.sleep(0.05)
    raise TimeoutError("train_grpo has not been started")
