"""What GPUs can do, by their datasheets."""

from dataclasses import dataclass

from components.shared.errors import PipelineError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of eight."""

    name: str
    memory_gib: float
    """What a device reports when nothing runs on it; a little less than its name says."""
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
"""Of the memory: the rest is the CUDA context, NCCL and what the allocator cannot use for fragmentation (assumed)."""
HOST_RATE = 25e9
"""Bytes per second between a GPU and its host's memory (PCIe 4 x16 has 32; assumed)."""


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case."""
    if name.lower() not in GPUS:
        raise PipelineError(f"--gpu {name}: no such GPU is known; accepted: {', '.join(GPUS)}")
    return GPUS[name.lower()]


def usable_bytes(device: Gpu) -> float:
    """Return how many bytes of its memory a run can count on."""
    return device.memory_gib * GIB * USABLE_FRACTION
