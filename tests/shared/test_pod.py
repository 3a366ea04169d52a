"""Who may read and change what runs write."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.cluster import task as cluster_task
from components.shared import environment, task
from components.shared.config import Config
from components.shared.environment import POD_VARIABLE
from components.shared.stage import Stage


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """What Argo starts a task with, and what a container runtime does."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


class WriteConfig(Config):
    """The section of a stage that writes."""


def write(config: WriteConfig, *, model: Path, work: Path) -> dict[str, float]:
    """Write an output and unfinished work."""
    del config
    for folder in (model, work):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "weights").write_text("learned")
    return {}


STAGE = Stage("write", write, WriteConfig, (), ("model",), has_work=True)


def _modes(folder: Path) -> set[tuple[bool, int]]:
    """Of all that is in a folder: whether it is a folder itself, and its mode."""
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")}


@pytest.mark.parametrize("on_cluster", [True, False])
def test_what_a_task_writes_is_for_its_user_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, on_cluster: bool
) -> None:
    """Other pods that mount the volume cannot change weights, checkpoints or the registry."""
    del umask
    monkeypatch.setenv(POD_VARIABLE, "launcher-1")
    monkeypatch.setenv(environment.WORK_VARIABLE, str(tmp_path / "outputs" / "work"))
    if on_cluster:
        cluster = {"image": "gpu:1", "mount": str(tmp_path)}
        cluster_task.run_task(STAGE, {}, cluster=cluster, run_id="run-1", model=str(tmp_path / "out" / "model"))
    else:
        task.run_task(STAGE, {}, model=str(tmp_path / "out" / "model"))
    assert _modes(tmp_path) == {(True, 0o770), (False, 0o660)}


def test_modes_on_a_laptop_are_the_users_own_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """Nobody but the user decides who reads the files of a local run."""
    monkeypatch.delenv(POD_VARIABLE, raising=False)
    monkeypatch.setenv(environment.WORK_VARIABLE, str(tmp_path / "work"))
    task.run_task(STAGE, {}, model=str(tmp_path / "model"))
    assert _modes(tmp_path / "model") == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}
