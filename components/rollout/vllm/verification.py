"""Verification that a sampler computes with the weights it was sent: digests of its tensors, piece by piece.

A sampler may fuse tensors, hold a part of them and round them to its own precision. It says which piece of which tensor
lies where (`HeldWeights`), with a digest of what is there; the trainer takes the same piece of what it has sent, rounds
it in the same way and compares. That is exact, so it shows the smallest step of training.
"""

import os
from collections.abc import Iterator, Mapping
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


class HeldWeights(TypedDict):
    """What one process of a sampler computes with."""

    pieces: list[Piece]
    unverified: list[str]
    """Tensors of which this cannot be said, with the reason."""


def shapes(sent: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the shapes of the tensors, by name."""
    return {name: list(tensor.shape) for name, tensor in sent.items()}


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder; they stay in its files until they are used."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def refuse_other_weights(sent: Mapping[str, Tensor], held: list[HeldWeights], *, name: str) -> None:
    """Stop where a sampler, all of whose processes say what they hold, computes with other weights than were sent."""
    digests: dict[str, str] = {}
    wrong = [reason for each in held for reason in each["unverified"]]
    for each in held:
        for piece in (Piece(*fields) for fields in each["pieces"]):
            where = repr(piece[1:-1])
            if where not in digests:
                digests[where] = _digest_of_piece(sent[piece.sent_as], piece)
            if piece.digest != digests[where]:
                wrong.append(f"{piece.held_as} is not {piece.sent_as} as it was sent")
    if not all(each["pieces"] for each in held) or not held:
        wrong.append("it holds no weights at all")
    if wrong:
        shown = "; ".join(list(dict.fromkeys(wrong))[:_NAMES_SHOWN])
        more = f"; and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
        raise StaleWeightsError(f"{name} does not compute with the weights that it was sent: {shown}{more}")


def _digest_of_piece(tensor: Tensor, piece: Piece) -> str:
    whole = tensor.detach().contiguous()
    part = whole.as_strided(piece.size, piece.stride, whole.storage_offset() + piece.offset)
    return digest(part, getattr(torch, piece.dtype))


@torch.no_grad()
def digest(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Return a digest of the values in their order, rounded to `dtype`; it is computed on a GPU where there is one.

    It is the sum over all elements, modulo 2^64, of a mixture (as in splitmix64) of place and value, as a float32. What
    is too small for a normal number counts as 0: matrix units may flush it.
    """
    device = _device(tensor)
    total, place = torch.zeros((), dtype=torch.int64, device=device), 0
    for chunk in _chunks(tensor):
        values = chunk.to(device).reshape(-1).to(dtype or chunk.dtype).float()
        bits = torch.where(values.abs() < _SMALLEST, 0.0, values).view(torch.int32).long()
        mixed = bits + torch.arange(place, place + len(bits), device=device) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> 31)) * _FACTORS[1]
        total += (mixed ^ (mixed >> 29)).sum()
        place += len(bits)
    return f"{int(total) % 2**64:016x}"


def _device(tensor: Tensor) -> torch.device:
    if tensor.is_cuda or not torch.cuda.is_available():
        return tensor.device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # of the rank, in whichever thread this is


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    size_of_row = max(1, rows[0].numel()) if len(rows) else 1
    yield from rows.split(max(1, _CHUNK // size_of_row))


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
