"""Memory and disk space that were refused, by whichever library, explained in one line."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from components.rollout.vllm.config import raise_if_out_of_memory
from components.shared.errors import (
    NotEnoughMemoryError,
    PipelineError,
    explain,
    explain_out_of_memory,
    out_of_memory_in_log,
)

_FREE = "GPU 1 has a total capacity of 79.15 GiB of which 3.12 GiB is free."
_ON_A_GPU = "CUDA out of memory. Tried to allocate 20.50 GiB. " + _FREE
_ON_GPU_1 = "tried to allocate another 20.50 GiB, 3.12 GiB of 79.15 GiB are free on GPU 1"


def _refused_by(allocate: Callable[[], object]) -> Exception:
    try:
        allocate()
    except Exception as error:
        return error
    raise AssertionError("it was allocated")


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (_refused_by(lambda: torch.empty(10**15, dtype=torch.uint8)), ": tried to allocate another 931,322.6 GiB"),
        (_refused_by(lambda: np.empty(10**15, np.uint8)), ": tried to allocate another 909. TiB"),
        (torch.OutOfMemoryError(_ON_A_GPU), f": {_ON_GPU_1}"),
        (RuntimeError("CUDA error: out of memory"), ""),
        (OSError(12, "Cannot allocate memory"), ""),
    ],
)
def test_a_refused_allocation_is_explained(error: Exception, refused: str) -> None:
    """With its purpose, the amount where the error tells it, and what helps."""
    with pytest.raises(NotEnoughMemoryError) as explained, explain_out_of_memory("a test", "lower this", "lower that"):
        raise error
    assert str(explained.value) == f"not enough memory for a test{refused}; lower this, or lower that"


def test_copy_to_a_full_disk_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the original, whose disk has room."""
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    (source / "a").write_text("a")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "sendfile", Mock(side_effect=full))
    for refused in (
        _refused_by(lambda: shutil.copytree(source, place)),
        _refused_by(lambda: shutil.copyfile(source / "a", place / "a")),
    ):
        assert str(explain(refused)) == f"{place / 'a'}: no space left on device"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(28, ""), PipelineError("x")]
)
def test_other_errors_pass_unchanged(error: Exception) -> None:
    """Also those that are for people already."""
    with pytest.raises(type(error), check=error.__eq__), explain_out_of_memory("a test"):
        raise error


@pytest.mark.parametrize(
    ("printed", "refused"),
    [
        (f"INFO starting\n(EngineCore) ERROR torch.OutOfMemoryError: {_ON_A_GPU}\nTraceback", _ON_GPU_1),
        (
            "ValueError: (7.00 GiB KV cache is needed, which is larger than the available KV cache memory (1.00 GiB).",
            "tried to allocate another 7.00 GiB",
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", ""),
        ("INFO lower max_num_seqs if you run out of memory\nValueError: no such model\n", None),
    ],
)
def test_a_process_without_memory_is_recognised_by_its_output(printed: str, refused: str | None) -> None:
    """As vLLM prints it; advice about memory that is printed on the way is no error."""
    assert out_of_memory_in_log(printed) == refused


def test_vllm_without_memory_names_the_keys_that_lower_it(tmp_path: Path) -> None:
    """And the log with all that it printed."""
    log = tmp_path / "vllm.log"
    message = rf"the start of vLLM: .* on GPU 1; lower sampler\.vllm\.cache_gib, or lower .*; its output is in {log}$"
    with pytest.raises(NotEnoughMemoryError, match=message):
        raise_if_out_of_memory(f"torch.OutOfMemoryError: {_ON_A_GPU}", log, "sampler.vllm")
