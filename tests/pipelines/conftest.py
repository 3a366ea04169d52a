"""Runs that several tests look at: each is made once per session, in a copy of the project."""

import pytest

from tests.pipelines.project import FinishedRun, Project, copy_project, smoke


@pytest.fixture(scope="session")
def _local_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, FinishedRun]:
    """The two runs below, side by side: most of their time goes into imports on one core."""
    passing, missing = (
        copy_project(tmp_path_factory.mktemp("passing")),
        copy_project(tmp_path_factory.mktemp("missing")),
    )
    params = smoke()
    params["report"]["gate"] |= {"enforce": True, "min_gain": 0.99}
    missing.use(params, "missed.yaml")
    processes = passing.start("run", "--params", "params/smoke.yaml"), missing.start("run", "--params", "missed.yaml")
    return FinishedRun.of(passing, processes[0]), FinishedRun.of(missing, processes[1])


@pytest.fixture(scope="session")
def smoke_run(_local_runs: tuple[FinishedRun, FinishedRun]) -> FinishedRun:
    """The smoke preset from raw data to a registered version, under KFP's local runner."""
    return _local_runs[0]


@pytest.fixture(scope="session")
def missed_run(_local_runs: tuple[FinishedRun, FinishedRun]) -> FinishedRun:
    """The same with a gate that nothing can pass."""
    return _local_runs[1]


@pytest.fixture(scope="session")
def dvc_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the project whose params.yaml is the smoke preset; nothing has run in it yet."""
    project = copy_project(tmp_path_factory.mktemp("dvc"))
    project.use(smoke())
    return project
