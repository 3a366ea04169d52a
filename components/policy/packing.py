"""Prompts with their completions as tokens, packed into micro-batches and sharded over processes.

Sequences lie in one row without padding, each prompt once; or in padded rows, for models that need them (padded.py).

Shape suffixes (a capital per axis, valid in this package):
    T  tokens of a micro-batch, end to end     N  sampled tokens of a micro-batch, all sequences end to end
    B  sequences of the optimizer step, M  their sampled tokens, end to end
A sequence whose history was rewritten while it was sampled (`TokenSequence.forks`) has several branches. The model
reads them as separate sequences, and everything after it counts them as one.
Only what a model sampled carries a loss, neither its prompt nor what an environment wrote between its turns: everything
after the model itself is N long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, repeat
from typing import NamedTuple

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
    forks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Where a chat template rewrote the history: a place in the completion, ascending, and the prompt that the model
    read there instead of all tokens before."""

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

    @property
    def branches(self) -> "list[TokenSequence]":
        """The sequences that the model read, each with its own prompt, up to the last token sampled in each."""
        if not self.forks:
            return [self]
        branches, places = [], self.sampled_places
        bounds = [0, *(place for place, _ in self.forks), len(self.completion_ids)]
        prompts = [self.prompt_ids, *(prompt_ids for _, prompt_ids in self.forks)]
        for prompt_ids, (start, bound) in zip(prompts, pairwise(bounds), strict=True):
            stop = 1 + max((place for place in places if start <= place < bound), default=start - 1)
            own = tuple((a - start, b - start) for a, b in self.environment if start <= a and b <= stop)
            if stop > start:
                branches.append(TokenSequence(prompt_ids, self.completion_ids[start:stop], own))
        return branches


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
    """The index of the sequence that each sampled token belongs to, in any of its branches."""
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
    whole: bool = False,
) -> Shard:
    """Pack this process's shard of the sequences at `indices`; the sequences of one prompt stay together."""
    own = indices if ranks.world_size == 1 else _balanced_shards(sequences, indices, ranks.world_size)[ranks.rank]
    batches = pack(sequences, max_tokens=max_tokens, device=device, indices=own, padded=padded, whole=whole)
    missing = max(ranks.all_gather(len(batches), "the packing of micro-batches")) - len(batches)
    if not missing:
        return Shard(batches, [])
    shortest = min(indices, key=lambda index: len(sequences[index]))
    dummy, *_ = pack(sequences, max_tokens=max_tokens, device=device, indices=[shortest], padded=padded)
    return Shard(batches, [dummy] * missing)


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int] | None = None,
    padded: bool = False,
    whole: bool = False,
) -> list[MicroBatch]:
    """Pack sequences, or those at `indices`, into micro-batches of at most `max_tokens` tokens.

    Neighbours with the same prompt are a group, and share it. A group that alone is longer is split, and pays its
    prompt once per part; a sequence that alone is longer gets its own micro-batch. With `padded`, each sequence is a
    separate row, and padding counts as tokens. With `whole`, all branches of a sequence are in one micro-batch.
    """
    indices = range(len(sequences)) if indices is None else indices
    branches_B = _branches(sequences)
    chosen = [branches_B[index] for index in indices]
    if padded:
        units = chosen if whole else [[branch] for branches in chosen for branch in branches]
        rows_of_batches: list[list[_Branch]] = []
        for unit in sorted(units, key=lambda unit: -_width(unit)):
            rows = rows_of_batches[-1] if rows_of_batches else []
            if rows and _width(rows) * (len(rows) + len(unit)) <= max_tokens:
                rows.extend(unit)
            else:
                rows_of_batches.append(list(unit))
        return [_pack_row([[row] for row in rows], device, width=_width(rows)) for rows in rows_of_batches]
    parts = [_groups(branches) for branches in chosen if whole and len(branches) > 1]
    for group in _groups(_firsts_first(branches for branches in chosen if not whole or len(branches) == 1)):
        lengths = [len(branch.tokens.completion_ids) for branch in group]
        bins = _first_fit_decreasing(lengths, max_tokens - len(group[0].tokens.prompt_ids))
        parts += [[[group[place] for place in sorted(bin_)]] for bin_ in bins]
    packed = _first_fit_decreasing([sum(map(_num_tokens, part)) for part in parts], max_tokens)
    return [_pack_row([group for index in bin_ for group in parts[index]], device) for bin_ in packed]


