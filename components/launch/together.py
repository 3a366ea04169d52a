"""How a stage is run in several processes: on this machine through torchrun's launcher, or on a cluster."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType

from components.launch.cluster import current
from components.launch.job import Job, called
from components.launch.rank_errors import error_of_ranks
from components.shared.config import Config
from components.shared.errors import RetryableError

_MARGIN_S = 5.0
"""Time that the launcher has beyond the ranks' own to end them."""


def run_together(
    function: str,
    config: Config,
    folders: Mapping[str, Path],
    outputs: Mapping[str, Path] = MappingProxyType({}),
    *,
    num_processes: int,
    work: Path,
    grace_s: float,
    with_samplers: bool = False,
) -> dict[str, float]:
    """Call `package.module:function` with config, folders and outputs in that many processes.

    Returns what the first of them returns. A single one is this process itself, unless it is to be on a cluster. What
    ends one of them ends all: the error is the one that was the cause. Where others make the call, this process imports
    nothing of the function. `with_samplers` has a cluster's vLLM servers run beside them.
    """
    cluster = current()
    if cluster is None and num_processes == 1:
        return called(function, config, {**folders, **outputs})
    job = Job(
        folder=(work / "launch").resolve(),
        function=function,
        config=config.model_dump(mode="json"),
        folders={name: str(path.resolve()) for name, path in folders.items()},
        outputs={name: str(path.resolve()) for name, path in outputs.items()},
        num_processes=num_processes,
        grace_s=grace_s,
        with_samplers=with_samplers,
    )
    if cluster is not None:
        from components.launch.trainjob.run import run_on_cluster

        return run_on_cluster(job, cluster)
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
    """The error that ended the job."""
    said = error_of_ranks(job)
    if said is not None:
        return said
    if exit_code == RetryableError.exit_code:
        took = f"told to stop, but the step at hand took longer than {job.grace_s:g} s"
        return RetryableError(f"{took}; run the same again to go on from the last checkpoint")
    return RetryableError("the launcher of the processes was killed; run the same again to go on")
