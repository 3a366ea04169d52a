"""Runs that several tests look at: each is made once per session, in a copy of the project."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipelines.cli import main
from tests.pipelines.project import FinishedRun, Project, copy_project
from tests.presets import preset, write_params


class Printed(NamedTuple):
    """What a command has printed."""

    lines: list[str]
    error: str

    @property
    def out(self) -> str:
        """The lines as one text."""
        return "".join(f"{line}\n" for line in self.lines)


Program = Callable[..., Printed]
"""Runs `grpo-pipeline` with arguments, checks its exit `code` (0), and returns what it has printed."""


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """The command line."""

    def run(*arguments: str, code: int = 0) -> Printed:
        capsys.readouterr()
        assert main(list(arguments)) == code
        out, error = capsys.readouterr()
        return Printed(out.splitlines(), error)

    return run


@pytest.fixture(scope="session")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[Any]]]:
    """All the runs below, two at a time: most of their time goes into imports on one core."""
    passing, missing, dvc = (copy_project(tmp_path_factory.mktemp(name)) for name in ("passing", "missing", "dvc"))
    (dvc.folder / "repro.yaml").write_text("params: params/smoke.yaml\n")
    params = preset()
    params["report"]["gate"] |= {"enforce": True, "min_gain": 0.99, "power": "warn"}
    write_params(missing.folder / "missed.yaml", params)
    with ThreadPoolExecutor(2) as pool:
        yield [
            pool.submit(passing.pipeline, "run", "--params", "params/smoke.yaml"),
            pool.submit(missing.pipeline, "run", "--params", "missed.yaml"),
            pool.submit(_repeat_after_kill, dvc),
        ]


@pytest.fixture(scope="session")
def smoke_run(_runs: list[Future[FinishedRun]]) -> FinishedRun:
    """The smoke preset from raw data to a registered version."""
    return _runs[0].result()


@pytest.fixture(scope="session")
def missed_run(_runs: list[Future[FinishedRun]]) -> FinishedRun:
    """The same with a gate that nothing can pass."""
    return _runs[1].result()


@pytest.fixture(scope="session")
def dvc_project(_runs: list[Future[Project]]) -> Project:
    """The smoke preset under DVC, whose train_grpo was killed in the middle and then run again."""
    return _runs[2].result()


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `make_outputs` has made outputs and a registry, for tests to read or to copy."""
    from tests.pipelines.test_runs import make_outputs

    folder = tmp_path_factory.mktemp("runs")
    make_outputs(folder)
    return folder


def _repeat_after_kill(project: Project) -> Project:
    """Reproduce the project's graph to its end, after train_grpo was killed in the middle of its work."""
    command, outputs = ["dvc", "repro", "train_grpo"], project.folder / "outputs/stages/train_grpo"
    with subprocess.Popen(command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE) as repro:
        deadline = time.monotonic() + 500
        while not (outputs / ".policy.partial").exists():
            assert time.monotonic() < deadline, "train_grpo has not been started"
            time.sleep(0.05)
        (stage,) = project.processes("components.train_grpo")
        os.kill(stage, signal.SIGKILL)
        repro.communicate(timeout=60)
    assert repro.returncode != 0
    assert not (outputs / "policy").exists()
    again = project.run("dvc", "repro")
    assert again.returncode == 0, again.stdout + again.stderr
    return project
