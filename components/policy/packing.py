"""Prompts with their completions as tokens, packed into micro-batches without padding and sharded over processes.

Shape suffixes (a capital per axis, valid in this package):
    T  tokens of a micro-batch, end to end     N  completion tokens of a micro-batch, all sequences end to end
    B  sequences of the optimizer step, M  their completion tokens, end to end
Only completion tokens carry a loss, so everything after the model itself is N long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from components.policy.attention import PackedLayout, Segments
from components.policy.parallel import Ranks


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and what follows it; the completion includes its end token where it has one."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences laid end to end, each prompt once, and where the completion tokens are predicted."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    """The place of each token in its own sequence."""
    layout: PackedLayout
    source_N: Tensor
    """The place in the row whose output predicts each completion token: that of the token before it."""
    target_N: Tensor
    """The completion tokens themselves."""
    sequence_N: Tensor
    """The index of the sequence that each completion token belongs to."""
    token_N: Tensor
    """The place of each completion token among those of all sequences, laid end to end in their own order (M)."""


@dataclass(frozen=True)
class Shard:
    """What one process computes of an optimizer step that all processes take together."""

    batches: list[MicroBatch]
    dummies: list[MicroBatch]
    """Batches whose loss counts for nothing: under ZeRO 2 and 3 each pass waits for a pass of every other process, so
    all processes make as many passes as the one with the most micro-batches."""

    @property
    def all_batches(self) -> list[MicroBatch]:
        """Every batch that goes through the model: as many in each process."""
        return self.batches + self.dummies


def pack_shard(
    ranks: Ranks, sequences: Sequence[TokenSequence], *, max_tokens: int, device: torch.device, indices: Sequence[int]
) -> Shard:
    """Pack this process's shard of the sequences at `indices`; the sequences of one prompt stay together."""

    def packed(chosen: Sequence[int]) -> list[MicroBatch]:
        return pack(sequences, max_tokens=max_tokens, device=device, indices=chosen)

    if ranks.world_size == 1:
        return Shard(packed(indices), [])
    batches = packed(_balanced_shards(sequences, indices, ranks.world_size)[ranks.rank])
    missing = max(ranks.all_gather(len(batches), "the packing of micro-batches")) - len(batches)
    if not missing:
        return Shard(batches, [])
    shortest = min(indices, key=lambda index: len(sequences[index]))
    return Shard(batches, packed([shortest]) * missing)


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Pack sequences, or those at `indices`, into micro-batches of at most `max_tokens` tokens.

    Neighbours with the same prompt are a group, and share it. A group that alone is longer is split, and pays its
    prompt once per part; a sequence that alone is longer gets a micro-batch of its own.
    """
    groups = _groups(sequences, range(len(sequences)) if indices is None else indices)
    parts = [part for group in groups for part in group.split(max_tokens)]
    bins = _first_fit_decreasing([part.num_tokens for part in parts], max_tokens)
    offsets = list(accumulate((len(sequence.completion_ids) for sequence in sequences), initial=0))
    return [_pack_row([parts[index] for index in bin_], offsets, device) for bin_ in bins]


@dataclass(frozen=True)
class _Group:
    """Completions that share a prompt, by the index of their sequence."""

    prompt_ids: tuple[int, ...]
    completions: dict[int, tuple[int, ...]]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.completions.values()))

    def split(self, max_tokens: int) -> list["_Group"]:
        """Split the group into parts of at most `max_tokens` tokens, each with the prompt."""
        members = list(self.completions.items())
        bins = _first_fit_decreasing([len(ids) for _, ids in members], max_tokens - len(self.prompt_ids))
        return [_Group(self.prompt_ids, dict(members[place] for place in sorted(bin_))) for bin_ in bins]


def _groups(sequences: Sequence[TokenSequence], indices: Sequence[int]) -> list[_Group]:
    by_prompt = groupby(indices, key=lambda index: sequences[index].prompt_ids)
    return [_Group(prompt, {index: sequences[index].completion_ids for index in each}) for prompt, each in by_prompt]


def _balanced_shards(sequences: Sequence[TokenSequence], indices: Sequence[int], num_shards: int) -> list[list[int]]:
    """Assign groups to shards, the largest first, each to the shard with the fewest tokens."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    num_tokens = [0] * num_shards
    for group in sorted(_groups(sequences, indices), key=lambda group: -group.num_tokens):
        smallest = num_tokens.index(min(num_tokens))
        num_tokens[smallest] += group.num_tokens
        shards[smallest] += group.completions
    return [sorted(shard) for shard in shards]


def _first_fit_decreasing(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Put items into bins of `room`, by their index; an item that is larger gets a bin of its own."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = next((number for number, left in enumerate(free) if sizes[index] <= left), None)
        if place is None:
            bins.append([])
            free.append(room)
            place = -1
        bins[place].append(index)
        free[place] -= sizes[index]
    return bins


def _pack_row(groups: Sequence[_Group], offsets: Sequence[int], device: torch.device) -> MicroBatch:
    """Lay out the prompts that are shared, their completions, and then the sequences that share theirs with none.

    Completions and sequences of one length go side by side: attention takes them together.
    """
    shared = [group for group in groups if len(group.completions) > 1]
    alone = [group for group in groups if len(group.completions) == 1]
    row = _Row()
    for group in shared:
        row.append(group.prompt_ids, position=0)
    prompt_bounds = tuple(row.bounds)
    branch_bounds = [len(row.ids)]
    for group, prompt_stop in zip(shared, prompt_bounds[1:], strict=True):
        for index, completion in sorted(group.completions.items(), key=lambda item: len(item[1])):
            start = row.append(completion, position=len(group.prompt_ids))
            # The first token is predicted by the prompt's last, each other by the one before it.
            row.predict(index, completion, [prompt_stop - 1, *range(start, start + len(completion) - 1)])
        branch_bounds.append(len(row.ids))
    for group in sorted(alone, key=lambda group: group.num_tokens):
        ((index, completion),) = group.completions.items()
        start = row.append(group.prompt_ids + completion, position=0) + len(group.prompt_ids)
        row.predict(index, completion, range(start - 1, start + len(completion) - 1))
    layout = PackedLayout(
        own=Segments(tuple(row.bounds), tuple(row.bounds), causal=True),
        shared=Segments(tuple(bound - branch_bounds[0] for bound in branch_bounds), prompt_bounds, causal=False),
        longest=max(row.positions) + 1,
    )
    places = [(source, target, index, offsets[index] + t) for source, target, index, t in row.predictions]
    source_N, target_N, sequence_N, token_N = torch.tensor(places, device=device).T.contiguous()
    input_ids_T, position_ids_T = torch.tensor([row.ids, row.positions], device=device)
    return MicroBatch(input_ids_T, position_ids_T, layout, source_N, target_N, sequence_N, token_N)


class _Row:
    """The tokens of a micro-batch while they are laid out."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.bounds = [0]
        self.predictions: list[tuple[int, int, int, int]] = []
        """Of each completion token: its source, the token, its sequence, and its place in the completion."""

    def append(self, ids: Sequence[int], *, position: int) -> int:
        """Append tokens, the first of which has this position in its sequence; return where in the row they begin."""
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.bounds.append(len(self.ids))
        return self.bounds[-2]

    def predict(self, index: int, completion: Sequence[int], sources: Sequence[int]) -> None:
        """Note where in the row the completion tokens of a sequence are predicted."""
        pairs = zip(sources, completion, strict=True)
        self.predictions += [(source, target, index, t) for t, (source, target) in enumerate(pairs)]
