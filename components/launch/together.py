"""How a stage is run in several processes: on this machine through torchrun's launcher."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType

from components.launch.job import Job, called
from components.shared.config import Config
from components.shared.errors import PipelineError, RetryableError

_MARGIN_S = 5.0
"""Time that the launcher has beyond the ranks' own to end them."""
_LINES_SHOWN = 20


def run_together(
    function: str,
    config: Config,
    folders: Mapping[str, Path],
    outputs: Mapping[str, Path] = MappingProxyType({}),
    *,
    num_processes: int,
    work: Path,
    grace_s: float,
) -> dict[str, float]:
    """Call `package.module:function` with config, folders and outputs in that many processes.

    Returns what the first of them returns. A single one is this process itself. What ends one of them ends all: the
    error is the one that was the cause. This process imports nothing of the function where others call it.
    """
    if num_processes == 1:
        return called(function, config, {**folders, **outputs})
    job = Job(
        folder=(work / "launch").resolve(),
        function=function,
        config=config.model_dump(mode="json"),
        folders={name: str(path.resolve()) for name, path in folders.items()},
        outputs={name: str(path.resolve()) for name, path in outputs.items()},
        num_processes=num_processes,
        grace_s=grace_s,
    )
    job.write()
    exit_code = _launch(job)
    results = job.results()
    if exit_code or results is None:
        raise _cause(job, exit_code)
    return results[0]


def _launch(job: Job) -> int:
    """Run the launcher until it ends; a request to stop is passed on to it, and given the time it needs."""
    command = [sys.executable, "-m", "components.launch.agent", str(job.folder), str(os.getpid())]
    with subprocess.Popen(command) as agent, _passing_on(agent) as told:
        while True:
            try:
                return agent.wait(job.grace_s + 2 * _MARGIN_S if told else 1.0)
            except subprocess.TimeoutExpired:
                if told:
                    agent.kill()  # and with it the ranks


@contextmanager
def _passing_on(agent: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Pass requests to stop on to the launcher; what was requested is in the list."""
    told: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if not told:
            told.append(number)
            agent.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(job: Job, exit_code: int) -> Exception:
    """The error that ended the job: of what several ranks say, that which is not about the loss of another."""
    outcomes = {rank: job.outcome(rank) for rank in range(job.num_processes)}
    said = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and "error" in outcome}
    for rank, outcome in said.items():
        if outcome["exit_code"] != RetryableError.exit_code:
            return _as_error(job, rank, outcome)
    for rank, code in list(job.ended().items())[:1]:
        if rank not in said:
            return RetryableError(f"{_ending(rank, code)}; run the same again to go on from the last checkpoint")
        return RetryableError(said[rank]["error"])
    for outcome in said.values():
        return RetryableError(outcome["error"])
    if exit_code == RetryableError.exit_code:
        took = f"told to stop, but the step at hand took longer than {job.grace_s:g} s"
        return RetryableError(f"{took}; run the same again to go on from the last checkpoint")
    return RetryableError("the launcher of the processes was killed; run the same again to go on")


def _as_error(job: Job, rank: int, outcome: Mapping[str, str | int]) -> Exception:
    message = str(outcome["error"])
    if "errno" in outcome:
        return OSError(outcome["errno"], os.strerror(int(outcome["errno"])), outcome["file"])
    if outcome["exit_code"] == PipelineError.exit_code:
        return PipelineError(message)
    if rank == 0:
        return RuntimeError(f"rank 0: {message}")
    lines = job.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]
    return RuntimeError("\n".join([f"rank {rank}: {message}", *lines]))


def _ending(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} ended with exit code {code} and no word"
