"""Micro-batches of sequences for the reward model, and the places in them where its head is read.

Shape suffixes:
    B  sequences of a micro-batch         E  ends of a micro-batch, where the head is read: row after row
    S  tokens of the longest sequence
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.policy.packing import TokenSequence


@dataclass(frozen=True)
class ReadBatch:
    """Sequences padded on the right, and the places to read."""

    sequences: tuple[int, ...]
    """For each row, which of all sequences it is."""
    input_ids_BS: Tensor
    attention_mask_BS: Tensor
    row_E: Tensor
    position_E: Tensor


def read_batches(
    tokens: Sequence[TokenSequence], ends: Sequence[tuple[int, ...]], *, max_tokens: int, device: torch.device
) -> list[ReadBatch]:
    """Split sequences into micro-batches of at most `max_tokens` tokens with padding, like lengths together.

    `ends` are counts of completion tokens: the head is read at the last token counted. A sequence that alone is longer
    gets a micro-batch of its own.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(tokens)), key=lambda index: len(tokens[index])):
        if groups and len(tokens[index]) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_pad(group, tokens, ends, device) for group in groups]


def _pad(
    group: list[int], tokens: Sequence[TokenSequence], ends: Sequence[tuple[int, ...]], device: torch.device
) -> ReadBatch:
    rows = [[*tokens[index].prompt_ids, *tokens[index].completion_ids] for index in group]
    longest = max(map(len, rows))
    # Token 0 pads, whatever it is: places are counted, never found by comparing with it.
    ids = [row + [0] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    row_E = [row for row, index in enumerate(group) for _ in ends[index]]
    position_E = [len(tokens[index].prompt_ids) + end - 1 for index in group for end in ends[index]]
    return ReadBatch(
        sequences=tuple(group),
        input_ids_BS=torch.tensor(ids, device=device),
        attention_mask_BS=torch.tensor(mask, device=device),
        row_E=torch.tensor(row_E, dtype=torch.long, device=device),
        position_E=torch.tensor(position_E, dtype=torch.long, device=device),
    )
