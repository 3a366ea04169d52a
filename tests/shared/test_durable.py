"""Folders that are replaced, removed and locked so that a kill at any moment does no harm."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from components.shared import durable
from components.shared.durable import lock_folder


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the file system, in order; paths are relative to the test's folder."""
    calls: list[str] = []
    rename, rmtree = os.rename, shutil.rmtree

    def record_sync(descriptor: int) -> None:
        calls.append("sync " + os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path))

    def record_rename(old: Path, new: Path) -> None:
        calls.append(f"rename {old.name} {new.name}")
        rename(old, new)

    def record_removal(path: Path, **options: Any) -> None:
        calls.append(f"remove {path.name}")
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(shutil, "rmtree", record_removal)
    return calls


def _folder(path: Path) -> Path:
    (path / "deep").mkdir(parents=True)
    (path / "deep/a.txt").touch()
    return path


def test_a_tree_is_synced_to_the_last_file_and_folder(tmp_path: Path, done: list[str]) -> None:
    """Names are in the folders: these are synced, too."""
    durable.sync_tree(_folder(tmp_path / "new"))
    assert sorted(done) == ["sync new", "sync new/deep", "sync new/deep/a.txt"]


def test_a_folder_is_replaced_by_renames(tmp_path: Path, done: list[str]) -> None:
    """The new name is on disk before the old content is removed."""
    for name in ("stands", "new", ".stands.old"):
        _folder(tmp_path / name)
    durable.replace(tmp_path / "stands", tmp_path / "new")
    steps = ["rename stands .stands.old", "rename new stands", "sync ."]
    assert done == ["remove .stands.old", *steps, "remove .stands.old"]
    durable.replace(tmp_path / "first", _folder(tmp_path / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "stands"]


def test_a_waiting_process_gets_the_lock_of_a_removed_folder(tmp_path: Path) -> None:
    """A run that has finished removes its folder before it releases the lock."""
    path = tmp_path / "work/run.lock"
    lock, waited = lock_folder(path), list[Path]()
    thread = threading.Thread(target=lambda: waited.append(Path(lock_folder(path, wait=True).lock_file)))
    thread.start()
    thread.join(0.2)
    assert waited == []
    assert (durable.is_locked(path), durable.is_locked(tmp_path / "other/run.lock")) == (True, False)
    assert [*tmp_path.iterdir()] == [path.parent], "asking makes or writes no file: it may be another user's"
    durable.discard(path.parent)
    thread.join(0.2)
    lock.release()
    thread.join(30)
    assert waited == [path]
    assert path.exists()
