"""Prompts with their completions as tokens, packed into micro-batches and sharded over processes.

Sequences are in one row without padding, each prompt once; or in padded rows, for models that need them (padded.py).

Shape suffixes (a capital per axis, valid in this package):
    T  tokens of a micro-batch, end to end     N  sampled tokens of a micro-batch, all sequences end to end
    B  sequences of the optimizer step, M  their sampled tokens, end to end
If a chat template rewrote the history while a sequence was sampled (`TokenSequence.forks`), the sequence has several
branches. The model reads them as separate sequences; losses and log-probabilities count them as one.
Only sampled tokens carry a loss, not the prompt or the text of an environment, so losses and log-probabilities are N
long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from components.policy.attention import PackedLayout, Segments
from components.policy.parallel import Ranks


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its completion, which includes its end tokens if it has any."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    environment: tuple[tuple[int, int], ...] = ()
    """Bounds [start, stop), ascending, of the completion tokens that an environment wrote: the model reads them, but no
    loss, log-probability or length counts them. The model sampled all others."""
    forks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Where a chat template rewrote the history: positions in the completion, ascending, each with the prompt that the
    model read there instead of all tokens before."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def sampled_places(self) -> list[int]:
        """The positions of the sampled tokens in the completion."""
        written = {place for bounds in self.environment for place in range(*bounds)}
        return [place for place in range(len(self.completion_ids)) if place not in written]

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens of the completion that were sampled."""
        return tuple(self.completion_ids[place] for place in self.sampled_places)

    def length_to(self, num_sampled: int) -> int:
        """Return the number of completion tokens up to the `num_sampled`-th sampled one (from 1), which counts too."""
        return self.sampled_places[num_sampled - 1] + 1

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens in the completion."""
        return len(self.completion_ids) - sum(stop - start for start, stop in self.environment)

    @property
    def branches(self) -> "list[TokenSequence]":
        """The sequences that the model read: from each prompt to the last token sampled before the next fork."""
        if not self.forks:
            return [self]
        branches, sampled_places = [], self.sampled_places
        bounds = [0, *(place for place, _ in self.forks), len(self.completion_ids)]
        prompts = [self.prompt_ids, *(prompt_ids for _, prompt_ids in self.forks)]
        for prompt_ids, (start, next_start) in zip(prompts, pairwise(bounds), strict=True):
            sampled = [place for place in sampled_places if start <= place < next_start]
            if sampled:
                stop = sampled[-1] + 1
                environment = tuple((a - start, b - start) for a, b in self.environment if start <= a and b <= stop)
                branches.append(TokenSequence(prompt_ids, self.completion_ids[start:stop], environment))
        return branches


@dataclass(frozen=True)
class MicroBatch:
    """Sequences in one row of tokens, and for each sampled token where it is predicted."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    """The position of each token in its own sequence."""
    layout: PackedLayout
    source_N: Tensor
    """The index in the row of the token whose output predicts each sampled token: the token before it."""
    target_N: Tensor
    """The ids of the sampled tokens."""
    sequence_N: Tensor
    """The index of the sequence that each sampled token belongs to."""
    token_N: Tensor
    """The index of each sampled token among the M sampled tokens of all sequences."""
    width: int = 0
    """Tokens that every sequence is padded to; 0 for a row without padding, in which prompts are shared."""


@dataclass(frozen=True)
class Shard:
    """The part of one process in an optimizer step that all processes take together."""

    batches: list[MicroBatch]
    dummies: list[MicroBatch]
    """Batches with a loss of zero: under ZeRO 2 and 3 each pass waits for one of every other process, so all processes
    need as many passes as the one with the most micro-batches."""

    @property
    def all_batches(self) -> list[MicroBatch]:
        """All batches to pass through the model; every process has the same number."""
        return self.batches + self.dummies


def pack_shard(
    ranks: Ranks,
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int],
    padded: bool = False,
    whole_sequences: bool = False,
) -> Shard:
    """Pack (see `pack`) this process's shard of the sequences at `indices`; each group is in one shard."""
    own = _balanced_shards(sequences, indices, ranks.world_size)[ranks.rank] if ranks.world_size > 1 else indices
    batches = pack(
        sequences, max_tokens=max_tokens, device=device, indices=own, padded=padded, whole_sequences=whole_sequences
    )
    num_dummies = max(ranks.all_gather(len(batches), "the packing of micro-batches")) - len(batches)
    if not num_dummies:
        return Shard(batches, [])
    shortest = min(indices, key=lambda index: len(sequences[index]))
    dummy, *_ = pack(sequences, max_tokens=max_tokens, device=device, indices=[shortest], padded=padded)
    return Shard(batches, [dummy] * num_dummies)


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    device: torch.device,
    indices: Sequence[int] | None = None,
    padded: bool = False,
    whole_sequences: bool = False,
) -> list[MicroBatch]:
    """Pack sequences, or those at `indices`, into micro-batches of at most `max_tokens` tokens.

    Consecutive sequences with the same prompt are a group, and share it. A group that alone exceeds the limit is split,
    and has its prompt once per part; a sequence that alone exceeds it gets its own micro-batch. With `padded`, each
    sequence is a separate row, and padding counts as tokens. `whole_sequences` keeps the branches of a sequence in one
    micro-batch.
    """
    indices = range(len(sequences)) if indices is None else indices
    branches_B = _branches(sequences)
    chosen = [branches_B[index] for index in indices]
    if padded:
        units = chosen if whole_sequences else [[branch] for branches in chosen for branch in branches]
        return _pack_padded(units, max_tokens, device)
    # A part is a list of groups that stay together: all branches of a sequence, or as much of one group as fits.
    parts = [_groups(branches) for branches in chosen if whole_sequences and len(branches) > 1]
    divisible = [branches for branches in chosen if not whole_sequences or len(branches) == 1]
    for group in _groups(_later_branches_last(divisible)):
        lengths = [len(branch.tokens.completion_ids) for branch in group]
        for places in _first_fit_decreasing(lengths, max_tokens - len(group[0].tokens.prompt_ids)):
            parts.append([[group[place] for place in sorted(places)]])
    rows = _first_fit_decreasing([sum(map(_num_tokens, part)) for part in parts], max_tokens)
    return [_pack_row([group for index in row for group in parts[index]], device) for row in rows]


