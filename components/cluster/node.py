"""torchrun in a pod: `python -m components.cluster.node FOLDER` starts the ranks of this node.

How many nodes there are, which of them this is and where the first one is, Kubeflow Trainer says in the environment
(PET_NNODES and others), as torchrun itself reads it. Unlike torchrun this passes on how the first rank ended: what no
restart would cure has another exit code than what may pass.
"""

import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.run import config_from_args, parse_args

from components.cluster.agent import run_ranks
from components.cluster.job import Job
from components.shared.task import keep_files_in_group


def main() -> int:
    """Run this node's ranks; return the exit code of the first that failed, or 0."""
    keep_files_in_group()
    job = Job.read(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        # The command is a formality: that of every rank is known.
        arguments = parse_args([f"--log-dir={logs}", "-m", "components.cluster.rank"])
        config, _, _ = config_from_args(arguments)
        return run_ranks(job, config, node=int(os.environ["PET_NODE_RANK"]))


if __name__ == "__main__":
    sys.exit(main())
