"""Equal inputs give equal bytes: what has to be set before torch is used."""

import os

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
