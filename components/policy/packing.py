"""Prompts with their completions as tokens, packed into micro-batches and sharded over processes.

Sequences lie in one row without padding, each prompt once; or in padded rows, for models that need them (padded.py).

Shape suffixes (a capital per axis, valid in this package):
    T  tokens of a micro-batch, end to end     N  sampled tokens of a micro-batch, all sequences end to end
    B  sequences of the optimizer step, M  their sampled tokens, end to end
Only what a model sampled carries a loss, neither its prompt nor what an environment wrote between its turns: everything
after the model itself is N long.
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
    """A prompt and what follows it; the completion includes its end tokens where it has some."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    environment: tuple[tuple[int, int], ...] = ()
    """Which tokens of the completion an environment wrote, as bounds [start, stop) in ascending order: the model reads
    them, and no loss, log-probability or length counts them. All others were sampled."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def sampled_places(self) -> list[int]:
        """The places in the completion of the tokens that were sampled."""
        stops = (0, *(stop for _, stop in self.environment))
        starts = (*(start for start, _ in self.environment), len(self.completion_ids))
        return [place for stop, start in zip(stops, starts, strict=True) for place in range(stop, start)]

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens of the completion that were sampled."""
        return tuple(self.completion_ids[place] for place in self.sampled_places)

    def length_to(self, num_sampled: int) -> int:
        """Return how many tokens the completion has up to and including so many sampled ones, at least one."""
        return self.sampled_places[num_sampled - 1] + 1

    @property
    def num_sampled(self) -> int:
        """How many tokens of the completion were sampled."""
        return len(self.completion_ids) - sum(stop - start for start, stop in self.environment)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences laid end to end, and where the sampled tokens are predicted."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    """The place of each token in its own sequence."""
    layout: PackedLayout
    source_N: Tensor
    """The place in the row whose output predicts each sampled token: that of the token before it."""
    target_N: Tensor
    """The sampled tokens themselves."""
    sequence_N: Tensor
    """The index of the sequence that each sampled token belongs to."""
    token_N: Tensor
    """The place of each sampled token among those of all sequences, laid end to end in their own order (M)."""
    width: int = 0
    """Tokens that every sequence is padded to; 0 where none is padded, and each prompt is there once."""


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
    ranks: Ranks,
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int],
    padded: bool = False,
) -> Shard:
    """Pack this process's shard of the sequences at `indices`; the sequences of one prompt stay together."""
    own = indices if ranks.world_size == 1 else _balanced_shards(sequences, indices, ranks.world_size)[ranks.rank]
    batches = pack(sequences, max_tokens=max_tokens, device=device, indices=own, padded=padded)
    missing = max(ranks.all_gather(len(batches), "the packing of micro-batches")) - len(batches)
    if not missing:
        return Shard(batches, [])
    shortest = min(indices, key=lambda index: len(sequences[index]))
    (dummy,) = pack(sequences, max_tokens=max_tokens, device=device, indices=[shortest], padded=padded)
    return Shard(batches, [dummy] * missing)


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int] | None = None,
    padded: bool = False,
) -> list[MicroBatch]:
    """Pack sequences, or those at `indices`, into micro-batches of at most `max_tokens` tokens.

    Neighbours with the same prompt are a group, and share it. A group that alone is longer is split, and pays its
    prompt once per part; a sequence that alone is longer gets a micro-batch of its own. With `padded`, each sequence is
    a row of its own, and padding counts as tokens.
    """
    indices = range(len(sequences)) if indices is None else indices
    offsets = list(accumulate((sequence.num_sampled for sequence in sequences), initial=0))
    if padded:
        by_length = sorted(indices, key=lambda index: -len(sequences[index]))
        rows_of_batches: list[list[int]] = []
        for index in by_length:
            width = len(sequences[rows_of_batches[-1][0]]) if rows_of_batches else 0
            if rows_of_batches and width * (len(rows_of_batches[-1]) + 1) <= max_tokens:
                rows_of_batches[-1].append(index)
            else:
                rows_of_batches.append([index])
        return [_pad(sequences, rows, offsets, device) for rows in rows_of_batches]
    groups = _groups(sequences, indices)
    parts: list[_Group] = []
    for group in groups:
        members = list(group.completions.items())
        lengths = [len(sequence.completion_ids) for _, sequence in members]
        bins = _first_fit_decreasing(lengths, max_tokens - len(group.prompt_ids))
        parts += [_Group(group.prompt_ids, dict(members[place] for place in sorted(bin_))) for bin_ in bins]
    rows = _first_fit_decreasing([part.num_tokens for part in parts], max_tokens)
    return [_pack_row([parts[index] for index in row], offsets, device) for row in rows]


