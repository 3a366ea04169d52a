"""The sandbox: runs untrusted code in a process of its own, and returns the values of calls.

The process starts with nothing but its request, is watched until it ends or has to be ended, and may send anything.
"""

import functools
import json
import marshal
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.grading.sandbox.child import MAX_DEPTH, NotPlainDataError
from components.grading.sandbox.confinement import CPU_S
from components.shared.errors import PipelineError

DEADLINE_S = 5
"""Time from the start of the code to the end of its last call."""
MAX_OUTPUT_BYTES = 2**20
"""What the code may print; it may send as much again as results."""
_MAX_START_S = 60
"""Generous: a busy machine may need long to start an interpreter, which is not the code's fault."""
_MAX_HASHED_PARTS = 1000
"""Elements of one set or dict in a result: with chosen hashes, building it costs the square of their number."""
_PIPE_BYTES = 2**20
"""At least the capacity of a pipe, so that one read takes everything that an ended process left in it."""
_PYTHON = [sys.executable, "-P", "-s", "-S"]
"""Without a script's folder and without site-packages."""
_IMPORT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from components.grading.sandbox.{{module}} import {{function}}
del sys.path[0]
{{function}}()
"""
_CHILD = _IMPORT.format(module="child", function="main")


@dataclass(frozen=True, slots=True)
class Returned:
    """The plain data that a call returned."""

    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that did not return plain data, and what it did instead."""

    reason: str


Outcome = Returned | Failed


def run(code: str, calls: Sequence[str]) -> list[Outcome]:
    """Run `code` in a sandbox of its own and return the value of each of the calls, which are Python expressions.

    The code may forge what comes back, so compare a value only with one that the code cannot know.
    Raises PipelineError where the sandbox cannot be set up; nothing that the code does raises anything.
    """
    try:
        transcript = _run_process(code, calls)
    except OSError as error:
        raise _unavailable(str(error)) from None
    lines = transcript.sent.split(b"\n", len(calls) + 1)[:-1]
    outcomes = [_outcome(bytes(line)) for line in lines]
    last_printed = transcript.printed.decode(errors="replace").strip().rpartition("\n")[2]
    is_confined = outcomes.pop(0) if outcomes else Failed(f"{transcript.ending}; {last_printed}")
    if isinstance(is_confined, Failed):
        raise _unavailable(is_confined.reason)
    return outcomes + [Failed(f"was not finished: {transcript.ending}")] * (len(calls) - len(outcomes))


def require_sandbox() -> None:
    """Raise PipelineError unless code can be run in a sandbox on this machine, and the sandbox is tight."""
    attempts = ["__import__('os').listdir('/')", "open('/proc/self/environ')", "__import__('os').fork()"]
    two, *outcomes = run("", ["1 + 1", *attempts])
    if two != Returned(2):
        raise _unavailable(f"1 + 1 gives {two}")
    for attempt, outcome in zip(attempts, outcomes, strict=True):
        if not (isinstance(outcome, Failed) and "PermissionError" in outcome.reason):
            raise _unavailable(f"{attempt} is not denied")


def _unavailable(reason: str) -> PipelineError:
    return PipelineError(
        f"the sandbox for code answers cannot be set up: {reason}; it needs Linux on x86_64 or aarch64 with seccomp "
        "and Landlock (5.13 or newer, and `landlock` in /sys/kernel/security/lsm); elsewhere, leave out the problems "
        "whose answers are unit tests"
    )


@dataclass(slots=True)
class _Transcript:
    """What came out of a process."""

    sent: bytearray
    printed: bytearray
    ending: str = ""
    """Why there is no more of it."""


def _run_process(code: str, calls: Sequence[str]) -> _Transcript:
    """Run the request in a new process, which has ended on return. OSError where it cannot be started."""
    with _start(code, calls) as process:
        try:
            transcript = _watch(process)
        finally:
            process.kill()  # it cannot have started others
    transcript.ending = transcript.ending or _how_it_ended(process.returncode)
    return transcript


def _start(code: str, calls: Sequence[str]) -> subprocess.Popen[bytes]:
    files, folders = _readable_paths()
    with os.fdopen(os.memfd_create("request"), "w+b") as request:
        marshal.dump((code, list(calls), files, folders, os.getpid()), request)
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
def _readable_paths() -> tuple[list[str], list[str]]:
    """The files that the interpreter opens to import its standard library, and the folders that it lists."""
    script = _IMPORT.format(module="confinement", function="print_readable_paths")
    try:
        printed = subprocess.run([*_PYTHON, "-c", script], capture_output=True, env=_environment(), cwd="/", check=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{sys.executable} does not start: {error.stderr.decode(errors='replace')[-200:]}") from None
    files, folders = json.loads(printed.stdout)
    return files, folders


def _environment() -> dict[str, str]:
    """Equal hashes in every run, so that sets have one order; and what some interpreters need to start at all."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PYTHONHASHSEED": "0", **needed}


def _watch(process: subprocess.Popen[bytes]) -> _Transcript:
    """Read until the process has ended or exceeded a limit.

    Not until its pipes are closed: another process that this one forked meanwhile may hold them open.
    """
    transcript = _Transcript(bytearray(), bytearray())
    limit_s, started = _MAX_START_S, time.monotonic()
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
            if max(len(transcript.sent), len(transcript.printed)) > MAX_OUTPUT_BYTES:
                transcript.ending = f"it wrote more than {MAX_OUTPUT_BYTES / 2**20:g} MiB"
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


def _outcome(line: bytes) -> Outcome:
    try:
        match json.loads(line):
            case ["returned", content]:
                return Returned(decode(content))
            case ["failed", ["str", _] as content]:
                return Failed(str(decode(content)))
    except (ValueError, RecursionError):
        pass
    return Failed("returned nothing that can be read")


_SCALARS: dict[str, Callable[[str], object]] = {
    "int": lambda digits: int(digits, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts.split())),
    "str": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
}
_SEQUENCES: dict[str, Callable[[list[Any]], object]] = {"list": list, "tuple": tuple}
_HASHED: dict[str, Callable[[list[Any]], object]] = {"set": set, "frozenset": frozenset, "dict": dict}


def decode(sent: object) -> object:
    """Return the value that the parsed JSON of `encode` stands for; NotPlainDataError for any other JSON.

    Exact instances of built-in types, nothing else: comparing them runs no code but Python's own.
    """
    try:
        return _decode(sent, MAX_DEPTH)
    except (ValueError, TypeError, LookupError, OverflowError):
        raise NotPlainDataError("nothing that can be read") from None


def _decode(sent: object, depth: int) -> object:
    match sent:
        case None | bool():
            return sent
        case [str(kind), str(content)]:
            return _SCALARS[kind](content)
        case [str(kind), list(parts)] if depth > 0 and (kind in _SEQUENCES or len(parts) <= _MAX_HASHED_PARTS):
            return (_SEQUENCES | _HASHED)[kind]([_decode(part, depth - 1) for part in parts])
    raise ValueError
