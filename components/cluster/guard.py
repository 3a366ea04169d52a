"""Leaves nothing behind of the process that started this one, however that ends.

    python guard.py FOLDER [COMMAND...]

The process that starts it keeps a pipe to it open, as standard input. It runs the command; when the pipe closes, for
whatever reason, or the command ends, everything the command has started is ended and the folder removed.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_GRACE_S = 5.0
"""For the command to end by itself once it is told to."""
_TRIES, _TRY_AGAIN_S = 100, 0.1
"""Of removing a folder: what ends together with the process that started this one may still be writing there."""


def main() -> None:
    """Wait for the end; the command and what it starts are in this process's group, which begins with this process."""
    folder, *command = sys.argv[1:]
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    if not command:
        waiting.poll()
        _remove(Path(folder))
        return
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    waiting.register(os.pidfd_open(child.pid), select.POLLIN)
    waiting.poll()
    child.terminate()
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _remove(folder: Path) -> None:
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_TRY_AGAIN_S)


if __name__ == "__main__":
    main()
