"""Prompts with their completions as tokens, and micro-batches of them without padding.

Shape suffixes (a capital per axis, valid in this package):
    T  tokens of a micro-batch, end to end     N  completion tokens of a micro-batch, all sequences end to end
    B  sequences given, M their completion tokens, end to end
Only completion tokens carry a loss, so everything after the model itself is N long.
"""

from collections.abc import Iterable, Sequence
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
    """The sequence that each completion token belongs to."""
    token_N: Tensor
    """The place of each completion token among those of all sequences, laid end to end in their own order (M)."""


@dataclass(frozen=True)
class _Group:
    """Sequences that share a prompt, by their number in the optimizer step."""

    prompt_ids: tuple[int, ...]
    members: tuple[int, ...]


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Split sequences, or those of them with the `indices` numbers, into micro-batches of at most `max_tokens` tokens.

    Neighbours with the same prompt are a group, and share it. A group that alone is longer is split, and pays its
    prompt once per part; a sequence that alone is longer gets a micro-batch of its own.
    """
    numbers = range(len(sequences)) if indices is None else indices
    parts = [part for group in _groups(sequences, numbers) for part in _split(group, sequences, max_tokens)]
    bins = _first_fit([_num_tokens(part, sequences) for part in parts], max_tokens)
    return [_pack([parts[index] for index in bin_], sequences, device) for bin_ in bins]


def _groups(sequences: Sequence[TokenSequence], numbers: Sequence[int]) -> list[_Group]:
    by_prompt = groupby(numbers, key=lambda number: sequences[number].prompt_ids)
    return [_Group(prompt_ids, tuple(members)) for prompt_ids, members in by_prompt]


def _split(group: _Group, sequences: Sequence[TokenSequence], max_tokens: int) -> list[_Group]:
    """The group in parts of at most `max_tokens` tokens."""
    room = max_tokens - len(group.prompt_ids)
    lengths = [len(sequences[number].completion_ids) for number in group.members]
    return [
        _Group(group.prompt_ids, tuple(group.members[index] for index in sorted(bin_)))
        for bin_ in _first_fit(lengths, room)
    ]


def _first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Put items into as few bins of `room` as first-fit decreasing finds; one too large gets a bin of its own."""
    bins: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = next((number for number, free in enumerate(left) if sizes[index] <= free), None)
        if place is None:
            bins.append([])
            left.append(room)
            place = -1
        bins[place].append(index)
        left[place] -= sizes[index]
    return bins


def _num_tokens(group: _Group, sequences: Sequence[TokenSequence]) -> int:
    return len(group.prompt_ids) + sum(len(sequences[number].completion_ids) for number in group.members)


class _Row:
    """A micro-batch being laid out."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.bounds = [0]
        self.members: list[int] = []
        self.sources: list[int] = []

    def lay(self, ids: Sequence[int], *, position: int) -> int:
        """Lay tokens at the end of the row, of which the first has this position; return where they begin."""
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.bounds.append(len(self.ids))
        return self.bounds[-2]

    def predict(self, number: int, sources: Sequence[int]) -> None:
        """Note from where in the row the completion tokens of a sequence are predicted."""
        self.members.append(number)
        self.sources += sources


def _pack(groups: Sequence[_Group], sequences: Sequence[TokenSequence], device: torch.device) -> MicroBatch:
    """Lay out the prompts that are shared, their completions, and then the sequences that share theirs with none.

    Completions and sequences of one length go side by side: attention takes them together.
    """
    shared = [group for group in groups if len(group.members) > 1]
    alone = [group.members[0] for group in groups if len(group.members) == 1]
    row = _Row()
    for group in shared:
        row.lay(group.prompt_ids, position=0)
    prompt_bounds = tuple(row.bounds)
    branch_bounds = [len(row.ids)]
    for group, prompt_stop in zip(shared, prompt_bounds[1:], strict=True):
        for number in sorted(group.members, key=lambda number: len(sequences[number])):
            completion = sequences[number].completion_ids
            start = row.lay(completion, position=len(group.prompt_ids))
            # The first token is predicted by the prompt's last, each other by the one before it.
            row.predict(number, [prompt_stop - 1, *range(start, start + len(completion) - 1)])
        branch_bounds.append(len(row.ids))
    for number in sorted(alone, key=lambda number: len(sequences[number])):
        sequence = sequences[number]
        start = row.lay((*sequence.prompt_ids, *sequence.completion_ids), position=0)
        row.predict(number, range(start + len(sequence.prompt_ids) - 1, start + len(sequence) - 1))
    bounds = tuple(row.bounds)
    layout = PackedLayout(
        own=Segments(bounds, bounds, causal=True),
        shared=Segments(tuple(bound - branch_bounds[0] for bound in branch_bounds), prompt_bounds, causal=False),
        longest=max(row.positions) + 1,
    )
    return _finish(row, layout, sequences, device)


def _finish(row: _Row, layout: PackedLayout, sequences: Sequence[TokenSequence], device: torch.device) -> MicroBatch:
    offsets = list(accumulate((len(sequence.completion_ids) for sequence in sequences), initial=0))
    completions = [(number, sequences[number].completion_ids) for number in row.members]

    def on_device(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=device)

    return MicroBatch(
        input_ids_T=on_device(row.ids),
        position_ids_T=on_device(row.positions),
        layout=layout,
        source_N=on_device(row.sources),
        target_N=on_device(token for _, completion in completions for token in completion),
        sequence_N=on_device(number for number, completion in completions for _ in completion),
        token_N=on_device(offsets[number] + t for number, completion in completions for t in range(len(completion))),
    )


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


def _balanced_shards(sequences: Sequence[TokenSequence], indices: Sequence[int], num_shards: int) -> list[list[int]]:
    """Assign groups to shards, the largest first, each to the shard with the fewest tokens."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    num_tokens = [0] * num_shards
    for group in sorted(_groups(sequences, indices), key=lambda group: -_num_tokens(group, sequences)):
        smallest = num_tokens.index(min(num_tokens))
        num_tokens[smallest] += _num_tokens(group, sequences)
        shards[smallest] += group.members
    return [sorted(shard) for shard in shards]
