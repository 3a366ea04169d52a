"""Verification that a sampler computes with the weights it was sent, in two ways.

Digests are exact. A sampler may fuse tensors, hold a part of them and round them to its own precision. So it reports
each piece that it holds of a tensor, with a digest, and the trainer compares the digest of that piece of its tensor.
Log-probabilities of probe tokens also show whether the sampler computes as the trainer does.

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
"""Elements that are digested at once, which need about 40 bytes each."""
_PLACE_FACTOR, _MIX_FACTOR = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Constants of splitmix64, as signed integers."""
_NAMES_SHOWN = 5
_STALE = 0.5
"""A sampler has the old weights if its log-probabilities have moved more than this share of the way from the new ones
to the old ones, and in that direction, with a cosine above this. By rounding, it is about 0.125 for 64 tokens."""


class StaleWeightsError(PipelineError):
    """A sampler does not sample from the weights that it was sent."""


class Piece(NamedTuple):
    """A piece of a tensor that was sent, as a sampler holds it."""

    held_as: str
    """The name of the sampler's tensor that it is in."""
    sent_as: str
    """The name of the tensor that was sent."""
    offset: int
    size: list[int]
    stride: list[int]
    """Its place in the tensor that was sent: in elements, as in `torch.as_strided`."""
    dtype: str
    """The type to which the sampler rounds it, such as `bfloat16`."""
    digest: str


class LoadedWeights(TypedDict):
    """The weights that one process of a sampler computes with."""

    pieces: list[Piece]
    unverified: list[str]
    """For each tensor that cannot be verified, a sentence that says why."""


def verify_weights(sent: Mapping[str, Tensor], loaded: list[LoadedWeights], *, name: str) -> None:
    """Raise StaleWeightsError if any process of a sampler computes with other weights than were sent."""
    digests: dict[str, str] = {}
    errors = [reason for each in loaded for reason in each["unverified"]]
    for process in loaded:
        for fields in process["pieces"]:
            piece = Piece(*fields)  # a list if it came as JSON
            place = repr((piece.sent_as, piece.offset, piece.size, piece.stride, piece.dtype))
            if place not in digests:
                tensor = sent[piece.sent_as].detach().contiguous()
                sent_piece = tensor.as_strided(piece.size, piece.stride, tensor.storage_offset() + piece.offset)
                digests[place] = digest(sent_piece, getattr(torch, piece.dtype))
            if piece.digest != digests[place]:
                errors.append(f"{piece.held_as} differs from the {piece.sent_as} that was sent")
    if not loaded or not all(each["pieces"] for each in loaded):
        errors.append("it holds no weights at all")
    if errors:
        shown = "; ".join(list(dict.fromkeys(errors))[:_NAMES_SHOWN])
        more = f"; and {len(errors) - _NAMES_SHOWN} more" if len(errors) > _NAMES_SHOWN else ""
        raise StaleWeightsError(f"{name} does not compute with the weights that it was sent: {shown}{more}")


def verify_logprobs(sampler_M: Tensor, new_M: Tensor, old_M: Tensor | None, *, max_mismatch: float, name: str) -> None:
    """Raise StaleWeightsError if a sampler's log-probabilities are not those of the new weights.

    They may differ from `new_M` by `max_mismatch` nats on average. A step at a small learning rate changes less than
    that, so the difference must also not point towards `old_M`, the log-probabilities before the last update.
    """
    difference_M = sampler_M - new_M
    mismatch = float(difference_M.abs().mean())
    if not mismatch <= max_mismatch:  # not `>`, which NaN would pass
        raise StaleWeightsError(
            f"{name} received the trainer's weights but differs from it by {mismatch:.2g} nats per token on fixed "
            f"prompts: more than sampler.max_mismatch = {max_mismatch:g}"
        )
    if old_M is None:
        return
    to_old_M = old_M - new_M
    product, length, distance = float(difference_M @ to_old_M), float(to_old_M.norm()), float(difference_M.norm())
    if product > _STALE * length**2 and product > _STALE * length * distance:  # the share of the way, the cosine
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

    It is the sum modulo 2^64 of a hash of each element: its place and the bits of its value as a float32, mixed as in
    splitmix64. Subnormal values count as 0, since matrix units may flush them.
    """
    device = tensor.device
    if not tensor.is_cuda and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # the current device differs by thread
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    row_size = max(1, rows[0].numel()) if len(rows) else 1
    total, place = torch.zeros((), dtype=torch.int64, device=device), 0
    for chunk in rows.split(max(1, _CHUNK // row_size)):
        values = chunk.to(device).reshape(-1).to(dtype or chunk.dtype).float()
        bits = torch.where(values.abs() < _SMALLEST, 0.0, values).view(torch.int32).long()
        mixed = bits + torch.arange(place, place + len(bits), device=device) * _PLACE_FACTOR
        mixed = (mixed ^ (mixed >> 31)) * _MIX_FACTOR
        total += (mixed ^ (mixed >> 29)).sum()
        place += len(bits)
    return f"{int(total) % 2**64:016x}"
