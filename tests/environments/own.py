"""Environments as users write them, good and bad; a process of the pool imports them from here."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from components.environments.environment import Observation
from components.shared.problem import Problem


class Counting:
    """Counts turns, and gives back the text of each with its number."""

    def __init__(self, reward: float = 1.0) -> None:
        self._reward = reward

    def reset(self, problem: Problem) -> None:
        """Begin to count."""
        self._question, self._num_turns = problem.question, 0

    def step(self, text: str) -> Observation:
        """Return the number of the turn, its text and the question; the number of the process where it is asked."""
        self._num_turns += 1
        answer = f"{self._num_turns} {text} {self._question} {os.getpid() if text == 'pid' else ''}"
        return Observation(answer.strip(), done=text == "end", rewards={"turns": self._num_turns * self._reward})


class Noted(Counting):
    """Notes in a file what it is asked."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    def step(self, text: str) -> Observation:
        """Answer as others do."""
        with self._file.open("a", encoding="utf-8") as notes:
            notes.write(f"{self._question} {text}\n")
        return super().step(text)


class Hostile(Counting):
    """Does what the text of a turn says."""

    def step(self, text: str) -> Any:
        """Do it, or count."""
        return getattr(self, f"_{text}", super().step)(text)

    def _hang(self, _: str) -> Any:
        while True:
            time.sleep(1)

    def _spin(self, _: str) -> Any:
        while True:
            pass

    def _exit(self, _: str) -> Any:
        os._exit(3)

    def _crash(self, _: str) -> Any:
        ctypes.string_at(0)

    def _kill(self, _: str) -> Any:
        os.kill(os.getpid(), 9)

    def _raise(self, _: str) -> Any:
        raise LookupError("no such\nthing")

    def _quit(self, _: str) -> Any:
        sys.exit("done")

    def _interrupt(self, _: str) -> Any:
        raise KeyboardInterrupt

    def _unprintable(self, _: str) -> Any:
        class Unprintable(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise ValueError

        raise Unprintable

    def _flood(self, _: str) -> Any:
        return Observation("é" * 5_000_000)

    def _memory(self, _: str) -> Any:
        return Observation("x" * 2**40)

    def _nothing(self, _: str) -> Any:
        return None

    def _text(self, _: str) -> Any:
        return Observation(b"text")  # type: ignore[arg-type]

    def _lie(self, _: str) -> Any:
        return Observation("", done="yes")  # type: ignore[arg-type]

    def _nan(self, _: str) -> Any:
        return Observation("", rewards={"x": float("nan")})

    def _huge(self, _: str) -> Any:
        return Observation("", rewards={"x": 10**400})

    def _names(self, _: str) -> Any:
        return Observation("", rewards={1: 1.0})  # type: ignore[dict-item]

    def _surrogate(self, _: str) -> Any:
        return Observation("a\ud800b")

    def _print(self, _: str) -> Any:
        os.write(1, b"x" * 2**20)
        os.write(2, b"x" * 2**20)
        return Observation("printed")

    def _close(self, _: str) -> Any:
        os.closerange(0, 100)
        return Observation("closed")

    def _fork(self, _: str) -> Any:
        os.fork()
        return Observation("forked")

    def _write(self, _: str) -> Any:
        for descriptor in range(3, 30):
            try:
                os.write(descriptor, b"\x00{]\n")
            except OSError:
                continue
        return Observation("written")

    def _start(self, _: str) -> Any:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return Observation(str(process.pid))


class NeedsSize(Counting):
    """Has an argument without a default."""

    def __init__(self, size: int) -> None:
        super().__init__()


class NoStep:
    """Lacks a method."""

    def reset(self, problem: Problem) -> None:
        """Begin."""


NOT_CALLABLE = 3
