"""Verification that a sampler computes with the weights it was given.

By digests, exactly: a sampler may fuse tensors, hold a part of them and round them to its own precision. It reports
which piece of which tensor is where, with a digest; the trainer compares that of the same piece of what it has sent.
By log-probabilities of probe tokens, which also show whether the sampler computes as the trainer does.

Shape suffixes: M  the completion tokens of the probes, end to end.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict

import safetensors.torch
import torch
from torch import Tensor

from components.shared.errors import PipelineError

_SMALLEST = torch.finfo(torch.float32).tiny
_CHUNK = 1 << 20
"""Elements that are digested at once: they take about 40 bytes each meanwhile."""
_FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)
_NAMES_SHOWN = 5
_STALE = 0.5
"""Place between the new weights (0) and the old (1) from which a sampler is taken to have kept the old ones, and the
correlation from which that is no accident of rounding: for 64 tokens, accidents are about 0.125."""


class StaleWeightsError(PipelineError):
    """A sampler does not sample from the weights that it was given."""


class Piece(NamedTuple):
    """A piece of a tensor that was sent, as a sampler holds it."""

    held_as: str
    """The sampler's name of the tensor that it is in."""
    sent_as: str
    offset: int
    size: list[int]
    stride: list[int]
    """Where it is in the tensor that was sent; in elements, as in `torch.as_strided`."""
    dtype: str
    """To which it is rounded, such as `bfloat16`."""
    digest: str


class LoadedWeights(TypedDict):
    """The weights that one process of a sampler computes with."""

    pieces: list[Piece]
    unverified: list[str]
    """Tensors whose origin is unknown, with the reason."""


def verify_weights(sent: Mapping[str, Tensor], loaded: list[LoadedWeights], *, name: str) -> None:
    """Raise StaleWeightsError where any process of a sampler computes with other weights than were sent."""
    digests: dict[str, str] = {}
    wrong = [reason for each in loaded for reason in each["unverified"]]
    for piece in (Piece(*fields) for each in loaded for fields in each["pieces"]):
        place = repr(piece[1:-1])
        if place not in digests:
            tensor = sent[piece.sent_as].detach().contiguous()
            part = tensor.as_strided(piece.size, piece.stride, tensor.storage_offset() + piece.offset)
            digests[place] = digest(part, getattr(torch, piece.dtype))
        if piece.digest != digests[place]:
            wrong.append(f"{piece.held_as} differs from the {piece.sent_as} that was sent")
    if not all(each["pieces"] for each in loaded) or not loaded:
        wrong.append("it holds no weights at all")
    if wrong:
        shown = "; ".join(list(dict.fromkeys(wrong))[:_NAMES_SHOWN])
        more = f"; and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
        raise StaleWeightsError(f"{name} does not compute with the weights that it was sent: {shown}{more}")


def verify_logprobs(sampler_M: Tensor, new_M: Tensor, old_M: Tensor | None, *, max_mismatch: float, name: str) -> None:
    """Raise StaleWeightsError where a sampler's log-probabilities are not those of the new weights.

    They may differ by `max_mismatch` nats on average. A step at a small learning rate moves them by less than that:
    then they have to differ from the `old` ones in the direction of the step, as far as rounding lets it be seen.
    """
    difference_M = sampler_M - new_M
    mismatch = float(difference_M.abs().mean())
    if not mismatch <= max_mismatch:  # not `>`, which NaN would pass
        raise StaleWeightsError(
            f"{name} received the trainer's weights but differs from it by {mismatch:.2g} nats per token on fixed "
            f"prompts: more than sampler.max_mismatch = {max_mismatch:g}"
        )
    step_M = torch.zeros_like(new_M) if old_M is None else old_M - new_M
    length, product = float(step_M.norm()), float(difference_M @ step_M)
    noise = max(float(difference_M.norm()), torch.finfo(torch.float64).tiny)
    if length and product / length**2 > _STALE and product / (length * noise) > _STALE:
        raise StaleWeightsError(f"{name} still samples from the weights before the last update")


def shapes(sent: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the shapes of the tensors, by name."""
    return {name: list(tensor.shape) for name, tensor in sent.items()}


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder, mapped from its files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


@torch.no_grad()
def digest(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Return a digest of the values in their order, rounded to `dtype`; computed on a GPU if there is one.

    It is the sum over all elements, modulo 2^64, of a mix (as in splitmix64) of place and value, as a float32. Values
    too small for a normal number count as 0: matrix units may flush them.
    """
    device = tensor.device
    if not tensor.is_cuda and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # of the rank, in any thread
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    row_size = max(1, rows[0].numel()) if len(rows) else 1
    total, place = torch.zeros((), dtype=torch.int64, device=device), 0
    for chunk in rows.split(max(1, _CHUNK // row_size)):
        values = chunk.to(device).reshape(-1).to(dtype or chunk.dtype).float()
        bits = torch.where(values.abs() < _SMALLEST, 0.0, values).view(torch.int32).long()
        mixed = bits + torch.arange(place, place + len(bits), device=device) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> 31)) * _FACTORS[1]
        total += (mixed ^ (mixed >> 29)).sum()
        place += len(bits)
    return f"{int(total) % 2**64:016x}"
