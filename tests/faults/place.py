"""A stage run from the command line, as often as it takes, with its processes, checkpoints and outputs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.shared.config import Config
from components.shared.environment import JOURNAL_VARIABLE, WORK_VARIABLE
from components.shared.work import latest_checkpoint
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.train import STAGE
from tests.train_grpo.settings import grpo_config

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
"""For what takes about ten seconds on an idle machine."""
_KINDS = {"components.workers.server": "grader", "components.cluster.agent": "launcher"}


def fault_config(reward: str = "shortness", *, grace_s: float = 20, **changes: Any) -> TrainGRPOConfig:
    """Return a small run with one of `rewards` and a checkpoint after every step."""
    return grpo_config(
        **{"prompts_per_step": 2, "group_size": 2, **changes},
        reward__weights={"accuracy": 1.0, f"tests.faults.rewards:{reward}": 1.0},
        checkpoint={"every_steps": 1, "keep_last": 2, "keep_best": False, "grace_s": grace_s},
    )


class Running(NamedTuple):
    """A process of a run that is alive."""

    pid: int
    kind: str
    """`command`, `launcher`, `rank 0`, `rank 1` ..., `grader`, or `other` for what libraries ask the system."""


@dataclass
class Place:
    """The folder of one run: its outputs, its unfinished work, its journal and its temporary files."""

    folder: Path
    inputs: dict[str, Path]
    starts: int = 0

    def start(self, config: Config, **variables: str) -> "subprocess.Popen[bytes]":
        """Start the stage; its output is in `out` and `err` afterwards."""
        self.starts += 1
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        params = self.folder / "params.yaml"
        params.write_text(yaml.safe_dump({STAGE.name: config.model_dump(mode="json")}))
        folders = self.inputs | {name: self.folder / name for name in STAGE.outputs}
        options = [word for name, path in folders.items() for word in (f"--{name.replace('_', '-')}", str(path))]
        variables = {
            "OMP_NUM_THREADS": "1",
            JOURNAL_VARIABLE: str(self.folder / "journal.jsonl"),
            WORK_VARIABLE: str(self.folder / "work"),
            "TMPDIR": str(self.folder / "tmp"),
            # Even graders, which get no other variable, inherit it: it identifies all processes of the run.
            "PYTHONPATH": str(self.folder),
            **variables,
        }
        with self._log("out").open("wb") as out, self._log("err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", f"components.{STAGE.name}", "--params", str(params), *options],
                cwd=ROOT,
                env=os.environ | variables,
                stdout=out,
                stderr=err,
            )

    def run(self, config: Config, *, within_s: float = TIMEOUT_S, **variables: str) -> int:
        """Start the stage, wait for its end and return the exit code."""
        return self.start(config, **variables).wait(within_s)

    @property
    def out(self) -> str:
        """Standard output of the last start."""
        return self._log("out").read_text()

    @property
    def err(self) -> str:
        """Standard error of the last start."""
        return self._log("err").read_text()

    @property
    def error_line(self) -> str:
        """The one line of standard error that begins with `error: `."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}-{self.starts}.txt"

    def processes(self) -> list[Running]:
        """Every living process of the run."""
        alive = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                variables = (path / "environ").read_bytes().split(b"\0")
                words = (path / "cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if any(b"PYTHONPATH=" in each and os.fsencode(self.folder) in each for each in variables):
                alive.append(Running(int(path.name), _kind(words, variables)))
        return alive

    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint."""
        folders = (self.folder / "work").glob("*/*/checkpoints/step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in folders)

    def wait_for_checkpoint(self, step: int, command: "subprocess.Popen[bytes]") -> None:
        """Wait for the checkpoint of this step or of a later one."""
        assert within(TIMEOUT_S, lambda: self.checkpoints()[-1:] >= [step] or command.poll() is not None)
        assert command.poll() is None, self.err

    def assert_latest_checkpoint(self, step: int) -> None:
        """The latest checkpoint is of this step and complete, and nothing half-written lies beside it."""
        (folder,) = (self.folder / "work").glob("*/*/checkpoints")
        latest = latest_checkpoint(folder, stage=STAGE.name)
        assert latest is not None
        assert latest.step == step
        assert not list(folder.glob(".step-*"))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file in JSON lines, such as the journal of all starts (journal.jsonl)."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def results(self) -> dict[str, bytes]:
        """The bytes that no fault may change; those of the policy differ from its reference."""
        weights = self.folder / "policy" / "model.safetensors"
        assert weights.read_bytes() != (self.inputs["reference"] / weights.name).read_bytes(), "nothing was learned"
        return {path.name: path.read_bytes() for path in (weights, self.folder / "training" / "steps.jsonl")}

    def end(self) -> None:
        """Kill every process of the run."""
        for each in self.processes():
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)

    def assert_nothing_runs(self) -> None:
        """Every process of the run ends."""
        assert within(TIMEOUT_S, lambda: not self.processes()), self.processes()

    def assert_nothing_left(self, num_temporary: int = 0) -> None:
        """No process or unfinished work of the run is left, and at most so many temporary folders.

        A command that is killed outright leaves the one in which its ranks met.
        """
        self.assert_nothing_runs()
        assert len(list((self.folder / "tmp").iterdir())) <= num_temporary
        assert not [path for path in (self.folder / "work").glob("*/*") if path.is_dir()]


def _kind(words: list[str], variables: list[bytes]) -> str:
    module = next((word for word in words if word.startswith("components.")), None)
    if module == "components.cluster.rank":
        rank = next(each for each in variables if each.startswith(b"RANK="))
        return f"rank {rank.removeprefix(b'RANK=').decode()}"
    return _KINDS.get(module, "command") if module else "other"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
