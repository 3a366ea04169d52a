"""Rates of GPUs from their datasheets."""

from dataclasses import dataclass

from components.shared.errors import PipelineError

GIB = 2**30
_USABLE_FRACTION = 0.92
"""Fraction of a GPU's memory that a run can use; CUDA context, NCCL and fragmentation take the rest (assumed)."""
_LARGE_GIB = 70  # above this memory vLLM's default limit on the sequences in a batch is higher, except on an A100


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str
    memory_gib: float
    """Memory that an idle device reports: a little less than its product name says."""
    bf16_rate: float
    """Floating-point operations per second in dense matrix products; 0 without support for bfloat16."""
    fp32_rate: float
    memory_rate: float
    """Bytes per second to and from the memory of the GPU."""

    @property
    def usable_bytes(self) -> float:
        """Bytes that a run can use."""
        return self.memory_gib * GIB * _USABLE_FRACTION

    @property
    def engine_sequences(self) -> int:
        """Default limit of vLLM on the sequences in a batch."""
        return 1024 if self.memory_gib > _LARGE_GIB and not self.name.startswith("a100") else 256


_KINDS = [
    Gpu("a100", 79, 312e12, 19.5e12, 2.039e12),
    Gpu("a100-40gb", 39, 312e12, 19.5e12, 1.555e12),
    Gpu("a800", 79, 312e12, 19.5e12, 2.039e12),
    Gpu("b200", 178, 2250e12, 75e12, 8.0e12),
    Gpu("gb200", 184, 2500e12, 80e12, 8.0e12),
    Gpu("h100", 79, 989e12, 67e12, 3.35e12),
    Gpu("h100-nvl", 93, 835e12, 60e12, 3.9e12),
    Gpu("h100-pcie", 79, 756e12, 51e12, 2.0e12),
    Gpu("h20", 95, 148e12, 44e12, 4.0e12),
    Gpu("h200", 139, 989e12, 67e12, 4.8e12),
    Gpu("h800", 79, 989e12, 67e12, 3.35e12),
    Gpu("mi300x", 191, 1307e12, 163.4e12, 5.3e12),
    Gpu("a10", 22, 125e12, 31.2e12, 0.6e12),
    Gpu("a10g", 22, 70e12, 35e12, 0.6e12),
    Gpu("a30", 23, 165e12, 10.3e12, 0.933e12),
    Gpu("a40", 44, 149.7e12, 37.4e12, 0.696e12),
    Gpu("a6000", 47, 154.8e12, 38.7e12, 0.768e12),
    Gpu("l4", 22, 121e12, 30.3e12, 0.3e12),
    Gpu("l40s", 44, 362e12, 91.6e12, 0.864e12),
    Gpu("rtx-3090", 23.5, 71e12, 35.6e12, 0.936e12),
    Gpu("rtx-4090", 23.5, 165.2e12, 82.6e12, 1.008e12),
    Gpu("rtx-5090", 31.5, 209.5e12, 104.8e12, 1.792e12),
    Gpu("rtx-6000-ada", 47, 364.2e12, 91.1e12, 0.96e12),
    Gpu("rtx-pro-6000", 95, 503.8e12, 125e12, 1.792e12),
    Gpu("t4", 14.5, 0.0, 8.1e12, 0.32e12),
    Gpu("v100", 31.5, 0.0, 15.7e12, 0.9e12),
    Gpu("v100-16gb", 15.5, 0.0, 15.7e12, 0.9e12),
]
"""From the datasheets of NVIDIA and AMD: rates without sparsity, accumulating in float32."""
GPUS = {kind.name: kind for kind in _KINDS}


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, in upper or lower case and with spaces or dashes; PipelineError for any other."""
    key = name.lower().replace(" ", "-")
    if key not in GPUS:
        problem = f"--gpu {name}: unknown GPU" if name else "--gpu: is missing; name a GPU, such as --gpu rtx-4090"
        raise PipelineError(f"{problem}; accepted: {', '.join(GPUS)}")
    return GPUS[key]
