"""The sandbox: runs code that nobody has read, and tells what calls of it give."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from components.grading.sandbox.decode import decode
from components.grading.sandbox.process import run_process
from components.shared.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Gave:
    """A call that gave plain data."""

    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that did not, and what it did instead."""

    reason: str


Outcome = Gave | Failed


def run(code: str, calls: Sequence[str]) -> list[Outcome]:
    """Run `code` in a sandbox of its own and return what each of the calls, Python expressions, then gives.

    The code may make up what comes back, so that a value is worth something only beside one that the code cannot know.
    PipelineError where the sandbox cannot be set up; nothing that the code does raises anything.
    """
    try:
        transcript = run_process(code, calls)
    except OSError as error:
        raise PipelineError(_refusal(str(error))) from None
    lines = transcript.sent.split(b"\n", len(calls) + 1)[:-1]
    outcomes = [_outcome(bytes(line)) for line in lines]
    is_confined = outcomes.pop(0) if outcomes else Failed(f"{transcript.ending}; {_end_of(transcript.printed)}")
    if isinstance(is_confined, Failed):
        raise PipelineError(_refusal(is_confined.reason))
    return outcomes + [Failed(f"was not finished: {transcript.ending}")] * (len(calls) - len(outcomes))


def require_sandbox() -> None:
    """Raise PipelineError unless code can be run in a sandbox here, and finds in it that the doors are closed."""
    doors = ["__import__('os').listdir('/')", "open('/proc/self/environ')", "__import__('os').fork()"]
    two, *outcomes = run("", ["1 + 1", *doors])
    if two != Gave(2):
        raise PipelineError(_refusal(f"1 + 1 gives {two}"))
    for door, outcome in zip(doors, outcomes, strict=True):
        if not (isinstance(outcome, Failed) and "PermissionError" in outcome.reason):
            raise PipelineError(_refusal(f"{door} is not denied"))


def _outcome(line: bytes) -> Outcome:
    try:
        match json.loads(line):
            case ["gave", content]:
                return Gave(decode(content))
            case ["failed", ["str", _] as content]:
                return Failed(str(decode(content)))
    except (ValueError, RecursionError):
        pass
    return Failed("gave nothing that can be read")


def _end_of(printed: bytearray) -> str:
    return printed.decode(errors="replace").strip().rpartition("\n")[2]


def _refusal(reason: str) -> str:
    return (
        f"the sandbox for code answers cannot be set up: {reason}; it takes Linux on x86_64 or aarch64 with seccomp "
        "and Landlock (5.13 or newer, and `landlock` in /sys/kernel/security/lsm); elsewhere, leave out the problems "
        "whose answers are tests"
    )
