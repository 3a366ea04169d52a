"""Files and folders that survive a kill at any moment: synced before they count, renamed before they go, locked."""

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
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything below it to disk, all files with the mode that this process gives new ones.

    Safetensors lets none but the owner read what it writes, whatever the umask.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    for path in (*folder.rglob("*"), folder):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != 0o666 & ~mask:
            with suppress(PermissionError):  # a link to what another user has made
                path.chmod(0o666 & ~mask)
        sync(path)


def replace(path: Path, new: Path) -> None:
    """Put the synced folder `new` in the place of `path`; at any interruption `path` is complete or absent."""
    old = path.with_name(f".{path.name}.old")
    remove(old)
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync(path.parent)  # before anything is removed that it could be recovered from
    remove(old)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a path for a folder that becomes `destination` when the block has ended; nothing is left where it fails.

    PipelineError unless `destination` is empty, or does not exist.
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
    """Remove a folder; at any interruption it is complete or absent, and `.<name>.removed` may be left."""
    remove(set_aside(folder))


def set_aside(folder: Path) -> Path:
    """Rename a folder to `.<name>.removed`, where nobody looks for it, and return that."""
    removed = folder.with_name(f".{folder.name}.removed")
    remove(removed)
    return folder.rename(removed)


def remove(path: Path) -> None:
    """Remove a folder or a file as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link, or a copy where the file system has no such links or the two are on different ones."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a folder or file, and all that is below it, with its status; skip what vanishes meanwhile."""
    below = (Path(base) / name for base, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in chain([folder], below):
        with suppress(FileNotFoundError):
            status = path.lstat()
            yield path, status


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(status.st_size for _, status in walk(folder) if stat.S_ISREG(status.st_mode))


def tail(path: Path, *, max_bytes: int) -> str:
    """Return the last bytes of a file as text: logs grow without a limit."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read().decode("utf-8", errors="replace")


def touch(folder: Path) -> None:
    """Have a folder count as changed now, where this process may say so."""
    with suppress(OSError):
        os.utime(folder)


def last_change(folder: Path) -> float:
    """Return when a folder or file, or anything below it, was last changed, in seconds; locking changes nothing."""
    return max((status.st_mtime for path, status in walk(folder) if path.suffix != ".lock"), default=math.inf)


class InUseError(RetryableError):
    """Another process has locked a folder."""

    def __init__(self, folder: Path, owner: str) -> None:
        super().__init__(f"{folder}: is in use by {owner}; wait for it to end, or stop it")
        self.owner = owner


def lock_folder(path: Path, *, wait: bool = False, owner: str = "") -> FileLock:
    """Lock the folder of the lock file `path` until the lock is released, deleted, or this process ends.

    Where another process has it: InUseError, which names that process and its `owner`, or `wait` until it ends or
    releases it. The file system notices when a process on another host has ended: NFS some minutes after its host died.
    """
    # A lock file that is only there or not would outlive a process that is killed.
    lock = FileLock(path, timeout=-1 if wait else 0, thread_local=False, fallback_to_soft=False)
    while True:
        try:
            with suppress(FileNotFoundError):  # an owner that has finished removes the folder
                _make(path.parent)
                lock.acquire()
        except Timeout:
            other = ""
            with suppress(FileNotFoundError):
                other = path.read_text(encoding="utf-8").strip()
            raise InUseError(path.parent, other or "another process") from None
        if lock.is_locked:
            process = f"process {os.getpid()} on {platform.node()}"
            path.write_text(f"{owner} ({process})\n" if owner else f"{process}\n", encoding="utf-8")
            return lock
        lock.release()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if folder.exists():  # as something else; otherwise it was removed in between
            raise


def is_locked(path: Path) -> bool:
    """Tell whether another process has locked the folder of a lock file."""
    try:
        lock_folder(path).release()
    except InUseError:
        return True
    return False
