"""torchrun's launcher, which starts the ranks of one node and ends them all when one of them fails.

`python -m components.cluster.agent FOLDER PARENT` starts all ranks of a job on this machine, and dies with the process
PARENT. `python -m components.cluster.agent FOLDER` starts those of one pod of a TrainJob, where Kubeflow Trainer sets
the variables that torchrun reads (PET_NNODES and others). Unlike torchrun, the launcher ends with the exit code of the
first rank to fail, which tells errors that a restart cannot cure (2) from those that may pass (75).
"""

import logging
import math
import os
import signal
import sys
import tempfile
from pathlib import Path

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, parse_args

from components.cluster.job import Job, RankFailure
from components.shared.environment import cores_per_rank
from components.shared.errors import RetryableError
from components.shared.stage import exit_on_error, keep_files_in_group
from components.shared.watchdog import die_with_parent

_AFTER_FAILURE_S = 3
"""Time for ranks to end after one has failed, instead of torchrun's 30 s: they only wait for the failed one."""
_RANK = "components.cluster.rank"
_LOCAL = "local"  # the name under which torchrun knows the rendezvous below


class _LocalRendezvous(StaticTCPRendezvous):
    """A rendezvous of one launcher, in its memory: torchrun's own store would listen on all network interfaces."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__("localhost", 0, rank=0, world_size=1, run_id=params.run_id, timeout=0)
        self._store = HashStore()

    def get_backend(self) -> str:
        return _LOCAL


def main() -> int:
    """Run the ranks of this machine or pod; return the exit code of the first one to fail, or 0."""
    folder, parent = Path(sys.argv[1]), sys.argv[2:]
    if parent:
        die_with_parent(int(parent[0]))
        job = Job.read(folder)
        return _run_ranks(job, _local_config(job), node=0)
    keep_files_in_group()
    with exit_on_error("agent"):
        job = Job.read_in_pod(folder)
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        config, _, _ = config_from_args(parse_args([f"--log-dir={logs}", "-m", _RANK]))
        return _run_ranks(job, config, node=int(os.environ["PET_NODE_RANK"]))


def _local_config(job: Job) -> LaunchConfig:
    """Return torchrun's settings for all ranks of a job on this machine, which only SIGTERM stops."""
    # A terminal sends these signals to all processes. The parent handles them, and then sends SIGTERM to this one.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    rendezvous_handler_registry.register(_LOCAL, _LocalRendezvous)
    return LaunchConfig(
        run_id="ranks",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.num_processes,
        rdzv_backend=_LOCAL,
        signals_to_handle="SIGTERM",
        max_restarts=0,
        # The default is a temporary folder that nobody removes.
        logs_specs=DefaultLogsSpecs(log_dir=str(job.folder / "torchrun")),
    )


def _run_ranks(job: Job, config: LaunchConfig, *, node: int) -> int:
    """Run this node's ranks, and record how they failed; return the exit code as `main` does."""
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_rank(config.nproc_per_node)))
    # torchrun's reports of failures are many lines long; the process that runs the job reports them in one line.
    for module in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    config.monitor_interval = 0.1
    config.shutdown_timeout = math.ceil(job.grace_s) + 1
    PContext.close.__defaults__ = (None, _AFTER_FAILURE_S)  # torchrun has no setting for it
    try:
        elastic_launch(config, sys.executable)("-u", "-m", _RANK, str(job.folder), str(os.getpid()))
    except ChildFailedError as error:
        failures = [RankFailure(rank, each.exitcode, each.timestamp) for rank, each in error.failures.items()]
        job.write_failures(node, failures)
        code = min(failures, key=lambda each: each.time).exit_code
        return code if code > 0 else 128 - code  # for a rank that a signal ended: 128 plus its number, as in a shell
    except SignalException:
        return RetryableError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
