"""An optimizer step's micro-batches, dealt out to the processes that take it together.

Under ZeRO 2 and 3 every pass through the model waits for that of all other processes: all make equally many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from components.policy.ranks import Ranks
from components.policy.sequences import MicroBatch, TokenSequence, micro_batches


@dataclass(frozen=True)
class Share:
    """What one process computes of an optimizer step."""

    batches: list[MicroBatch]
    idle: list[MicroBatch]
    """Passes that count for nothing: where others have more micro-batches, these keep them company."""

    @property
    def passes(self) -> list[MicroBatch]:
        """Every pass through the model: as many in each process."""
        return self.batches + self.idle


def deal(
    ranks: Ranks, sequences: Sequence[TokenSequence], *, max_tokens: int, device: torch.device, chosen: Sequence[int]
) -> Share:
    """Return this process's share of the sequences with the `chosen` numbers; groups of one prompt stay together."""

    def pack(numbers: Sequence[int]) -> list[MicroBatch]:
        return micro_batches(sequences, max_tokens=max_tokens, device=device, chosen=numbers)

    if ranks.size == 1:
        return Share(pack(chosen), [])
    batches = pack(_fair_share(ranks, sequences, chosen))
    missing = max(ranks.gather(len(batches), "the dealing of micro-batches")) - len(batches)
    if not missing:
        return Share(batches, [])
    shortest = min(chosen, key=lambda number: len(sequences[number]))
    return Share(batches, pack([shortest]) * missing)


def _fair_share(ranks: Ranks, sequences: Sequence[TokenSequence], chosen: Sequence[int]) -> list[int]:
    """The numbers of one process: the largest groups are given away first, each to whoever has the fewest tokens."""
    groups = [list(members) for _, members in groupby(chosen, key=lambda number: sequences[number].prompt_ids)]
    load = [0] * ranks.size
    shares: list[list[int]] = [[] for _ in load]
    for group in sorted(groups, key=lambda group: -_num_tokens(group, sequences)):
        least = load.index(min(load))
        load[least] += _num_tokens(group, sequences)
        shares[least] += group
    return sorted(shares[ranks.rank])


def _num_tokens(group: Sequence[int], sequences: Sequence[TokenSequence]) -> int:
    return len(sequences[group[0]].prompt_ids) + sum(len(sequences[number].completion_ids) for number in group)
