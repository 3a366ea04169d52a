"""Environments as users write them, good and bad; a process of the pool imports them from here."""
# ruff: noqa: D102  # what a method does is said of its class

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from components.environments.environment import Observation
from components.shared.problem import Problem


class Counting:
    """Counts turns, and gives back the text of each with its number."""

    def __init__(self, reward: float = 1.0) -> None:
        self._reward = reward

    def reset(self, problem: Problem) -> None:
        self._question, self._num_turns = problem.question, 0

    def step(self, text: str) -> Observation:
        self._num_turns += 1
        answer = f"{self._num_turns} {text} {self._question}"
        return Observation(answer, done=text == "end", rewards={"turns": self._num_turns * self._reward})


class Noted(Counting):
    """Notes in a file the turns that reach it."""

    def __init__(self, file: str, reward: float = 1.0) -> None:
        super().__init__(reward)
        self._file = Path(file)

    def step(self, text: str) -> Observation:
        with self._file.open("a", encoding="utf-8") as notes:
            notes.write(f"{self._question} {text}\n")
        return super().step(text)


class Slow(Counting):
    """Takes half a second for a turn that says so."""

    def step(self, text: str) -> Observation:
        time.sleep(0.5 * text.startswith("slow"))
        return super().step(text)


class Closing(Noted):
    """Notes in a file that it is closed, which may never end."""

    def reset(self, problem: Problem) -> None:
        super().reset(problem)
        self._last = ""
        if problem.question == "fail":
            raise LookupError

    def close(self) -> None:
        with self._file.open("a", encoding="utf-8") as notes:
            notes.write("closed\n")
        while self._last == "hang":
            time.sleep(1)
        raise LookupError

    def step(self, text: str) -> Observation:
        self._last = text
        if text == "fail":
            raise LookupError
        return Counting.step(self, text)


class Crowded(Counting):
    """Fails where the process has other environments, as where these have used up the memory."""

    _num_alive: ClassVar[int] = 0

    def reset(self, problem: Problem) -> None:
        Crowded._num_alive += 1
        super().reset(problem)

    def step(self, text: str) -> Observation:
        if Crowded._num_alive > 1 and text == "abort":
            os.abort()
        if Crowded._num_alive > 1 and text in ("memory", "map"):
            raise MemoryError if text == "memory" else OSError(12, "Cannot allocate memory")
        return super().step(text)


_SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
_DAEMON = f"""
import subprocess
print(subprocess.Popen({_SLEEP}, start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""


def _raise(error: BaseException) -> NoReturn:
    raise error


def _write(line: bytes = b"\x00{]\n") -> None:
    for descriptor in range(3, 30):
        with suppress(OSError):
            os.write(descriptor, line)


def _observed(deed: Callable[..., object], *arguments: object) -> Observation:
    return Observation(str(deed(*arguments)))


def _send_heartbeats() -> None:
    while True:
        _write(b"alive\n")
        time.sleep(0.05)


def _heartbeats() -> None:
    threading.Thread(target=_send_heartbeats, daemon=True).start()
    time.sleep(1000)


def _spin() -> None:
    while True:
        pass


_DEEDS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(1000),
    "spin": _spin,
    "exit": lambda: os._exit(3),
    "crash": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), 9),
    "raise": lambda: _raise(LookupError("no such\nthing")),
    "quit": lambda: sys.exit("done"),
    "address": lambda: _raise(LookupError(object())),
    "heartbeats": _heartbeats,
    "flood": lambda: Observation("é" * 5_000_000),
    "memory": lambda: Observation("x" * 2**40),
    "nothing": lambda: None,
    "text": lambda: Observation(b"text"),  # type: ignore[arg-type]
    "lie": lambda: Observation("", done="yes"),  # type: ignore[arg-type]
    "nan": lambda: Observation("", rewards={"x": float("nan")}),
    "names": lambda: Observation("", rewards={1: 1.0}),  # type: ignore[dict-item]
    "surrogate": lambda: Observation("a\ud800b"),
    "print": lambda: Observation(str(os.write(1, b"x" * 2**20) + os.write(2, b"x" * 2**20))),
    "close": lambda: _observed(os.closerange, 0, 100),
    "fork": lambda: Observation(str(os.fork() > 0)),
    "write": lambda: _observed(_write),
    "start": lambda: Observation(str(subprocess.Popen(_SLEEP).pid)),
    "session": lambda: Observation(str(subprocess.Popen(_SLEEP, start_new_session=True).pid)),
    "daemon": lambda: Observation(subprocess.check_output([sys.executable, "-c", _DAEMON], text=True)),
}
"""What `Hostile` does in a turn with this text."""


class Hostile(Counting):
    """Does what the text of a turn says, or counts."""

    def step(self, text: str) -> Any:
        return _DEEDS[text]() if text in _DEEDS else super().step(text)


class NeedsSize(Counting):
    """Has an argument without a default, and accepts few values of it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size == 0:
            raise ValueError("size is 0")
        if size < 0:
            time.sleep(1000)
        if size > 100:
            os._exit(4)
        range(size)
        bytearray(size << 30)


class NeedsFile(Counting):
    """Reads a file that is on another machine."""

    def __init__(self) -> None:
        super().__init__()
        Path("/no/such/file").read_bytes()


class StepWithoutText(Counting):
    """Has a method of another form."""

    def step(self) -> Observation:  # type: ignore[override]
        return Observation()


class NoStep:
    """Lacks a method."""

    def reset(self, problem: Problem) -> None: ...
