"""How a stage is run in several processes: on this machine through torchrun's launcher, or on a cluster."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from components.cluster.cluster import current
from components.cluster.job import Job, called
from components.cluster.rank_errors import error_of_ranks
from components.policy.shutdown import on_stop_signal
from components.shared.config import Config
from components.shared.errors import RetryableError, StoppedError

_LOOK_S = 1.0
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
        from components.cluster.trainjob.run import run_on_cluster

        return run_on_cluster(job, cluster)
    job.write()
    exit_code, told = _launch(job)
    results = job.results()
    if results is None:
        raise _cause(job, exit_code, told)
    return results[0]


def _launch(job: Job) -> tuple[int, bool]:
    """Run the launcher until it ends; return its exit code and whether this process was told to stop meanwhile.

    The request is passed on to the launcher, which then has the time that ranks need; a second one ends all at once.
    """
    command = [sys.executable, "-m", "components.cluster.agent", str(job.folder), str(os.getpid())]
    told = threading.Event()
    with subprocess.Popen(command) as agent:

        def pass_on() -> None:
            told.set()
            agent.terminate()

        with on_stop_signal(pass_on, agent.kill):  # and with the launcher its ranks
            while not told.is_set():
                with suppress(subprocess.TimeoutExpired):
                    return agent.wait(_LOOK_S), told.is_set()
            try:
                return agent.wait(job.grace_s + 2 * _MARGIN_S), True
            except subprocess.TimeoutExpired:
                agent.kill()
                return agent.wait(), True


def _cause(job: Job, exit_code: int, told: bool) -> Exception:
    """The error that ended the job."""
    said = error_of_ranks(job)
    if said is not None:
        return StoppedError(str(said)) if told and isinstance(said, RetryableError) else said
    if exit_code == RetryableError.exit_code:
        took = f"told to stop, but the step at hand took longer than {job.grace_s:g} s"
        return StoppedError(f"{took}; run the same again to go on from the last checkpoint")
    if told:
        lost = "told to stop: ended at once, the step under way is lost"
        return StoppedError(f"{lost}; run the same again to go on from the last checkpoint")
    return RetryableError("the launcher of the processes was killed; run the same again to go on")
