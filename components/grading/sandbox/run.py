"""The sandbox: runs untrusted code in a separate process, and returns the values of calls.

The process gets only its request, and is killed if it exceeds a limit. Nothing that it sends is trusted.
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
from components.grading.sandbox.confinement import CPU_S, environment
from components.shared.errors import PipelineError

DEADLINE_S = 5
"""Time from the start of the code to the end of its last call; code that still computes then, rather than waits, may
continue up to its limit of processor time."""
MAX_OUTPUT_BYTES = 2**20
"""Maximum output of the code, and separately of its results."""
_MAX_START_S = 60  # time to start the interpreter; long, since a busy machine is slow
_MAX_COMPUTING_S = 60  # time in which the code uses its processor time; as long, since a busy machine is slow
_CHECK_EVERY_S = 0.1  # interval of checks after the deadline whether the code still computes
_MAX_HASHED_PARTS = 1000
"""Elements of one set or dict in a result: with colliding hashes, building it takes quadratic time."""
_PIPE_BYTES = 2**20
"""At least the capacity of a pipe, so that one read takes everything that an ended process left in it."""
_PYTHON = [sys.executable, "-P", "-s", "-S"]  # options: no script folder and no site-packages on the path
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
    """A call that did not return plain data."""

    reason: str


Outcome = Returned | Failed


def run(code: str, calls: Sequence[str]) -> list[Outcome]:
    """Run `code` in a new sandbox and return the outcome of each call, a Python expression.

    The code may forge results, so compare a value only with one that the code cannot know. Raises PipelineError if the
    sandbox cannot be set up; nothing that the code does can raise.
    """
    try:
        sent, printed, ending = _run_process(code, calls)
    except OSError as error:
        raise _unavailable(str(error)) from None
    # A line on the confinement and one per call; anything after them is dropped.
    outcomes = [_outcome(line) for line in sent.split(b"\n", len(calls) + 1)[:-1]]
    last_printed = printed.decode(errors="replace").strip().rpartition("\n")[2]
    confinement = outcomes.pop(0) if outcomes else Failed(f"{ending}; {last_printed}")
    if isinstance(confinement, Failed):
        raise _unavailable(confinement.reason)
    return outcomes + [Failed(f"was not finished: {ending}")] * (len(calls) - len(outcomes))


def require_sandbox() -> None:
    """Raise PipelineError unless the sandbox works on this machine and denies access to files and processes."""
    attempts = [
        "__import__('os').listdir('/')",
        "__import__('os').stat('/')",
        "open('/proc/self/environ')",
        "__import__('os').fork()",
    ]
    two, *outcomes = run("", ["1 + 1", *attempts])
    if two != Returned(2):
        raise _unavailable(f"1 + 1 gives {two}")
    for attempt, outcome in zip(attempts, outcomes, strict=True):
        if not (isinstance(outcome, Failed) and "PermissionError" in outcome.reason):
            raise _unavailable(f"{attempt} is not denied")


def _unavailable(reason: str) -> PipelineError:
    """The error for a machine on which the sandbox does not work."""
    return PipelineError(
        f"the sandbox for code answers cannot be set up: {reason}; it needs Linux on x86_64 or aarch64 with seccomp "
        "and Landlock (5.13 or newer, and `landlock` in /sys/kernel/security/lsm); elsewhere, leave out the problems "
        "whose answers are unit tests"
    )


def _run_process(code: str, calls: Sequence[str]) -> tuple[bytearray, bytearray, str]:
    """Make the calls in a new process until it ends; return what it sent and printed, and how it ended."""
    with _start(code, calls) as process:
        try:
            sent, printed, ending = _watch(process)
        finally:
            process.kill()  # it cannot have started other processes
    status = process.returncode
    if ending:  # a limit was exceeded; otherwise the process had ended before it was killed here
        return sent, printed, ending
    if status == -signal.SIGKILL:
        ending = f"it used more than {CPU_S} s of processor time, or was killed for its memory"
    else:
        ending = f"it crashed ({signal.Signals(-status).name})" if status < 0 else f"it ended with status {status}"
    return sent, printed, ending


def _start(code: str, calls: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process, which reads its request from an anonymous file."""
    with os.fdopen(os.memfd_create("request"), "w+b") as request:
        marshal.dump((code, list(calls), *_readable_paths(), os.getpid()), request)
        request.seek(0)
        return subprocess.Popen(
            [*_PYTHON, "-c", _CHILD],
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd="/",
            start_new_session=True,
        )


@functools.cache
def _readable_paths() -> tuple[list[str], list[str]]:
    """The files that the interpreter opens and the folders that it lists to import its standard library."""
    script = _IMPORT.format(module="confinement", function="print_readable_paths")
    try:
        printed = subprocess.run([*_PYTHON, "-c", script], capture_output=True, env=environment(), cwd="/", check=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{sys.executable} does not start: {error.stderr.decode(errors='replace')[-200:]}") from None
    files, folders = json.loads(printed.stdout)
    return files, folders


def _watch(process: subprocess.Popen[bytes]) -> tuple[bytearray, bytearray, str]:
    """Read until the process has ended or exceeded a limit; return what it sent and printed, and the limit, if any.

    It does not wait for its pipes to close: another process that the grader forked meanwhile may hold them open.
    """
    sent, printed = bytearray(), bytearray()
    deadline = time.monotonic() + _MAX_START_S
    has_ended, confined_at = False, None
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(process.pid), "rb", 0) as end:
        for source, buffer in ((process.stdout, sent), (process.stderr, printed), (end, None)):
            assert source is not None
            selector.register(source, selectors.EVENT_READ, buffer)
        while not has_ended:
            has_ended = _read(selector, max(0, deadline - time.monotonic()))
            if max(len(sent), len(printed)) > MAX_OUTPUT_BYTES:
                return sent, printed, f"it wrote more than {MAX_OUTPUT_BYTES / 2**20:g} MiB"
            now = time.monotonic()
            if sent and confined_at is None:  # from here on it is the code that takes time
                confined_at, deadline = now, now + DEADLINE_S
            if not has_ended and now > deadline:
                if confined_at is None:
                    return sent, printed, f"it took longer than {_MAX_START_S} s"
                # Code that computes, rather than waits, goes on until the limit of its processor time ends it.
                if now > confined_at + _MAX_COMPUTING_S or not _is_computing(process.pid):
                    return sent, printed, f"it took longer than {DEADLINE_S} s"
                deadline = now + _CHECK_EVERY_S
    return sent, printed, ""


def _is_computing(process: int) -> bool:
    """Whether a process is running, in disk sleep or a zombie (state R, D or Z), rather than waiting."""
    after_name = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2]
    return after_name.split()[0] in {"R", "D", "Z"}


def _read(selector: selectors.BaseSelector, timeout_s: float) -> bool:
    """Wait for output and store it in the buffers; return whether the process has ended."""
    has_ended = False
    for key, _ in selector.select(timeout_s):
        if key.data is None:  # the process itself
            has_ended = True
        elif chunk := os.read(key.fd, _PIPE_BYTES):
            key.data.extend(chunk)
        else:
            selector.unregister(key.fileobj)
    return has_ended


def _outcome(line: bytearray) -> Outcome:
    """The outcome of a call by the line that the process sent; any line is possible."""
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
    """Return the value that `encode` turned into this parsed JSON; raise NotPlainDataError for any other JSON.

    It consists only of built-in types, so comparing it runs no untrusted code.
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
