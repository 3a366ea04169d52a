"""Runs a stage's rank function in several processes: here, with torchrun's launcher, or as a TrainJob on a cluster."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from components.cluster.config import current_stage
from components.cluster.failures import error_of_ranks
from components.cluster.job import Job, RankFunction, name_of
from components.policy.shutdown import on_stop_signal
from components.shared.config import Config
from components.shared.environment import ON_LOOPBACK, STORE_VARIABLE
from components.shared.errors import RetryableError, StoppedError
from components.shared.execution import Place, forget_place

_POLL_S = 1.0
_MARGIN_S = 10.0  # time for the launcher to end after its ranks' grace period
_RESUME = "start the same run again to resume from the last checkpoint"


def run_ranks(
    function: RankFunction,
    config: Config,
    folders: Mapping[str, Path],
    outputs: Mapping[str, Path] = MappingProxyType({}),
    *,
    num_processes: int,
    work: Path,
    grace_s: float,
    with_samplers: bool = False,
) -> dict[str, float]:
    """Call `function` with config, folders and outputs in `num_processes` processes; return the first one's result.

    Without a cluster, a single process is this one. If a process fails, all end, and its error is raised. A TrainJob
    has vLLM servers only `with_samplers`.
    """
    stage = current_stage()
    forget_place(work)
    if stage is None and num_processes == 1:
        return function(config, **folders, **outputs)
    job = Job(
        folder=(work / "launch").resolve(),
        function=name_of(function),
        config=config.model_dump(mode="json"),
        folders={name: str(path.resolve()) for name, path in folders.items()},
        outputs={name: str(path.resolve()) for name, path in outputs.items()},
        num_processes=num_processes,
        grace_s=grace_s,
        with_samplers=with_samplers,
    )
    if stage is None:
        result = _run_here(job)
    else:
        from components.cluster.trainjob import run_on_cluster

        result = run_on_cluster(job, stage)
    # For the lineage: the first rank may have run on another machine than this process.
    outcome = job.outcome(0) or {}
    if "place" in outcome:
        Place.model_validate(outcome["place"]).write(work)
    return result


def _run_here(job: Job) -> dict[str, float]:
    """Run the ranks on this machine; return the first one's result. Raises StoppedError after a request to stop."""
    job.write()
    exit_code, stop_requested = _run_agent(job)
    results = job.results()
    if results is not None:
        return results[0]
    error = error_of_ranks(job)
    if stop_requested and isinstance(error, RetryableError):
        raise StoppedError(str(error))
    if error is not None:
        raise error
    if exit_code == RetryableError.exit_code:
        limit = f"checkpoint.grace_s ({job.grace_s:g} s)"
        raise StoppedError(f"stopped during a step, which took longer than {limit}; {_RESUME}")
    if stop_requested:
        raise StoppedError(f"stopped at once by a second request: the current step is lost; {_RESUME}")
    raise RetryableError("the launcher of the processes was killed; start the same run again to resume")


def _run_agent(job: Job) -> tuple[int, bool]:
    """Run the launcher; return its exit code and whether this process was asked to stop. A second request kills it."""
    command = [sys.executable, "-m", "components.cluster.agent", str(job.folder), str(os.getpid())]
    variables = {**ON_LOOPBACK, **os.environ}
    stop_requested = threading.Event()
    # Ranks meet at a file that only this user can open: whoever can write to it can run code in them.
    with (
        tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as private,
        subprocess.Popen(command, env={**variables, STORE_VARIABLE: f"file://{private}/store"}) as agent,
    ):

        def stop() -> None:
            stop_requested.set()
            agent.terminate()

        with on_stop_signal(stop, agent.kill):  # the ranks die with the launcher
            while not stop_requested.is_set():  # which is checked once a second, to limit the time after a request
                with suppress(subprocess.TimeoutExpired):
                    return agent.wait(_POLL_S), stop_requested.is_set()
            try:
                return agent.wait(job.grace_s + _MARGIN_S), True
            except subprocess.TimeoutExpired:
                agent.kill()
                return agent.wait(), True
