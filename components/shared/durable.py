"""Files and folders that are complete or absent after a kill at any moment, and locks that end with their process."""

import fcntl
import math
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from filelock import FileLock, Timeout

from components.shared.errors import PipelineError, RetryableError


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything below it to disk, and give all files the mode of new files.

    Safetensors makes files that only the owner can read, regardless of the umask.
    """
    mask = os.umask(0o077)  # reading the mask means setting one
    os.umask(mask)
    mode = 0o666 & ~mask
    for path in (*folder.rglob("*"), folder):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            with suppress(PermissionError):  # a hard link to another user's file
                path.chmod(mode)
        sync(path)


def replace(path: Path, new: Path) -> None:
    """Move the synced folder `new` to `path`, in place of any folder there; a kill leaves `path` complete or absent."""
    old = path.with_name(f".{path.name}.old")
    remove(old)
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync(path.parent)  # before the old folder, from which it could be recovered, is removed
    remove(old)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield the path at which the block has to make a folder; if it succeeds, the folder is renamed to `destination`.

    PipelineError if there is anything at `destination` but an empty folder.
    """
    destination = destination.resolve()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise PipelineError(f"{destination}: is not empty; choose a new folder")
    partial = destination.with_name(f".{destination.name}.partial")
    remove(partial)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(destination)
    finally:
        remove(partial)


def discard(folder: Path) -> None:
    """Remove a folder; a kill leaves it complete or absent, possibly with some of its files in `.<name>.removed`."""
    remove(set_aside(folder))


def set_aside(folder: Path) -> Path:
    """Rename a folder to `.<name>.removed`, which nobody reads, and return the new path."""
    removed = folder.with_name(f".{folder.name}.removed")
    remove(removed)
    return folder.rename(removed)


def remove(path: Path) -> None:
    """Remove a folder or a file, if it exists; files of a folder that cannot be removed are left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link, or a copy if the file systems do not allow a link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a folder or file and everything below it, each with its `lstat`; skip what others remove meanwhile."""
    below = (Path(base) / name for base, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in chain([folder], below):
        with suppress(FileNotFoundError):
            status = path.lstat()
            yield path, status


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(status.st_size for _, status in walk(folder) if stat.S_ISREG(status.st_mode))


def tail(path: Path, *, max_bytes: int) -> str:
    """Return the last bytes of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read().decode("utf-8", errors="replace")


def last_change(folder: Path) -> float:
    """Return the latest modification time of a folder and everything below it except locks, in seconds since 1970."""
    return max((status.st_mtime for path, status in walk(folder) if path.suffix != ".lock"), default=math.inf)


class InUseError(RetryableError):
    """Another process has locked a folder."""

    def __init__(self, folder: Path, owner: str) -> None:
        super().__init__(f"{folder}: is in use by {owner}; wait for it to end, or stop it")
        self.owner = owner


def lock_folder(path: Path, *, wait: bool = False, owner: str = "") -> FileLock:
    """Lock the folder of the lock file `path` until the lock is released or deleted, or this process ends.

    If another process has the lock, raise InUseError with that process and its `owner`, or with `wait` block until the
    lock is free. The end of a process on another host frees it too, on NFS some minutes after that host has died.
    """
    # A soft lock, the mere existence of a file, would outlive a killed process.
    lock = FileLock(path, timeout=-1 if wait else 0, thread_local=False, fallback_to_soft=False)
    while True:
        try:
            with suppress(FileNotFoundError):  # a finished owner removes the folder
                with suppress(FileExistsError):  # the owner removes the folder while mkdir runs
                    path.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire()
        except Timeout:
            other = ""
            with suppress(FileNotFoundError):
                other = path.read_text(encoding="utf-8").strip()
            raise InUseError(path.parent, other or "another process") from None
        if lock.is_locked:  # otherwise the folder was removed meanwhile: try again
            process = f"process {os.getpid()} on {platform.node()}"
            path.write_text(f"{owner} ({process})\n" if owner else f"{process}\n", encoding="utf-8")
            return lock
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether another process has locked the folder of a lock file; this one need not be able to write it."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
