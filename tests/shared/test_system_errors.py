from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from components.rollout.vllm.config import raise_if_out_of_memory
from components.shared.errors import PipelineError
from components.shared.system_errors import (
    NotEnoughMemoryError,
    explain_out_of_memory,
    out_of_memory,
    out_of_memory_in_log,
)

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 1 has a total capacity of 79.15 GiB of which 3.12 GiB is "
    "free. Including non-PyTorch memory, this process has 76.02 GiB memory in use."
)


@pytest.mark.parametrize(
    ("allocate", "refused"),
    [
        (lambda: torch.empty(10**15, dtype=torch.uint8), "tried to allocate another 909.5 TiB"),
        (lambda: np.empty(10**15, np.uint8), "tried to allocate another 909. TiB"),
        (lambda: bytearray(10**15), ""),
    ],
    ids=["torch", "numpy", "python"],
)
def test_a_refused_allocation_is_recognised(allocate: Callable[[], object], refused: str) -> None:
    """Whoever asked for the memory, with the amount where the error says it."""
    with pytest.raises(NotEnoughMemoryError) as error, explain_out_of_memory("a test", "lower this", "lower that"):
        allocate()
    amount = f": {refused}" if refused else ""
    assert str(error.value) == f"not enough memory for a test{amount}; lower this, or lower that"


def test_a_gpu_says_how_much_it_has() -> None:
    """The error is torch's own, which is there without a GPU too."""
    refused = out_of_memory(torch.OutOfMemoryError(ON_A_GPU))
    assert refused == "tried to allocate another 20.50 GiB, 3.12 GiB of 79.15 GiB are free on GPU 1"
    assert out_of_memory(RuntimeError("CUDA error: out of memory")) == ""
    assert out_of_memory(OSError(12, "Cannot allocate memory")) == ""


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(28, "No space left on device")],
    ids=str,
)
def test_another_error_stays_as_it_is(error: Exception) -> None:
    """So does one that is for people already."""
    for each in (error, PipelineError("not enough memory for something else")):
        with pytest.raises(type(each)) as found, explain_out_of_memory("a test"):
            raise each
        assert found.value is each


VLLM = {
    f"INFO starting\n(EngineCore pid=7) ERROR 11-22 torch.OutOfMemoryError: {ON_A_GPU}\nTraceback": "another 20.50 GiB",
    "ValueError: To serve at least one request with the model's max seq len (4096), (7.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.00 GiB).": "another 7.00 GiB",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": "",
}


@pytest.mark.parametrize("printed", list(VLLM))
def test_a_sampler_without_memory_is_told_apart(printed: str, tmp_path: Path) -> None:
    """By the error that vLLM printed, and with the keys of its section."""
    with pytest.raises(NotEnoughMemoryError) as error:
        raise_if_out_of_memory(printed, tmp_path / "vllm.log", "train_grpo.sampler.vllm")
    message = str(error.value)
    assert message.startswith("not enough memory for the start of vLLM")
    assert VLLM[printed] in message
    assert "lower train_grpo.sampler.vllm.cache_gib" in message
    assert message.endswith(f"its output is in {tmp_path / 'vllm.log'}")


def test_a_sampler_that_ends_for_another_reason_is_not_about_memory() -> None:
    """What is printed on the way, such as advice about memory, is no error."""
    assert out_of_memory_in_log("INFO lower max_num_seqs if you run out of memory\nValueError: no such model\n") is None
