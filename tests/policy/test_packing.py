from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.policy.packing import MicroBatch, Shard, TokenSequence, pack, pack_shard
from components.policy.parallel import Ranks
from tests import tiny
from tests.policy import plain

CPU = torch.device("cpu")
TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=3).filter(
    lambda turns: any(sampled for _, sampled in turns)
)
"""Tokens of a completion: those of an environment and sampled ones, in turns."""
GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(TURNS, min_size=1, max_size=5)), max_size=6)
"""For each group the tokens of its prompt and of each completion."""


def _sequences(sizes: list[tuple[int, list[int]]]) -> list[TokenSequence]:
    """Sequences in which every token of a prompt or completion is a number of its own, so that a wrong place shows."""
    token, sequences = 0, []
    for prompt_length, completion_lengths in sizes:
        prompt = tuple(range(token, token + prompt_length))
        token += prompt_length
        for length in completion_lengths:
            sequences.append(TokenSequence(prompt, tuple(range(token, token + length))))
            token += length
    return sequences


def _trajectories(sizes: list[tuple[int, list[list[tuple[int, int]]]]]) -> list[TokenSequence]:
    """The same, with tokens of an environment between sampled ones."""
    turns_B = [turns for _, completions in sizes for turns in completions]
    sequences = _sequences([(prompt, [sum(map(sum, turns)) for turns in each]) for prompt, each in sizes])
    trajectories = []
    for sequence, turns in zip(sequences, turns_B, strict=True):
        stops = list(accumulate(tokens for turn in turns for tokens in turn))
        starts = [0, *stops]
        trajectories.append(replace(sequence, environment=tuple(zip(starts[::2], stops[::2], strict=False))))
    return trajectories


def _context(batch: MicroBatch, place: int) -> list[int]:
    """The tokens that the token at a place of the row sees, by the layout: of its prompt, then of its own segment."""
    own, shared, ids = batch.layout.self_attention, batch.layout.prompt_attention, batch.input_ids_T.tolist()
    start = max(bound for bound in own.query_bounds if bound <= place)
    visible = ids[start : place + 1]
    first, last = batch.layout.completions.start, batch.layout.completions.stop
    if first <= place < last:
        group = sum(bound <= place - first for bound in shared.query_bounds) - 1
        visible = ids[slice(*shared.key_bounds[group : group + 2])] + visible
    return visible


@settings(max_examples=50)
@given(GROUPS, st.integers(1, 60), st.sampled_from([1, 2, 3]))
def test_packing_keeps_contexts_limits_and_prompts(
    sizes: list[tuple[int, list[list[tuple[int, int]]]]], max_tokens: int, step: int
) -> None:
    """Each sampled token of the selected is predicted once; only prompts of groups beyond the limit are repeated."""
    sequences = _trajectories(sizes)
    selected = range(len(sequences))[::step]
    targets = {}
    counts: Counter[int] = Counter()
    for batch in pack(sequences, max_tokens=max_tokens, device=CPU, indices=None if step == 1 else selected):
        columns = zip(batch.source_N, batch.target_N, batch.sequence_N, batch.token_N, strict=True)
        for source, target, number, token in (map(int, column) for column in columns):
            sequence = sequences[number]
            place = sequence.completion_ids.index(target)
            assert _context(batch, source) == [*sequence.prompt_ids, *sequence.completion_ids[:place]]
            assert int(batch.position_ids_T[source]) == len(sequence.prompt_ids) + place - 1
            targets[token] = target
        assert batch.layout.max_length == int(batch.position_ids_T.max()) + 1
        assert len(batch.input_ids_T) <= max_tokens or len(batch.sequence_N.unique()) == 1
        counts.update(batch.input_ids_T.tolist())
    sampled = [(number, token) for number, each in enumerate(sequences) for token in each.sampled_ids]
    assert targets == {place: token for place, (number, token) in enumerate(sampled) if number in selected}
    packed = [sequences[number] for number in selected]
    assert counts.keys() == {token for each in packed for token in (*each.prompt_ids, *each.completion_ids)}
    lengths = Counter({each.prompt_ids: len(each.prompt_ids) for each in packed})
    for each in packed:
        lengths[each.prompt_ids] += len(each.completion_ids)
    split = {token for prompt, length in lengths.items() if length > max_tokens for token in prompt}
    assert all(count == 1 for token, count in counts.items() if token not in split)


