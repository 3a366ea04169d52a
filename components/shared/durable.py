"""Folders that outlast a kill at any moment: synced before they count, renamed before they go, one user at a time."""

import fcntl
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from components.shared.errors import RetryableError


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have everything below a folder on disk, and the folder itself."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def discard(folder: Path) -> None:
    """Remove a folder; whenever this is interrupted, it stands whole or not at all, and may leave `.<name>.removed`."""
    aside = folder.with_name(f".{folder.name}.removed")
    remove(aside)
    folder.rename(aside)
    remove(aside)


def remove(path: Path) -> None:
    """Remove what stands at a path, a folder or a file, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class InUseError(RetryableError):
    """Another process holds a folder."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"{folder}: is in use by {holder}; wait until that has ended, or end it")
        self.holder = holder


def lock_folder(path: Path) -> TextIO:
    """Hold the folder of the lock file `path` until the file returned is closed or this process ends, however it does.

    An InUseError says who holds it already. The lock is the process's own: a child that outlives it holds nothing.
    """
    file = _opened(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = _is_at(file, path)
    except BlockingIOError:
        ours = False
    if not ours:  # or the one who held it has removed the folder meanwhile
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise InUseError(path.parent, holder)
    return _signed(file)


def wait_for_lock(path: Path) -> TextIO:
    """Hold the folder of a lock file as `lock_folder` does, once whoever holds it has let go of it or ended.

    It is the file system that tells when a process on another host has ended: on NFS some minutes after its host died.
    """
    while True:
        file = _opened(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                return _signed(file)
        except BaseException:
            file.close()
            raise
        file.close()  # the one who held it has removed the folder, as a run does that has finished


def is_locked(path: Path) -> bool:
    """Tell whether another process holds the folder of a lock file."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _opened(path: Path) -> TextIO:
    """Open a lock file, which may be removed together with its folder at any moment."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return path.open("a+", encoding="utf-8")


def _is_at(file: TextIO, path: Path) -> bool:
    """Tell whether an open file is the one that stands at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _signed(file: TextIO) -> TextIO:
    """Write into a lock file who holds it."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
