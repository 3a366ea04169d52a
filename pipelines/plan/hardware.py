"""Rates of GPUs from their datasheets, and the time of collectives (rings) on the links between them."""

from dataclasses import dataclass

from components.shared.errors import PipelineError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of eight."""

    name: str
    memory_gib: float
    """As an idle device reports it; a little less than its name says."""
    bf16_rate: float
    """Operations per second of dense matrix products."""
    fp32_rate: float
    memory_rate: float
    """Bytes per second to and from its memory."""
    node_rate: float
    """Bytes per second that it sends to the others of its node (NVLink or PCIe, one direction)."""
    network_rate: float
    """Bytes per second that it sends to other nodes: its share of the node's network cards."""
    gpus_per_node: int = 8


_GPUS = (
    Gpu("a100", 79, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
    Gpu("a100-40gb", 39, 312e12, 19.5e12, 1.56e12, 300e9, 25e9),
    Gpu("a800", 79, 312e12, 19.5e12, 2.04e12, 200e9, 25e9),
    Gpu("b200", 178, 2250e12, 80e12, 8.0e12, 900e9, 50e9),
    Gpu("h100", 79, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    Gpu("h20", 95, 148e12, 44e12, 4.0e12, 450e9, 50e9),
    Gpu("h200", 139, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    Gpu("h800", 79, 989e12, 67e12, 3.35e12, 200e9, 50e9),
    Gpu("l40s", 44, 362e12, 91.6e12, 0.864e12, 32e9, 25e9),
)
"""Datasheets of NVIDIA; one network card per GPU, of 200 Gbit/s (A100, A800, L40S) or 400 Gbit/s, as in DGX systems."""
GPUS = {gpu.name: gpu for gpu in _GPUS}

USABLE_FRACTION = 0.92
"""The rest is the CUDA context, NCCL and fragmentation (assumed)."""
HOST_RATE = 25e9
"""Bytes per second between a GPU and its host's memory (PCIe 4 x16 has 32; assumed)."""


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case."""
    if name.lower() not in GPUS:
        raise PipelineError(f"--gpu {name}: unknown GPU; accepted: {', '.join(GPUS)}")
    return GPUS[name.lower()]


def usable_bytes(device: Gpu) -> float:
    """Return the bytes of a GPU's memory that a run can use."""
    return device.memory_gib * GIB * USABLE_FRACTION


_NODE_HOP_S = 1e-6
"""Latency from a GPU to the next of its node (assumed)."""
_NETWORK_HOP_S = 5e-6
"""The same between nodes (assumed)."""
_LINK_FRACTION = 0.8
"""Fraction of the slowest link's rate that is reached (assumed)."""


@dataclass(frozen=True)
class Network:
    """The links among GPUs that train together."""

    gpu: Gpu
    num_gpus: int

    def gather_s(self, num_bytes: float, num_calls: int = 1) -> float:
        """Return the seconds of an all_gather or a reduce_scatter.

        `num_bytes` are unsharded, in `num_calls` collectives in sequence.
        """
        if self.num_gpus == 1:
            return 0.0
        share = (self.num_gpus - 1) / self.num_gpus
        return num_bytes * share / (_LINK_FRACTION * self._rate) + num_calls * self._latency_s

    def reduce_s(self, num_bytes: float, num_calls: int = 1) -> float:
        """Return the seconds of an all_reduce."""
        return 2 * self.gather_s(num_bytes, num_calls)

    @property
    def _rate(self) -> float:
        """Bytes per second through a GPU. A ring over nodes crosses each boundary once per card."""
        return min(self.gpu.node_rate, self._network_rate) if self._num_nodes > 1 else self.gpu.node_rate

    @property
    def _network_rate(self) -> float:
        return self.gpu.network_rate * self.gpu.gpus_per_node

    @property
    def _latency_s(self) -> float:
        between = self._num_nodes - 1
        return between * _NETWORK_HOP_S + (self.num_gpus - 1 - between) * _NODE_HOP_S

    @property
    def _num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpu.gpus_per_node)
