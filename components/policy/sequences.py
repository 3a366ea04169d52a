"""Prompts with their completions as tokens, and micro-batches of them.

Shape suffixes (a capital per axis, valid in this package):
    B  sequences of a micro-batch      N  completion tokens of a micro-batch, all sequences end to end
    S  tokens of the longest sequence  V  vocabulary
Only completion tokens carry a loss, so everything after the model itself is N long: there is no padding to mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and what follows it; the completion includes its end token where it has one."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences padded on the right, and where in them the completion tokens are."""

    sequences: tuple[int, ...]
    """For each row, which sequence of the optimizer step it is."""
    input_ids_BS: Tensor
    attention_mask_BS: Tensor
    row_N: Tensor
    """The row of each completion token."""
    position_N: Tensor
    """The position in its row whose output predicts each completion token: the one before it."""
    target_N: Tensor
    """The completion tokens themselves."""

    @property
    def sequence_N(self) -> Tensor:
        """The sequence of the optimizer step that each completion token belongs to."""
        return torch.tensor(self.sequences, device=self.row_N.device)[self.row_N]


def micro_batches(
    sequences: Sequence[TokenSequence], *, max_tokens: int, pad_id: int, device: torch.device
) -> list[MicroBatch]:
    """Split the sequences of one optimizer step into micro-batches of at most `max_tokens` tokens with padding.

    Sequences of like length go together. One that alone is longer gets a micro-batch of its own.
    """
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    groups: list[list[int]] = []
    for index in order:
        if groups and len(sequences[index]) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_collate(sequences, group, pad_id=pad_id, device=device) for group in groups]


def _collate(sequences: Sequence[TokenSequence], group: list[int], *, pad_id: int, device: torch.device) -> MicroBatch:
    rows = [sequences[index] for index in group]
    longest = max(len(row) for row in rows)
    ids = [[*row.prompt_ids, *row.completion_ids, *[pad_id] * (longest - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    row_N = [r for r, row in enumerate(rows) for _ in row.completion_ids]
    position_N = [len(row.prompt_ids) + t - 1 for row in rows for t in range(len(row.completion_ids))]
    target_N = [token for row in rows for token in row.completion_ids]
    return MicroBatch(
        sequences=tuple(group),
        input_ids_BS=torch.tensor(ids, device=device),
        attention_mask_BS=torch.tensor(mask, device=device),
        row_N=torch.tensor(row_N, device=device),
        position_N=torch.tensor(position_N, device=device),
        target_N=torch.tensor(target_N, device=device),
    )