class _Branch(NamedTuple):
    """A branch of a sequence: see `TokenSequence.branches`."""

    tokens: TokenSequence
    sequence: int
    """The index of the sequence."""
    first_token: int
    """The index of its first sampled token among the sampled tokens of all sequences."""


def _branches(sequences: Sequence[TokenSequence]) -> list[list[_Branch]]:
    """Return the branches of each sequence."""
    branches_B: list[list[_Branch]] = []
    first_token = 0
    for index, sequence in enumerate(sequences):
        branches_B.append([])
        for tokens in sequence.branches:
            branches_B[-1].append(_Branch(tokens, index, first_token))
            first_token += tokens.num_sampled
    return branches_B


def _later_branches_last(branches_B: Sequence[list[_Branch]]) -> list[_Branch]:
    """Return the first branches of all sequences, which may share prompts, before the others, which do not."""
    later = [branch for branches in branches_B for branch in branches[1:]]
    return [branches[0] for branches in branches_B] + later


def _groups(branches: Iterable[_Branch]) -> list[list[_Branch]]:
    """Return consecutive branches with the same prompt as groups."""
    return [list(group) for _, group in groupby(branches, key=lambda branch: branch.tokens.prompt_ids)]


def _num_tokens(group: Sequence[_Branch]) -> int:
    """Return the tokens of a group, its prompt counted once."""
    return len(group[0].tokens.prompt_ids) + sum(len(branch.tokens.completion_ids) for branch in group)


