"""Ending a process that was started; the rest is tested where processes are used."""

import os
import signal
import sys

import pytest

import pipelines.run.local
from pipelines.run.local import lines, output, process

_STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(30)
"""


def test_a_process_that_ignores_signals_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Ctrl-C nor SIGTERM ends it; nothing that was started outlives the block."""
    monkeypatch.setattr(pipelines.run.local, "_GRACE_S", 0.1)
    with process([sys.executable, "-c", _STUBBORN], os.environ, grace_s=0.1) as started:
        assert next(line for line in lines(output(started)) if line is not None) == b"ready"
    assert started.returncode == -signal.SIGKILL
