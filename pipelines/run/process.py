"""Start a process, and end it together with all of its descendants."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 3.0  # time to end after SIGTERM, and time to wait after SIGKILL


@contextmanager
def process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    grace_s: float,
    folder: Path | None = None,
    log: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process whose output goes to a log or the screen; it and its descendants end with the block.

    During the block, Ctrl-C, SIGTERM and a closed terminal raise SystemExit with 128 + the number of the signal. The
    process then gets SIGINT, and is terminated after `grace_s`, or killed by another Ctrl-C.
    """
    # Handlers are set before the process starts: it would inherit that background jobs ignore SIGINT.
    handlers = {number: signal.signal(number, _stop) for number in _STOP_SIGNALS}
    try:
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log and subprocess.STDOUT,
            start_new_session=True,  # one signal reaches all processes of a session
        ) as started:
            try:
                yield started
            finally:
                _end(started, grace_s)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal to stop: ignore further ones, which would interrupt the graceful shutdown."""
    for each in _STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _end(started: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the process and its descendants, at once if there is another Ctrl-C."""
    signal.signal(signal.SIGINT, lambda *_: os.killpg(started.pid, signal.SIGKILL))
    # SIGINT first: a stage then removes incomplete outputs, or writes a checkpoint.
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        deadline = time.monotonic() + wait_s
        try:
            os.killpg(started.pid, number)
            while time.monotonic() < deadline:
                started.poll()
                os.killpg(started.pid, 0)  # raises once no process of the group is left
                time.sleep(0.05)
        except ProcessLookupError:
            return
