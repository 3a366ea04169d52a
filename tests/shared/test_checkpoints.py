"""Checkpoints: whatever happens to the process that writes them, each one found afterwards is complete."""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from components.shared import durable
from components.shared.errors import PipelineError, RetryableError
from components.shared.work import Checkpoint, CheckpointWriter, best_checkpoint, latest_checkpoint
from tests.damage import flip, truncate


def _content(step: int) -> dict[str, bytes]:
    return {name: f"{step} {name}".encode() * 99 for name in ("weights/part.bin", "optimizer.bin", "state.json")}


def _fill(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").mkdir()
        for name, content in _content(step).items():
            (folder / name).write_bytes(content)

    return write


def _save(folder: Path, *steps: int, keep_last: int = 9, keep_best: bool = False, **scores: float) -> None:
    writer = CheckpointWriter(folder, keep_last=keep_last, keep_best=keep_best)
    for step in steps:
        writer.save(step, _fill(step), score=scores.get(f"score_{step}"))


def _latest_step(folder: Path) -> int:
    """The step of the newest checkpoint, all of which is seen to be there; 0 for none."""
    latest = latest_checkpoint(folder, stage="train")
    if latest is None:
        return 0
    expected = _content(latest.step)
    assert {name: (latest.folder / name).read_bytes() for name in expected} == expected
    return latest.step


def _names(folder: Path) -> set[str]:
    """What is in the folder but the lock."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    """A million is after 999,999, although its name sorts before. A complete one is not written again."""
    _save(tmp_path / "new/folder", 999_999, 1_000_000)
    assert _latest_step(tmp_path / "new/folder") == 1_000_000
    assert _latest_step(tmp_path) == _latest_step(tmp_path / "nowhere") == 0
    writer = CheckpointWriter(tmp_path / "new/folder", keep_last=1, keep_best=False)
    writer.save(1_000_000, lambda folder: pytest.fail("it was written"), score=None)
    assert _names(tmp_path / "new/folder") == {"step-1000000"}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("weights/part.bin", flip, "/weights/part.bin: differs from its SHA-256 in the manifest;"),
        ("weights", shutil.rmtree, "/weights/part.bin: is missing;"),
        ("weights/manifest.json", Path.touch, "/weights/manifest.json: is no file of this checkpoint;"),
        ("manifest.json", Path.unlink, "/manifest.json: no such file;"),
        ("manifest.json", lambda path: path.write_text("7"), "/manifest.json: is damaged:"),
        ("manifest.json", flip, "/manifest.json: is damaged: its digest is not that of its content;"),
        (
            "",
            lambda path: shutil.copytree(path.with_name("step-000001"), path, dirs_exist_ok=True),
            ": is the checkpoint of step 1 under another name;",
        ),
    ],
)
def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None], message: str
) -> None:
    """The one before it is taken, and one line names the file and what is wrong with it."""
    _save(tmp_path, 1, 2, score_2=0.25)
    damage(tmp_path / "step-000002" / name)
    assert _latest_step(tmp_path) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"train: {tmp_path}/step-000002{message}")
    assert printed.endswith("; this checkpoint is skipped\n")
    assert printed.count("\n") == 1
    _save(tmp_path, 2, 3, keep_last=2)
    assert _names(tmp_path) == {"step-000002", "step-000003"}
    assert _latest_step(tmp_path) == 3


def test_a_run_does_not_start_again_where_all_are_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says where and what to do, after a line for each."""
    _save(tmp_path, 1, 2)
    for step in (1, 2):
        truncate(tmp_path / f"step-00000{step}/state.json")
    with pytest.raises(PipelineError, match=r"every checkpoint is damaged.*remove them all to start again") as none:
        latest_checkpoint(tmp_path, stage="train")
    assert str(none.value).startswith(f"{tmp_path}: ")
    assert capsys.readouterr().out.count("skipped\n") == 2


def _fingerprint(**changes: Any) -> dict[str, Any]:
    return {"config": {"seed": 1}, "inputs": {"problems": "d1"}, "code": "c1", **changes}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            _fingerprint(code="c2", config={"rate": 0.5}),
            "train.rate: 0.5 -> (absent); train.seed: (absent) -> 1; changed code",
        ),
        (None, "its fingerprint is unknown"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, other: dict[str, Any] | None, difference: str) -> None:
    """However whole it is, and in one line that says what differs; among its own it is found."""
    CheckpointWriter(tmp_path, keep_last=9, keep_best=False, fingerprint=other).save(2, _fill(2), score=None)
    with pytest.raises(PipelineError) as refused:
        latest_checkpoint(tmp_path, stage="train", fingerprint=_fingerprint())
    assert str(refused.value) == (
        f"{tmp_path}/step-000002: is a checkpoint of another run ({difference}); move it out of this folder"
    )
    found = latest_checkpoint(tmp_path, stage="train", fingerprint=other)
    assert found == Checkpoint(2, tmp_path / "step-000002", None, other)


