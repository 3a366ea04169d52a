"""Holding a folder that goes away at the wrong moment; the rest is seen where it is used."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from components.shared import durable
from components.shared.durable import lock_folder
from components.shared.errors import RetryableError


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_on_what_has_been_removed_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    """The run before may finish, and another begin, after the lock file was opened and before it is locked."""
    folder, lockf = tmp_path / "work", fcntl.lockf

    def lock_late(file: TextIO, how: int) -> None:
        shutil.rmtree(folder)
        if made_again:
            folder.mkdir()
            (folder / "run.lock").touch()
        lockf(file, how)

    monkeypatch.setattr(fcntl, "lockf", lock_late)
    with pytest.raises(RetryableError, match="work: is in use by another process; wait until that has ended"):
        lock_folder(folder / "run.lock")


def test_a_folder_is_renamed_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it never stands under its name; what a kill has left of an earlier removal goes, too."""
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / ".work.removed/deep").mkdir(parents=True)
    standing: list[bool] = []

    def watched(remove: Callable[..., None]) -> Callable[..., None]:
        def watch(*arguments: Any, **options: Any) -> None:
            standing.append(folder.exists())
            remove(*arguments, **options)

        return watch

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    (folder / "deep/a.txt").touch()
    durable.discard(folder)
    assert standing == [True, True, False, False, False]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_discarded_as_a_folder_is(tmp_path: Path) -> None:
    """It may stand where a folder was expected."""
    (tmp_path / "work").touch()
    durable.discard(tmp_path / "work")
    assert list(tmp_path.iterdir()) == []
