"""One of the two trainers that are compared: a live process that works only when it is asked to (see worker.py)."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Reply = dict[str, Any]


class Side:
    """A trainer in a process of its own, so that its peak memory is its own."""

    def __init__(self, script: Path, python: Path, case: Path, environment: Mapping[str, str]) -> None:
        self._log = case.parent / f"{case.stem}.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, script, case],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
            )
        self.about: Reply = self._reply()["ready"]

    def step(self) -> Reply:
        """Have it take one optimizer step, and return worker.py's `Step`."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._reply()

    def cpu_s(self) -> float:
        """Return the processor time of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it, even where it is still starting because another one failed."""
        self._process.kill()
        self._process.wait()

    def _reply(self) -> Reply:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise SystemExit(f"{self._log.stem} ended early:\n{self._log.read_text(encoding='utf-8')[-3000:]}")
        reply: Reply = json.loads(line)
        return reply


def take_turns(
    sides: Mapping[str, Side], rounds: int, called: str, ended: Callable[[str, str, Reply], None]
) -> tuple[dict[str, list[Reply]], float]:
    """Return the steps of each side, taken in turns, and the largest share of a core that a waiting side used.

    `ended` is told of each step as it ends: the side, the turn (`called` and its number), and the step.
    """
    steps: dict[str, list[Reply]] = {name: [] for name in sides}
    share = 0.0
    for number in range(1, rounds + 1):
        for name, side in sides.items():
            waiting = [other for other in sides.values() if other is not side]
            before, started = [other.cpu_s() for other in waiting], time.perf_counter()
            steps[name].append(side.step())
            turn_s = time.perf_counter() - started
            used = [other.cpu_s() - cpu_s for other, cpu_s in zip(waiting, before, strict=True)]
            share = max([share, *(cpu_s / turn_s for cpu_s in used)])
            ended(name, f"{called} {number} of {rounds}", steps[name][-1])
    return steps, share
