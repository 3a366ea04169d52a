"""Rates of GPUs from their datasheets, and the time of collectives on the links between them."""

from dataclasses import dataclass

from components.shared.errors import PipelineError

GIB = 2**30
HOST_RATE = 25e9
"""Bytes per second between a GPU and its host's memory (PCIe 4 x16 has 32; assumed)."""
_USABLE_FRACTION = 0.92
"""Of a GPU's memory; the rest is the CUDA context, NCCL and fragmentation (assumed)."""
_GPUS_PER_NODE = 8
_NODE_HOP_S, _NETWORK_HOP_S = 1e-6, 5e-6
"""Latency from a GPU to the next, within a node and between nodes (assumed)."""
_LINK_FRACTION = 0.8
"""Fraction of the slowest link's rate that is reached (assumed)."""


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

    @property
    def usable_bytes(self) -> float:
        """Memory that a run can use."""
        return self.memory_gib * GIB * _USABLE_FRACTION

    def gather_s(self, num_gpus: int, num_bytes: float, num_calls: int = 1) -> float:
        """Return the seconds of an all_gather or a reduce_scatter over `num_gpus`; an all_reduce takes twice as long.

        `num_bytes` are unsharded, in `num_calls` collectives in sequence. They form a ring: over nodes it crosses each
        boundary once per network card.
        """
        if num_gpus == 1:
            return 0.0
        boundaries = -(-num_gpus // _GPUS_PER_NODE) - 1
        rate = min(self.node_rate, self.network_rate * _GPUS_PER_NODE) if boundaries else self.node_rate
        latency_s = boundaries * _NETWORK_HOP_S + (num_gpus - 1 - boundaries) * _NODE_HOP_S
        share = (num_gpus - 1) / num_gpus
        return num_bytes * share / (_LINK_FRACTION * rate) + num_calls * latency_s


_GPUS = [
    Gpu("a100", 79, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
    Gpu("a100-40gb", 39, 312e12, 19.5e12, 1.56e12, 300e9, 25e9),
    Gpu("a800", 79, 312e12, 19.5e12, 2.04e12, 200e9, 25e9),
    Gpu("b200", 178, 2250e12, 80e12, 8.0e12, 900e9, 50e9),
    Gpu("h100", 79, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    Gpu("h20", 95, 148e12, 44e12, 4.0e12, 450e9, 50e9),
    Gpu("h200", 139, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    Gpu("h800", 79, 989e12, 67e12, 3.35e12, 200e9, 50e9),
    Gpu("l40s", 44, 362e12, 91.6e12, 0.864e12, 32e9, 25e9),
]
"""Datasheets of NVIDIA; one network card per GPU, of 200 Gbit/s (A100, A800, L40S) or 400 Gbit/s, as in DGX systems."""
GPUS = {gpu.name: gpu for gpu in _GPUS}


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case."""
    if name.lower() not in GPUS:
        raise PipelineError(f"--gpu {name}: unknown GPU; accepted: {', '.join(GPUS)}")
    return GPUS[name.lower()]