def _pack_padded(units: Sequence[list[_Branch]], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Pack branches as padded rows, longest first, which needs little padding; a unit stays in one micro-batch."""
    batches: list[list[_Branch]] = []
    for unit in sorted(units, key=_max_length, reverse=True):
        if batches and _max_length(batches[-1]) * (len(batches[-1]) + len(unit)) <= max_tokens:
            batches[-1] += unit
        else:
            batches.append(list(unit))
    return [_pack_row([[row] for row in rows], device, width=_max_length(rows)) for rows in batches]


def _max_length(branches: Sequence[_Branch]) -> int:
    return max(len(branch.tokens) for branch in branches)


def _balanced_shards(sequences: Sequence[TokenSequence], indices: Sequence[int], num_shards: int) -> list[list[int]]:
    """Return the indices of each shard: groups are assigned, the largest first, to the shard with the fewest tokens."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    num_tokens = [0] * num_shards
    branches_B = _branches(sequences)
    sized_groups = []
    for _, group in groupby(indices, key=lambda index: sequences[index].prompt_ids):
        members = list(group)
        branches = _later_branches_last([branches_B[index] for index in members])
        sized_groups.append((sum(map(_num_tokens, _groups(branches))), members))
    for size, members in sorted(sized_groups, key=lambda pair: -pair[0]):
        smallest = num_tokens.index(min(num_tokens))
        num_tokens[smallest] += size
        shards[smallest] += members
    return [sorted(shard) for shard in shards]


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the items in each bin: the largest first, each is put into the first bin with room."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        first = next((number for number, left in enumerate(free) if sizes[index] <= left), len(bins))
        if first == len(bins):
            bins.append([])
            free.append(capacity)
        bins[first].append(index)
        free[first] -= sizes[index]
    return bins


def _pack_row(groups: Sequence[Sequence[_Branch]], device: torch.device, *, width: int = 0) -> MicroBatch:
    """Return a row of the shared prompts, the completions that share them, and the sequences that share no prompt.

    Completions and sequences of equal length are adjacent, so that attention computes them in one call. The sequences
    are padded at their ends to `width` tokens.
    """
    ids: list[int] = []
    positions: list[int] = []
    bounds = [0]
    predictions: list[tuple[int, int, int, int]] = []
    """Source, target, sequence and token (see `MicroBatch`) of each sampled token."""

    def append(tokens: Sequence[int], *, position: int) -> None:
        """Append a segment whose first token has this position in its sequence."""
        ids.extend(tokens)
        positions.extend(range(position, position + len(tokens)))
        bounds.append(len(ids))

    def predict(branch: _Branch, *, start: int, prompt_end: int) -> None:
        """Record the predictions of a completion at `start`; the last token of its prompt is at `prompt_end`."""
        for number, place in enumerate(branch.tokens.sampled_places):
            source = start + place - 1 if place else prompt_end
            target = branch.tokens.completion_ids[place]
            predictions.append((source, target, branch.sequence, branch.first_token + number))

    shared = [group for group in groups if len(group) > 1]
    for group in shared:
        append(group[0].tokens.prompt_ids, position=0)
    prompt_bounds = tuple(bounds)
    completion_bounds = [0]
    for group, prompt_stop in zip(shared, prompt_bounds[1:], strict=True):
        for branch in sorted(group, key=lambda branch: len(branch.tokens)):
            predict(branch, start=len(ids), prompt_end=prompt_stop - 1)
            append(branch.tokens.completion_ids, position=len(branch.tokens.prompt_ids))
        completion_bounds.append(len(ids) - prompt_bounds[-1])
    alone = [group[0] for group in groups if len(group) == 1]
    for branch in sorted(alone, key=lambda branch: len(branch.tokens)):
        tokens = branch.tokens
        start = len(ids) + len(tokens.prompt_ids)
        predict(branch, start=start, prompt_end=start - 1)
        append((*tokens.prompt_ids, *tokens.completion_ids, *[0] * (width - len(tokens))), position=0)
    layout = PackedLayout(
        self_attention=Segments(tuple(bounds), tuple(bounds), causal=True),
        prompt_attention=Segments(tuple(completion_bounds), prompt_bounds, causal=False),
        max_length=max(positions) + 1,
    )
    source_N, target_N, sequence_N, token_N = torch.tensor(predictions, device=device).T.contiguous()
    input_ids_T, position_ids_T = torch.tensor([ids, positions], device=device)
    return MicroBatch(input_ids_T, position_ids_T, layout, source_N, target_N, sequence_N, token_N, width)
