"""Folders that outlast a kill at any moment: synced before they count, renamed before they go, one user at a time."""

import errno
import fcntl
import os
import platform
import re
import shutil
from pathlib import Path
from typing import TextIO

from components.shared.errors import RetryableError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""How a disk, a quota or a limit says that no more can be written."""
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")


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
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def hold(path: Path) -> TextIO:
    """Hold the folder of the lock file `path` until the file returned is closed or this process ends, however it does.

    A RetryableError says who holds it already. The lock is the process's own: a child that outlives it holds nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        ours = False
    if not ours:  # or the one who held it has removed the folder meanwhile
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise RetryableError(f"{path.parent}: is in use by {holder}; wait until that has ended, or end it")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


def errno_of(error: Exception) -> int | None:
    """Return the number of what the operating system refused; None for any other error, which is a bug."""
    if isinstance(error, OSError):
        return error.errno
    # Libraries in Rust (safetensors, tokenizers) raise exceptions of their own that carry the error as text.
    wrapped = _RUST_OS_ERROR.search(str(error))
    return int(wrapped[1]) if wrapped else None
