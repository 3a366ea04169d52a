"""What is said of the network that NCCL uses, from lines as NCCL prints them."""

from pathlib import Path

import pytest

from components.policy.nccl import lines

LOG = """\
node-0:152:386 [0] NCCL INFO NET/{0} : Using [0]{1}
node-0:152:386 [0] NCCL INFO Initialized NET plugin {0}
node-0:152:386 [0] NCCL INFO Assigned NET plugin {0} to comm
node-0:152:386 [0] NCCL INFO Using network {0}
node-0:152:386 [0] NCCL INFO ncclCommInitRankConfig comm 0x562b2c1973d0 rank 0 nranks 4 cudaDev 0 - Init START
"""


@pytest.mark.parametrize(
    ("log", "devices", "said"),
    [
        (LOG.format("IB", "mlx5_0:1/RoCE"), ["mlx5_0"], ["nodes are connected by IB"]),
        (LOG.format("Socket", "eth0:10.0.4.51<0>"), [], ["nodes are connected by Socket"]),
        (
            LOG.format("Socket", "eth0:10.0.4.51<0>"),
            ["mlx5_1", "mlx5_0"],
            ["nodes are connected by Socket", "warning: sockets are slow, and this node has mlx5_0, mlx5_1: "],
        ),
        ("", ["mlx5_0"], []),
    ],
)
def test_sockets_beside_an_rdma_device_are_a_warning(
    tmp_path: Path, log: str, devices: list[str], said: list[str]
) -> None:
    """The network is named wherever NCCL has named it."""
    for name in devices:
        (tmp_path / name).mkdir()
    printed = list(lines(log, tmp_path))
    assert len(printed) == len(said)
    assert all(line.startswith(beginning) for line, beginning in zip(printed, said, strict=True))
