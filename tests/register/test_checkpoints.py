"""Checkpoints in the registry, pushed from a folder of unfinished work as a training leaves it."""

import errno
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from components.register.checkpoints import END, fetch_checkpoint, main, remove_checkpoints, stored_checkpoints
from components.register.snapshot import read_registry
from components.register.storage import config_below, storage_url
from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.work import CHECKPOINTS, EXPORT, MODEL, CheckpointWriter
from components.train_grpo.train import checkpoints_published
from pipelines.cli import main as command_line
from tests.damage import flip
from tests.register.storage_servers import BUCKET, s3_server
from tests.train_grpo.settings import grpo_config

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"


def _train(folder: Path, step: int, *, run: str = RUN, accuracy: float = 0.5) -> Path:
    """Write a checkpoint with an exported model, whose weights are those of its step; return the folder of the work."""
    work = folder / "work" / run

    def write(target: Path) -> None:
        model = target / EXPORT / MODEL
        (model / "vocabulary").mkdir(parents=True)
        (model / "vocabulary" / "tokenizer.json").write_text("the same")
        (model / "model.safetensors").write_bytes(random.Random(step).randbytes(10_000))
        metrics = {"step": step, "reward": 0.1, "accuracy": accuracy, "validation_accuracy": accuracy}
        jsonl.write_json(target / EXPORT / "metrics.json", metrics)
        (target / "state").write_text("the optimizer's")

    (work / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    CheckpointWriter(work / CHECKPOINTS, keep_last=2, keep_best=False).save(step, write, score=accuracy)
    return work


def _publish(folder: Path, step: int, *, keep_last: int = 2, keep_best: bool = False, **changes: Any) -> None:
    """Train to a step, push its checkpoint and end."""
    work = _train(folder, step, **changes)
    staging = work / "publishing"
    staging.mkdir(exist_ok=True)
    (staging / END).touch()
    options = {"work": work, "staging": staging, "registry": folder / "registry", "keep-last": keep_last}
    main([*(f"--{name}={value}" for name, value in options.items()), *(["--keep-best"] if keep_best else [])])


def _names(folder: Path) -> list[str]:
    with read_registry(str(folder / "registry")) as snapshot:
        return [each.name for each in stored_checkpoints(snapshot)]


def _fetch(folder: Path, name: str, destination: str) -> dict[str, str]:
    fetch_checkpoint(str(folder / "registry"), name, folder / destination)
    return lineage.file_digests(folder / destination)


def _objects(folder: Path, run: str = RUN) -> list[Path]:
    return [path for path in (folder / "registry-storage" / "checkpoints" / run).rglob("*") if path.is_file()]


def test_list_and_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From a relative folder; a shared file is stored once, and what only the run needs to resume not at all."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        _publish(Path(), step)
    assert _names(Path()) == [f"{RUN}@step-10", f"{RUN}@step-20"]
    assert len(_objects(Path())) == 2 + 2 + 1  # listings, weights, the tokenizer
    written = lineage.file_digests(Path("work", RUN, CHECKPOINTS, "step-000020", EXPORT, MODEL))
    assert _fetch(Path(), f"{RUN[:4]}@latest", "newest") == written
    capsys.readouterr()
    assert command_line(["models", "checkpoints", RUN[:6]]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["checkpoint", "pushed", "by", "reward", "accuracy", "kl"]
    assert [(row[0], *row[-3:]) for row in rows] == [(name, "0.1", "0.5", "-") for name in _names(Path())]
    assert command_line(["fetch", f"{RUN}@step-10", "first"]) == 0
    assert lineage.file_digests(Path("first")).keys() == written.keys()
    assert lineage.file_digests(Path("first")) != written
    with pytest.raises(PipelineError, match=f"no checkpoint {RUN}@step-11; available: {RUN}@step-10, "):
        _fetch(Path(), f"{RUN}@step-11", "none")
    assert not Path("none").exists()


@pytest.mark.slow
def test_staging_folders_of_killed_runs_are_removed_and_others_stay(tmp_path: Path) -> None:
    """A run that waits in a queue while this one trains has one in the same folder of unfinished work."""
    registry = str(tmp_path / "registry")
    config = grpo_config(checkpoint__keep_in_registry=1, checkpoint__every_steps=1, registry=registry)
    killed, live = tmp_path / "publishing-1", tmp_path / "publishing-2"
    (killed / "clone").mkdir(parents=True)
    lock = durable.lock_folder(live / "run.lock")
    with checkpoints_published(config, tmp_path):
        assert not killed.exists()
        (own,) = set(tmp_path.glob("publishing-*")) - {live}
        with checkpoints_published(config, tmp_path):
            assert own.exists()
    assert list(tmp_path.glob("publishing-*")) == [live]
    lock.release()


@pytest.mark.slow
def test_a_training_publishes_into_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is pushed and fetched as in a folder; the registry keeps the address of the server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    work, registry = _train(tmp_path, 20), str(tmp_path / "registry")
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.credentials.items():
            monkeypatch.setenv(name, value)
        every = {"checkpoint__keep_in_registry": 1, "checkpoint__every_steps": 1, "registry": registry}
        config = grpo_config(**every, storage=f"s3://{BUCKET}/models", storage_endpoint=server.endpoint)
        with checkpoints_published(config, work):
            pass
        assert _names(tmp_path) == [f"{RUN}@step-20"]
        written = lineage.file_digests(work / CHECKPOINTS / "step-000020" / EXPORT / MODEL)
        assert _fetch(tmp_path, f"{RUN}@latest", "fetched") == written
    assert [path for path in (tmp_path / "s3").rglob("*/checkpoints/**/*") if path.is_file()]


@pytest.mark.slow
def test_only_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    """What none of them refers to is removed from the storage; a run leaves the checkpoints of others alone."""
    _publish(tmp_path, 10, run=OTHER)
    _publish(tmp_path, 20, accuracy=0.9, keep_last=1, keep_best=True)
    leftover = _objects(tmp_path)[0].parent.parent / "ab" / ("0" * 30)
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_text("weights that a killed push has not committed")
    _publish(tmp_path, 30, accuracy=0.5, keep_last=1, keep_best=True)
    assert not leftover.exists()
    _publish(tmp_path, 40, accuracy=0.6, keep_last=1, keep_best=True)
    assert _names(tmp_path) == [f"{RUN}@step-20", f"{RUN}@step-40", f"{OTHER}@step-10"]
    assert len(_objects(tmp_path)) == 2 + 2 + 1
    assert _fetch(tmp_path, f"{RUN}@step-20", "best")
    assert remove_checkpoints(str(tmp_path / "registry"), RUN) == 2
    assert _names(tmp_path) == [f"{OTHER}@step-10"]
    assert not _objects(tmp_path)
    assert _fetch(tmp_path, f"{OTHER}@step-10", "other")


def test_a_damaged_checkpoint_is_named_and_not_delivered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or one with a missing file; nothing is left in the place of the model."""
    _publish(tmp_path, 10)
    weights = max(_objects(tmp_path), key=lambda path: path.stat().st_size)
    weights.chmod(0o600)
    for damage in (flip, Path.unlink):
        damage(weights)
        with pytest.raises(PipelineError, match=f"{RUN}@step-10: .*model.safetensors"):
            _fetch(tmp_path, f"{RUN}@latest", "fetched")
        assert not (tmp_path / "fetched").exists()
        assert command_line(["models", "verify", "--registry", str(tmp_path / "registry")]) == 2
        assert f"{RUN}@step-10: model/model.safetensors: its object {weights}" in capsys.readouterr().err


def test_what_could_not_be_pushed_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says why and, of a full disk, where; the next checkpoint is pushed all the same."""
    (tmp_path / "registry-storage").write_text("not a folder")
    _publish(tmp_path, 10)
    assert f"warning: {RUN}@step-10 could not be pushed to {tmp_path}/registry: " in capsys.readouterr().out
    (tmp_path / "registry-storage").unlink()
    with patch("components.register.checkpoints._branch", side_effect=OSError(errno.ENOSPC, "full")):
        _publish(tmp_path, 20)
    assert f": {tmp_path}/work/{RUN}/publishing: no space left on device" in capsys.readouterr().out
    _publish(tmp_path, 20)
    assert _names(tmp_path) == [f"{RUN}@step-20"]


@pytest.mark.parametrize(
    "line", ["    url = s3://bucket/models\n", "url=s3://bucket/models/\n", "\turl: s3://bucket/models"]
)
def test_checkpoints_are_never_beside_the_objects_of_versions(line: str) -> None:
    """However the storage is written in a config that was edited: what is not referred to there is removed."""
    below = config_below(f"[core]\n    remote = storage\n['remote \"storage\"']\n{line}", "checkpoints/run")
    assert storage_url(below, "registry", "/registry") == "s3://bucket/models/checkpoints/run"
