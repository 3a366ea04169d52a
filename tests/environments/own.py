"""Environments as users write them, good and bad; a process of the pool imports them from here."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

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
        """Return the number of the turn, its text and the question; the number of its process for the turn "pid"."""
        self._num_turns += 1
        answer = f"{self._num_turns} {text} {self._question} {os.getpid() if text == 'pid' else ''}"
        return Observation(answer.strip(), done=text == "end", rewards={"turns": self._num_turns * self._reward})


class Noted(Counting):
    """Notes in a file the turns that reach it."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    def step(self, text: str) -> Observation:
        """Answer as others do."""
        with self._file.open("a", encoding="utf-8") as notes:
            notes.write(f"{self._question} {text}\n")
        return super().step(text)


class Slow(Counting):
    """Takes half a second for a turn that says so."""

    def step(self, text: str) -> Observation:
        """Answer as others do, later."""
        time.sleep(0.5 * text.startswith("slow"))
        return super().step(text)


class Closing(Counting):
    """Notes in a file that it is closed, which may never end."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    def reset(self, problem: Problem) -> None:
        """Fail for a question that asks for it."""
        super().reset(problem)
        self._last = ""
        if problem.question == "fail":
            raise LookupError

    def close(self) -> None:
        """Note it; fail or hang where the last turn says so."""
        with self._file.open("a", encoding="utf-8") as notes:
            notes.write("closed\n")
        while self._last == "hang":
            time.sleep(1)
        raise LookupError

    def step(self, text: str) -> Observation:
        """Answer as others do."""
        self._last = text
        if text == "fail":
            raise LookupError
        return super().step(text)


class Crowded(Counting):
    """Fails where the process has other environments, as where these have used up the memory."""

    _num_alive: ClassVar[int] = 0

    def reset(self, problem: Problem) -> None:
        """Begin."""
        Crowded._num_alive += 1
        super().reset(problem)

    def step(self, text: str) -> Observation:
        """Answer as others do where it is alone."""
        if Crowded._num_alive > 1 and text == "memory":
            raise MemoryError
        if Crowded._num_alive > 1 and text == "map":
            raise OSError(12, "Cannot allocate memory")
        if Crowded._num_alive > 1 and text == "abort":
            os.abort()
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

    def _address(self, _: str) -> Any:
        raise LookupError(object())

    def _heartbeats(self, _: str) -> Any:
        def send() -> None:
            while True:
                self._write("", b"alive\n")
                time.sleep(0.05)

        threading.Thread(target=send, daemon=True).start()
        self._hang("")

    def _fork(self, _: str) -> Any:
        os.fork()
        return Observation("forked")

    def _write(self, _: str, line: bytes = b"\x00{]\n") -> Any:
        for descriptor in range(3, 30):
            try:
                os.write(descriptor, line)
            except OSError:
                continue
        return Observation("written")

    def _start(self, _: str) -> Any:
        return Observation(str(subprocess.Popen(_SLEEP).pid))

    def _session(self, _: str) -> Any:
        return Observation(str(subprocess.Popen(_SLEEP, start_new_session=True).pid))

    def _daemon(self, _: str) -> Any:
        code = f"""
import subprocess
print(subprocess.Popen({_SLEEP}, start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
        return Observation(subprocess.check_output([sys.executable, "-c", code], text=True))


_SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


class NeedsSize(Counting):
    """Has an argument without a default, and accepts few values of it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size == 0:
            raise ValueError("size is 0")
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
        """Answer nothing."""
        return Observation()


class NoStep:
    """Lacks a method."""

    def reset(self, problem: Problem) -> None:
        """Begin."""
