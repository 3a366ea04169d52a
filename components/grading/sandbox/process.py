"""The process of one run: started with nothing but its request, watched until it ends or has to be ended."""

import functools
import json
import marshal
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.grading.sandbox.limits import CPU_S, DEADLINE_S, OUTPUT_BYTES

_START_S = 60
"""Generous: how long a busy machine needs to start an interpreter is not the code's fault."""
_PIPE_BYTES = 2**20
"""No less than a pipe holds, so that one look takes all that a process that has ended left in it."""
_FOLDER = Path(__file__).parent
_PYTHON = [sys.executable, "-P", "-s", "-S"]
"""Without a script's folder and without site-packages."""
_CHILD = f"""
import sys
sys.path.insert(0, {str(_FOLDER.parents[2])!r})
from components.grading.sandbox.child import main
del sys.path[0]
main()
"""


@dataclass(slots=True)
class Transcript:
    """What came out of a process."""

    sent: bytearray
    printed: bytearray
    ending: str = ""
    """Why there is no more of it."""


def run_process(code: str, calls: Sequence[str]) -> Transcript:
    """Return what a new process makes of the request; it has ended by then. OSError where it cannot be started."""
    with _start(code, calls) as process:
        try:
            transcript = _watch(process)
        finally:
            process.kill()  # there is no other to kill: it cannot start one
    transcript.ending = transcript.ending or _how_it_ended(process.returncode)
    return transcript


def _start(code: str, calls: Sequence[str]) -> subprocess.Popen[bytes]:
    files, folders = _interpreter_files()
    with os.fdopen(os.memfd_create("request"), "w+b") as request:
        marshal.dump((code, list(calls), files, folders), request)
        request.seek(0)
        return subprocess.Popen(
            [*_PYTHON, "-c", _CHILD],
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            cwd="/",
            start_new_session=True,
        )


@functools.cache
def _interpreter_files() -> tuple[list[str], list[str]]:
    """What the interpreter reads to import its standard library: files, and folders that it lists."""
    survey = [*_PYTHON, str(_FOLDER / "survey.py")]
    try:
        found = subprocess.run(survey, capture_output=True, env=_environment(), cwd="/", check=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{sys.executable} does not start: {error.stderr.decode(errors='replace')[-200:]}") from None
    files, folders = json.loads(found.stdout)
    return files, folders


def _environment() -> dict[str, str]:
    """Equal hashes in every run, so that sets have one order; and what some interpreters need to start at all."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PYTHONHASHSEED": "0", **needed}


def _watch(process: subprocess.Popen[bytes]) -> Transcript:
    """Read until the process has ended or has had all that it may have.

    Not until its pipes are closed: whatever else this process forked meanwhile may hold them open.
    """
    transcript = Transcript(bytearray(), bytearray())
    limit_s, started = _START_S, time.monotonic()
    is_confined = has_ended = False
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(process.pid), "rb", 0) as end:
        for source, buffer in ((process.stdout, transcript.sent), (process.stderr, transcript.printed), (end, None)):
            assert source is not None
            selector.register(source, selectors.EVENT_READ, buffer)
        while not has_ended and not transcript.ending:
            has_ended = _read(selector, max(0, started + limit_s - time.monotonic()))
            if transcript.sent and not is_confined:  # from here on it is the code that takes time
                is_confined, limit_s, started = True, DEADLINE_S, time.monotonic()
            if not has_ended and time.monotonic() > started + limit_s:
                transcript.ending = f"it took longer than {limit_s} s"
            if max(len(transcript.sent), len(transcript.printed)) > OUTPUT_BYTES:
                transcript.ending = f"it wrote more than {OUTPUT_BYTES / 2**20:g} MiB"
    return transcript


def _read(selector: selectors.BaseSelector, timeout_s: float) -> bool:
    """Take what the pipes hold, and tell whether the process has ended."""
    has_ended = False
    for key, _ in selector.select(timeout_s):
        if key.data is None:
            has_ended = True
        elif chunk := os.read(key.fd, _PIPE_BYTES):
            key.data.extend(chunk)
        else:
            selector.unregister(key.fileobj)
    return has_ended


def _how_it_ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return f"it used more than {CPU_S} s of processor time, or was killed for its memory"
    return f"it crashed ({signal.Signals(-status).name})" if status < 0 else f"it ended with status {status}"
