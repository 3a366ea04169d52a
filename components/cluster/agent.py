"""torchrun's own launcher, on this machine: `python -m components.cluster.agent FOLDER PARENT` starts the ranks.

It ends when they have, and ends them all when one of them fails, or the process with the number PARENT ends.
"""

import logging
import math
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from components.cluster.job import Failure, Job
from components.cluster.tether import die_with_parent
from components.shared.errors import RetryableError

_AFTER_FAILURE_S = 3


def run_ranks(job: Job, config: LaunchConfig, *, node: int) -> int:
    """Start the ranks of a node and wait for their end; return the exit code of the first that failed, or 0."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.nproc_per_node)))
    # Whatever ends a rank is told by `run_together`, in a line.
    for part in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    config.monitor_interval = 0.1
    config.shutdown_timeout = math.ceil(job.grace_s) + 1
    # For the others where a rank has failed: torchrun's half a minute would be for nothing, as they wait for that one.
    PContext.close.__defaults__ = (None, _AFTER_FAILURE_S)
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "components.cluster.rank", str(job.folder), str(os.getpid()))
    except ChildFailedError as error:
        failures = [Failure(rank, each.exitcode, each.timestamp) for rank, each in error.failures.items()]
        job.write_ended(node, failures)
        first = min(failures, key=lambda each: each.time).exit_code
        return first if first > 0 else 128 - first
    except SignalException:
        return RetryableError.exit_code
    return 0


def _on_this_machine(job: Job) -> LaunchConfig:
    return LaunchConfig(
        run_id="ranks",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        signals_to_handle="SIGTERM",
        max_restarts=0,
        # Beside what else the job leaves: by default a folder among the temporary files, which nobody removes.
        logs_specs=DefaultLogsSpecs(log_dir=str(job.folder / "torchrun")),
    )


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    # A terminal sends these to every process. The parent passes requests on, and ranks look out for themselves.
    for request in (signal.SIGINT, signal.SIGHUP):
        signal.signal(request, signal.SIG_IGN)
    this = Job.read(Path(sys.argv[1]))
    sys.exit(run_ranks(this, _on_this_machine(this), node=0))
