"""Holding a folder that goes away at the wrong moment; the rest is seen where it is used."""

import fcntl
import shutil
from pathlib import Path
from typing import TextIO

import pytest

from components.shared.durable import hold
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
        hold(folder / "run.lock")
