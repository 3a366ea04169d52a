"""Runs a command for as long as the process lives that started this one, and leaves nothing of it behind.

    python guard.py FOLDER COMMAND...

The process that starts it keeps a pipe to it open, as standard input: when that closes, for whatever reason, or the
command ends, everything the command has started is ended and the folder removed.
"""

import os
import select
import shutil
import signal
import subprocess
import sys

_GRACE_S = 5.0
"""For the command to end by itself once it is told to."""


def main() -> None:
    """Run the command; it and what it starts are in this process's group, which begins with this process."""
    folder, *command = sys.argv[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
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


if __name__ == "__main__":
    main()
