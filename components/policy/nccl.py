"""Which network NCCL uses between nodes: it falls back to sockets without a word, at a fraction of the speed."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed

from components.shared.progress import say

_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def report_network() -> None:
    """Connect the GPUs of all nodes, in every rank, and say in the first which network NCCL has chosen.

    Nothing is said where the user has NCCL's own log, which has it.
    """
    is_reported = int(os.environ["RANK"]) == 0 and "NCCL_DEBUG" not in os.environ
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-nccl-") as folder:
        log = Path(folder) / "log"
        settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        if is_reported:
            os.environ |= settings
        distributed.all_reduce(torch.zeros(1, device="cuda"))
        for name in settings if is_reported else ():  # NCCL has read them; processes started later shall not
            del os.environ[name]
        for line in lines(log.read_text(), _RDMA_DEVICES) if log.is_file() else ():
            say("nccl", line)


def lines(log: str, devices: Path) -> Iterator[str]:
    """Yield what there is to say of a log of NCCL on a node with the RDMA devices in a folder of the kernel's."""
    chosen = _NETWORK.search(log)
    if chosen is None:
        return
    yield f"nodes are connected by {chosen[1]}"
    names = sorted(path.name for path in devices.glob("*"))
    if chosen[1] == "Socket" and names:
        yield (
            f"warning: sockets are slow, and this node has {', '.join(names)}: is NCCL_IB_DISABLE set, or has the "
            "container no access to the device or its libraries (libibverbs)?"
        )