@dataclass(frozen=True)
class _Group:
    """Completions that share a prompt, by the index of their sequence."""

    prompt_ids: tuple[int, ...]
    completions: dict[int, TokenSequence]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(each.completion_ids) for each in self.completions.values())


def _groups(sequences: Sequence[TokenSequence], indices: Sequence[int]) -> list[_Group]:
    by_prompt = groupby(indices, key=lambda index: sequences[index].prompt_ids)
    return [_Group(prompt, {index: sequences[index] for index in each}) for prompt, each in by_prompt]


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
        place = next((number for number, left in enumerate(free) if sizes[index] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(room)
        bins[place].append(index)
        free[place] -= sizes[index]
    return bins


def _pad(
    sequences: Sequence[TokenSequence], rows: Sequence[int], offsets: Sequence[int], device: torch.device
) -> MicroBatch:
    """Lay out sequences in rows of one length, padded at the end, the longest first."""
    width = len(sequences[rows[0]])
    ids: list[int] = []
    predictions: list[tuple[int, int, int, int]] = []
    for index in rows:
        sequence = sequences[index]
        first = len(ids) + len(sequence.prompt_ids)
        sources = (first + place - 1 for place in sequence.sampled_places)
        tokens = range(offsets[index], offsets[index + 1])
        predictions.extend(zip(sources, sequence.sampled_ids, [index] * len(tokens), tokens, strict=True))
        ids.extend((*sequence.prompt_ids, *sequence.completion_ids, *[0] * (width - len(sequence))))
    bounds = tuple(range(0, len(ids) + 1, width))
    own, none = Segments(bounds, bounds, causal=True), Segments((0,), (0,), causal=False)
    source_N, target_N, sequence_N, token_N = torch.tensor(predictions, device=device).T.contiguous()
    positions_T = torch.arange(width, device=device).repeat(len(rows))
    layout = PackedLayout(own=own, shared=none, longest=width)
    ids_T = torch.tensor(ids, device=device)
    return MicroBatch(ids_T, positions_T, layout, source_N, target_N, sequence_N, token_N, width)


def _pack_row(groups: Sequence[_Group], offsets: Sequence[int], device: torch.device) -> MicroBatch:
    """Lay out the prompts that are shared, their completions, and then the sequences that share theirs with none.

    Completions and sequences of one length go side by side: attention takes them together.
    """
    ids: list[int] = []
    positions: list[int] = []
    bounds = [0]
    predictions: list[tuple[int, int, int, int]] = []

    def append(tokens: Sequence[int], *, position: int) -> None:
        """Append a segment whose first token has this position in its sequence."""
        ids.extend(tokens)
        positions.extend(range(position, position + len(tokens)))
        bounds.append(len(ids))

    def predict(index: int, sequence: TokenSequence, *, first_source: int) -> None:
        """Note where a completion that ends the row is predicted: each token but its first by the one before."""
        start = len(ids) - len(sequence.completion_ids)
        places, tokens = sequence.sampled_places, range(offsets[index], offsets[index + 1])
        sources = [start + place - 1 if place else first_source for place in places]
        predictions.extend(zip(sources, sequence.sampled_ids, [index] * len(tokens), tokens, strict=True))

    shared = [group for group in groups if len(group.completions) > 1]
    for group in shared:
        append(group.prompt_ids, position=0)
    prompt_bounds = tuple(bounds)
    branch_bounds = [0]
    for group, prompt_stop in zip(shared, prompt_bounds[1:], strict=True):
        for index, sequence in sorted(group.completions.items(), key=lambda item: len(item[1])):
            append(sequence.completion_ids, position=len(group.prompt_ids))
            predict(index, sequence, first_source=prompt_stop - 1)
        branch_bounds.append(len(ids) - prompt_bounds[-1])
    for group in sorted((each for each in groups if len(each.completions) == 1), key=lambda group: group.num_tokens):
        ((index, sequence),) = group.completions.items()
        append(group.prompt_ids + sequence.completion_ids, position=0)
        predict(index, sequence, first_source=len(ids) - len(sequence.completion_ids) - 1)
    layout = PackedLayout(
        own=Segments(tuple(bounds), tuple(bounds), causal=True),
        shared=Segments(tuple(branch_bounds), prompt_bounds, causal=False),
        longest=max(positions) + 1,
    )
    source_N, target_N, sequence_N, token_N = torch.tensor(predictions, device=device).T.contiguous()
    input_ids_T, position_ids_T = torch.tensor([ids, positions], device=device)
    return MicroBatch(input_ids_T, position_ids_T, layout, source_N, target_N, sequence_N, token_N)
