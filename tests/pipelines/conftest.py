"""Runs that several tests look at: each is made once per session, in a copy of the project."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.pipelines.killed_repro import repeat_after_kill
from tests.pipelines.project import FinishedRun, Project, copy_project, smoke


class _Runs(NamedTuple):
    passing: Future[FinishedRun]
    missing: Future[FinishedRun]
    dvc: Future[Project]


@pytest.fixture(scope="session")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Runs]:
    """All the runs below, two at a time: most of their time goes into imports on one core."""
    passing, missing, dvc = (copy_project(tmp_path_factory.mktemp(name)) for name in ("passing", "missing", "dvc"))
    params = smoke()
    params["report"]["gate"] |= {"enforce": True, "min_gain": 0.99}
    missing.use(params, "missed.yaml")
    dvc.use(smoke())
    with ThreadPoolExecutor(2) as pool:
        yield _Runs(
            pool.submit(passing.pipeline, "run", "--params", "params/smoke.yaml"),
            pool.submit(missing.pipeline, "run", "--params", "missed.yaml"),
            pool.submit(repeat_after_kill, dvc),
        )


@pytest.fixture(scope="session")
def smoke_run(_runs: _Runs) -> FinishedRun:
    """The smoke preset from raw data to a registered version, under KFP's local runner."""
    return _runs.passing.result()


@pytest.fixture(scope="session")
def missed_run(_runs: _Runs) -> FinishedRun:
    """The same with a gate that nothing can pass."""
    return _runs.missing.result()


@pytest.fixture(scope="session")
def dvc_project(_runs: _Runs) -> Project:
    """The smoke preset under DVC, whose train_grpo was killed in the middle and then run again."""
    return _runs.dvc.result()