class _Branch(NamedTuple):
    """What the model reads of a sequence at once."""

    tokens: TokenSequence
    sequence: int
    """The index of the sequence."""
    first_token: int
    """The place of its first sampled token among those of all sequences."""

    def predictions(self, sources: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield source, target, sequence and token of each sampled token: see `MicroBatch`."""
        places = range(self.first_token, self.first_token + self.tokens.num_sampled)
        return zip(sources, self.tokens.sampled_ids, repeat(self.sequence), places, strict=False)


def _branches(sequences: Sequence[TokenSequence]) -> list[list[_Branch]]:
    branches_B, first = [], 0
    for index, sequence in enumerate(sequences):
        branches_B.append(list[_Branch]())
        for tokens in sequence.branches:
            branches_B[-1].append(_Branch(tokens, index, first))
            first += tokens.num_sampled
    return branches_B


def _firsts_first(branches_B: Iterable[list[_Branch]]) -> list[_Branch]:
    """Return first branches before later ones, which share their prompts with none."""
    in_order = list(branches_B)
    return [*(branches[0] for branches in in_order), *(branch for branches in in_order for branch in branches[1:])]


def _groups(branches: Iterable[_Branch]) -> list[list[_Branch]]:
    """Return neighbours with the same prompt together."""
    return [list(group) for _, group in groupby(branches, key=lambda branch: branch.tokens.prompt_ids)]


def _num_tokens(group: Sequence[_Branch]) -> int:
    """Return the tokens of branches that share a prompt."""
    return len(group[0].tokens.prompt_ids) + sum(len(branch.tokens.completion_ids) for branch in group)


def _width(rows: Sequence[_Branch]) -> int:
    return max(len(row.tokens) for row in rows)


def _balanced_shards(sequences: Sequence[TokenSequence], indices: Sequence[int], num_shards: int) -> list[list[int]]:
    """Assign groups to shards, the largest first, each to the shard with the fewest tokens."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    num_tokens = [0] * num_shards
    branches_B = _branches(sequences)
    by_prompt = groupby(indices, key=lambda index: sequences[index].prompt_ids)
    groups = [list(group) for _, group in by_prompt]
    sizes = [sum(map(_num_tokens, _groups(_firsts_first(branches_B[index] for index in group)))) for group in groups]
    for size, group in sorted(zip(sizes, groups, strict=True), key=lambda pair: -pair[0]):
        smallest = num_tokens.index(min(num_tokens))
        num_tokens[smallest] += size
        shards[smallest] += group
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


def _pack_row(groups: Sequence[Sequence[_Branch]], device: torch.device, *, width: int = 0) -> MicroBatch:
    """Lay out the prompts that are shared, their completions, and then the sequences that share theirs with none.

    Completions and sequences of one length go side by side: attention takes them together. The sequences are padded to
    `width` tokens at their ends.
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

    def predict(branch: _Branch, *, start: int, first_source: int) -> None:
        """Note where a completion at a place of the row is predicted: each token but its first by the one before."""
        places = branch.tokens.sampled_places
        predictions.extend(branch.predictions(start + place - 1 if place else first_source for place in places))

    shared = [group for group in groups if len(group) > 1]
    for group in shared:
        append(group[0].tokens.prompt_ids, position=0)
    prompt_bounds = tuple(bounds)
    branch_bounds = [0]
    for group, prompt_stop in zip(shared, prompt_bounds[1:], strict=True):
        for branch in sorted(group, key=lambda branch: len(branch.tokens)):
            predict(branch, start=len(ids), first_source=prompt_stop - 1)
            append(branch.tokens.completion_ids, position=len(branch.tokens.prompt_ids))
        branch_bounds.append(len(ids) - prompt_bounds[-1])
    for branch in sorted((group[0] for group in groups if len(group) == 1), key=lambda branch: len(branch.tokens)):
        tokens = branch.tokens
        start = len(ids) + len(tokens.prompt_ids)
        predict(branch, start=start, first_source=start - 1)
        append((*tokens.prompt_ids, *tokens.completion_ids, *[0] * (width - len(tokens))), position=0)
    layout = PackedLayout(
        own=Segments(tuple(bounds), tuple(bounds), causal=True),
        shared=Segments(tuple(branch_bounds), prompt_bounds, causal=False),
        longest=max(positions) + 1,
    )
    source_N, target_N, sequence_N, token_N = torch.tensor(predictions, device=device).T.contiguous()
    input_ids_T, position_ids_T = torch.tensor([ids, positions], device=device)
    return MicroBatch(input_ids_T, position_ids_T, layout, source_N, target_N, sequence_N, token_N, width)
