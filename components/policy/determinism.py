"""Random numbers: equal inputs give equal bytes, also after a run was resumed."""

import os
import random
from collections.abc import Mapping
from typing import Any

import torch
import transformers


def make_deterministic(seed: int) -> None:
    """Seed every generator and choose deterministic kernels; also keep the libraries' chatter out of the log."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for determinism
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    # Filling every new buffer guards against reading it unwritten; it would double the time of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no stub
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def random_state() -> dict[str, Any]:
    """Return the state of the generators of this process and of its GPU (a machine may have others)."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
