"""Watchdog that removes processes and folders when their owner ends, even by SIGKILL.

It needs only the standard library: `python watchdog.py FOLDER [COMMAND...]` runs the command. The owner keeps a pipe to
its standard input open; when the pipe closes or the command ends, the watchdog terminates all descendants of the
command and removes the folder.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MEMORY = Path("/dev/shm")
_PREFIX = "grpo-pipeline-"
_COPIES = 3
"""Copies of the weights that may exist at once: one being written, one being loaded, one spare."""
_GRACE_S = 5.0
"""Time for the command to end after SIGTERM."""
_TRIES, _RETRY_S = 100, 0.1
"""Attempts to remove a folder: processes that end together with the owner may still write to it."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its `parent` (a process id) ends; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call, for example while Python started
        os.kill(os.getpid(), signal.SIGKILL)


def watched(folder: Path, command: Sequence[str] = ()) -> list[str]:
    """Return the command line of a watchdog, to be started in a new session with a pipe as its standard input."""
    return [sys.executable, "-P", __file__, str(folder), *command]


@contextmanager
def memory_folder(like: Path, otherwise: Path) -> Iterator[Path]:
    """Yield a folder with room for copies of the files in `like`: in memory, or `otherwise` if memory is short.

    It is removed at the end of the block; by a watchdog if this process is killed; by the next run if both are killed.
    """
    for orphan in _MEMORY.glob(f"{_PREFIX}*"):
        with suppress(ValueError, PermissionError):  # not a folder of this project, or of another user
            try:
                os.kill(int(orphan.name.removeprefix(_PREFIX).partition("-")[0]), 0)  # does its process exist?
            except ProcessLookupError:
                shutil.rmtree(orphan, ignore_errors=True)
    size = sum(path.stat().st_size for path in like.rglob("*") if path.is_file())
    folder = otherwise
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _COPIES * size:
        # An unpredictable name, as everybody may write to /dev/shm.
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY))
    folder.mkdir(parents=True, exist_ok=True)
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    try:
        # Without this process's output: whoever reads it to its end would wait for the watchdog.
        with subprocess.Popen(watched(folder), stdin=pipe, stdout=devnull, stderr=devnull, start_new_session=True):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait until the owner or the command ends, and clean up; the command's processes are in this process group."""
    folder, *command = sys.argv[1:]
    events = select.poll()
    events.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL) if command else None
    if child:
        events.register(os.pidfd_open(child.pid), select.POLLIN)
    events.poll()
    if child:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # ends this process, too
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            return
        time.sleep(_RETRY_S)


if __name__ == "__main__":
    main()