def test_a_group_that_is_too_long_is_split_with_its_prompt() -> None:
    """A prompt of 4 with completions of 6, 5, 3 and 2 under a limit of 12: two parts of 12 tokens, not four."""
    prompt = (1, 2, 3, 4)
    sequences = [TokenSequence(prompt, tuple(range(10, 10 + length))) for length in (6, 5, 3, 2)]
    batches = tiny.batches(sequences, 12)
    assert [len(batch.input_ids_T) for batch in batches] == [12, 12]
    assert [sorted(set(batch.sequence_N.tolist())) for batch in batches] == [[0, 3], [1, 2]]


BRANCHES = [
    [
        TokenSequence((1, 2), (10, 11, 12, 13), ((1, 2),)),
        TokenSequence((1, 2, 3, 4), (14,)),
        TokenSequence((5,), (6, 7)),
    ],
    [TokenSequence((1, 2), (15, 16))],
    [TokenSequence((1, 2), (17,)), TokenSequence((1, 3), (18, 19, 20, 21), ((1, 3),))],
    [TokenSequence((8, 9), (22, 23, 24))],
]
"""What is read of four sequences; no token that is sampled is sampled twice."""


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 9, 14, 100])
def test_each_branch_of_a_forked_sequence_is_read_by_itself(max_tokens: int, padded: bool, whole: bool) -> None:
    """Its tokens are those of the sequence, in their order; all are in one micro-batch where that is asked for."""
    sequences = [plain.forked(*branches) for branches in BRANCHES]
    assert [sequence.branches for sequence in sequences] == BRANCHES
    batches = pack(sequences, max_tokens=max_tokens, device=CPU, padded=padded, whole_sequences=whole)
    contexts: dict[int, tuple[int, int, list[int]]] = {}
    for batch in batches:
        columns = zip(batch.source_N, batch.target_N, batch.sequence_N, batch.token_N, strict=True)
        for source, target, number, token in (map(int, column) for column in columns):
            contexts[token] = (number, target, _context(batch, source))
    assert [contexts[token] for token in range(len(contexts))] == [
        (number, branch.completion_ids[place], [*branch.prompt_ids, *branch.completion_ids[:place]])
        for number, branches in enumerate(BRANCHES)
        for branch in branches
        for place in branch.sampled_places
    ]
    counts = Counter(number for batch in batches for number in set(batch.sequence_N.tolist()))
    assert (max(counts.values()) == 1) == (whole or max_tokens == 100)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_a_forked_sequence_is_in_one_shard(num_shards: int) -> None:
    """Whose size counts all of its branches; a dummy batch has one of them at most."""
    sequences = [plain.forked(*branches) for branches in BRANCHES]
    shards = _shards(num_shards, sequences, [0, 2, 3], max_tokens=6)
    numbers = [{number for batch in each.batches for number in batch.sequence_N.tolist()} for each in shards]
    assert numbers == ([{0, 2}, {3}] if num_shards == 2 else [{0, 2}, {3}, set()])
    assert len({len(each.all_batches) for each in shards}) == 1


class _TwoRanks(Ranks):
    """A rank to which another reports its number of micro-batches."""

    others = 0

    def all_gather(self, value: object, what: str) -> list[object]:  # type: ignore[override]
        del what
        return [value, self.others]


def _shards(num_shards: int, sequences: list[TokenSequence], indices: list[int], max_tokens: int = 64) -> list[Shard]:
    def shard(rank: int, others: int) -> Shard:
        ranks = _TwoRanks(rank, num_shards)
        ranks.others = others
        return pack_shard(ranks, sequences, max_tokens=max_tokens, device=CPU, indices=indices)

    most = max(len(shard(rank, 0).batches) for rank in range(num_shards))
    return [shard(rank, most) for rank in range(num_shards)]


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_each_completion_is_in_one_shard_and_all_shards_make_as_many_passes(num_shards: int) -> None:
    """Sequences that were not selected are in none; a shard without batches has dummies."""
    sequences = _sequences([(2 + group % 3, [4, 9, 1, 20 - group]) for group in range(7)])
    indices = [number for number in range(28) if number % 5]
    shards = _shards(num_shards, sequences, indices)
    counts = Counter(index for each in shards for batch in each.batches for index in set(batch.sequence_N.tolist()))
    assert counts == Counter(indices)
    assert len({len(each.all_batches) for each in shards}) == 1
    for each in shards:
        assert each.all_batches == each.batches + each.dummies
        assert bool(each.batches) or num_shards > 7


def test_the_largest_groups_are_assigned_first() -> None:
    """Four groups of 10 tokens and then one of 40: in their own order, one process would have 60 and one 20."""
    sequences = [TokenSequence((number,), tuple(range(length))) for number, length in enumerate([9, 9, 9, 9, 39])]
    shards = _shards(2, sequences, list(range(5)))
    assert [sum(len(batch.input_ids_T) for batch in each.batches) for each in shards] == [40, 40]