@pytest.mark.parametrize(
    ("keep_last", "scores", "kept"),
    [
        (2, [None, None, None], {2, 3}),
        (1, [0.9, 0.9, 0.3], {1, 3}),  # of equals the first
        (1, [-0.5, None, None], {1, 3}),
        (1, [0.0, -1.0, -2.0], {1, 3}),
    ],
)
def test_last_and_best_are_kept(tmp_path: Path, keep_last: int, scores: list[float | None], kept: set[int]) -> None:
    """The last ones and the best, also where each is written by a run of its own."""
    for step, score in enumerate(scores, start=1):
        CheckpointWriter(tmp_path, keep_last=keep_last, keep_best=True).save(step, _fill(step), score=score)
    assert _names(tmp_path) == {f"step-{step:06d}" for step in kept}


def test_the_best_is_read_and_a_damaged_one_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of equals it is the first; there is none where no checkpoint has a score."""
    assert best_checkpoint(tmp_path, stage="train") is None
    _save(tmp_path, 1)
    assert best_checkpoint(tmp_path, stage="train") is None
    _save(tmp_path, 2, 3, 4, score_2=0.5, score_3=0.9, score_4=0.9)
    assert best_checkpoint(tmp_path, stage="train") == Checkpoint(3, tmp_path / "step-000003", 0.9)
    truncate(tmp_path / "step-000003/state.json")
    assert best_checkpoint(tmp_path, stage="train") == Checkpoint(4, tmp_path / "step-000004", 0.9)
    assert "step-000003" in capsys.readouterr().out


def test_a_resumed_run_replaces_later_checkpoints(tmp_path: Path) -> None:
    """Damaged later ones count neither as the last nor as the best once there is a new one."""
    _save(tmp_path, 1, 2, 3, score_3=1.0)
    for step in (2, 3):
        truncate(tmp_path / f"step-00000{step}/state.json")
    _save(tmp_path, 2, keep_last=2, keep_best=True)
    assert _names(tmp_path) == {"step-000001", "step-000002"}
    assert _latest_step(tmp_path) == 2


def test_a_checkpoint_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is synced, then renamed; only then is the one before removed."""
    calls = Mock()
    for name in ("sync_tree", "replace", "discard"):
        monkeypatch.setattr(durable, name, Mock(wraps=getattr(durable, name)))
        calls.attach_mock(getattr(durable, name), name)
    _save(tmp_path, 1, 2, keep_last=1)
    done = [f"{call[0]} {call.args[-1].name}" for call in calls.mock_calls]
    assert done[-3:] == ["sync_tree .step-000002.partial", "replace .step-000002.partial", "discard step-000001"]


def _die_at(event: int, folder: Path) -> None:
    """Save two steps, and be killed just before the given operation on a file."""
    left = event

    def count(name: str, _: tuple[Any, ...]) -> None:
        nonlocal left
        if name == "open" or name.startswith(("os.", "shutil.", "fcntl.")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    _save(folder, 2, 3, keep_last=1, keep_best=True)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried before every single operation on a file: nothing is lost, and the next run gets to the same end."""
    # To wait for the disk would take most of the time, and a killed process loses nothing that it has written.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    event, seen = 0, set()
    exit_code: int | None = -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        event += 1
        folder = tmp_path / str(event)
        _save(folder, 1, 2, score_1=0.5)
        truncate(folder / "step-000002/state.json")
        process = multiprocessing.get_context("fork").Process(target=_die_at, args=(event, folder))
        process.start()
        process.join()
        exit_code = process.exitcode
        seen.add(_latest_step(folder))
        _save(folder, 2, 3, keep_last=1, keep_best=True)
        assert _names(folder) == {"step-000001", "step-000003"}
        assert _latest_step(folder) == 3
    assert exit_code == 0
    assert event > 60
    assert seen == {1, 2, 3}


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """And clears nothing away."""
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_best=False)
    (tmp_path / ".step-000002.partial").mkdir()
    with pytest.raises(RetryableError, match=rf"{tmp_path}: is in use by process {os.getpid()} on .*; wait"):
        _save(tmp_path, 2)
    assert (tmp_path / ".step-000002.partial").exists()
    del writer
    _save(tmp_path, 2)
    assert _latest_step(tmp_path) == 2


def test_a_full_disk_costs_the_new_checkpoint_alone(tmp_path: Path) -> None:
    """One line says where, what a checkpoint takes at least, and what is free when the partial one is removed."""
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_best=False)
    writer.save(1, _fill(1), score=None)

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(bytes(50_000))
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = r"the earlier checkpoints are complete, this one takes 50,000 bytes or more, [\d,]+ are free; make room"
    with pytest.raises(PipelineError, match=rf"^{tmp_path}/step-000002: no space left on device: {usage}"):
        writer.save(2, write, score=None)
    assert _names(tmp_path) == {"step-000001"}
    assert _latest_step(tmp_path) == 1
