"""Whether a sampler has the weights it was given: by what it says of tokens that both it and the trainer know.

Shape suffixes: M  the completion tokens of the probes, end to end.
"""

import torch
from torch import Tensor

from components.shared.errors import PipelineError

_STALE = 0.5
"""Where between the new weights (0) and the old (1) a sampler stands that is taken to have kept the old ones."""
_CLEAR = 0.5
"""Correlation from which that is no accident of rounding: for 64 tokens, accidents are about 0.125."""


class StaleWeightsError(PipelineError):
    """A sampler does not sample from the weights that it was given."""


def refuse_stale(sampler_M: Tensor, new_M: Tensor, old_M: Tensor | None, *, max_mismatch: float, name: str) -> None:
    """Stop where a sampler's log-probabilities are not those of the new weights, within `max_mismatch` nats on average.

    A step at a small learning rate moves them by less than that: then they have to differ from the `old` ones in the
    direction of the step, as far as rounding lets it be seen.
    """
    mismatch = float((sampler_M - new_M).abs().mean())
    # Not `mismatch > max_mismatch`, which NaN would pass.
    if not mismatch <= max_mismatch:
        raise StaleWeightsError(
            f"{name} was given the trainer's weights, and differs from it by {mismatch:.2g} nats per token on fixed "
            f"prompts: more than sampler.max_mismatch = {max_mismatch:g}"
        )
    if old_M is not None and _is_old(sampler_M - new_M, old_M - new_M):
        raise StaleWeightsError(f"{name} still samples from the weights before the last update")


def _is_old(difference_M: Tensor, step_M: Tensor) -> bool:
    """Tell whether a difference from the new log-probabilities is that of the old ones."""
    length, product = float(step_M.norm()), float(difference_M @ step_M)
    if length == 0:
        return False
    correlation = product / (length * max(float(difference_M.norm()), torch.finfo(torch.float64).tiny))
    return product / length**2 > _STALE and correlation > _CLEAR
