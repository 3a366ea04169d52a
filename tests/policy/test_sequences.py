from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.policy.packing import MicroBatch, TokenSequence, pack
from tests import tiny

CPU = torch.device("cpu")
groups = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), max_size=6)
"""For each group the tokens of its prompt and of each completion."""


def _sequences(sizes: list[tuple[int, list[int]]]) -> list[TokenSequence]:
    """Sequences in which every token of a prompt or completion is a number of its own, so that a wrong place shows."""
    token, found = 0, []
    for prompt_length, completion_lengths in sizes:
        prompt = tuple(range(token, token + prompt_length))
        token += prompt_length
        for length in completion_lengths:
            found.append(TokenSequence(prompt, tuple(range(token, token + length))))
            token += length
    return found


def _context(batch: MicroBatch, place: int) -> list[int]:
    """The tokens that the token at a place of the row sees, by the layout: of its prompt, then of its own segment."""
    own, shared, ids = batch.layout.own, batch.layout.shared, batch.input_ids_T.tolist()
    start = max(bound for bound in own.query_bounds if bound <= place)
    seen = ids[start : place + 1]
    first, last = batch.layout.completions.start, batch.layout.completions.stop
    if first <= place < last:
        group = sum(bound <= place - first for bound in shared.query_bounds) - 1
        seen = ids[slice(*shared.key_bounds[group : group + 2])] + seen
    return seen


@given(groups, st.integers(1, 60))
def test_every_completion_token_is_predicted_once_from_all_before_it(
    sizes: list[tuple[int, list[int]]], max_tokens: int
) -> None:
    """It is predicted at the token before it, which sees exactly its prompt and what precedes, in its place."""
    sequences = _sequences(sizes)
    found = {}
    for batch in pack(sequences, max_tokens=max_tokens, device=CPU):
        columns = zip(batch.source_N, batch.target_N, batch.sequence_N, batch.token_N, strict=True)
        for source, target, number, token in (map(int, column) for column in columns):
            sequence = sequences[number]
            place = sequence.completion_ids.index(target)
            assert _context(batch, source) == [*sequence.prompt_ids, *sequence.completion_ids[:place]]
            assert int(batch.position_ids_T[source]) == len(sequence.prompt_ids) + place - 1
            found[token] = target
        assert batch.layout.longest == int(batch.position_ids_T.max()) + 1
    assert found == dict(enumerate(token for each in sequences for token in each.completion_ids))


@given(groups, st.integers(1, 60))
def test_micro_batches_keep_to_their_limit(sizes: list[tuple[int, list[int]]], max_tokens: int) -> None:
    """No micro-batch is longer than the limit, unless it is a single sequence that is."""
    for batch in pack(_sequences(sizes), max_tokens=max_tokens, device=CPU):
        assert len(batch.input_ids_T) <= max_tokens or len(batch.sequence_N.unique()) == 1


@given(groups, st.integers(1, 60))
def test_a_prompt_is_laid_out_once_unless_its_group_is_too_long(
    sizes: list[tuple[int, list[int]]], max_tokens: int
) -> None:
    """No token is repeated or padding, but for the prompts of groups that alone exceed the limit."""
    sequences = _sequences(sizes)
    batches = pack(sequences, max_tokens=max_tokens, device=CPU)
    counts = Counter(token for batch in batches for token in batch.input_ids_T.tolist())
    assert counts.keys() == {token for each in sequences for token in (*each.prompt_ids, *each.completion_ids)}
    group_lengths = {each.prompt_ids: len(each.prompt_ids) for each in sequences}
    for each in sequences:
        group_lengths[each.prompt_ids] += len(each.completion_ids)
    may_repeat = {token for prompt, length in group_lengths.items() if length > max_tokens for token in prompt}
    assert all(count == 1 for token, count in counts.items() if token not in may_repeat)


def test_a_group_of_three_and_a_sequence_alone_by_hand() -> None:
    """Prompt (10 11 12), its completions from short to long, then the sequence that shares its prompt with none."""
    sequences = [
        TokenSequence((10, 11, 12), (20, 21)),
        TokenSequence((10, 11, 12), (30,)),
        TokenSequence((10, 11, 12), (40, 41)),
        TokenSequence((50, 51), (60, 61)),
    ]
    (batch,) = tiny.batches(sequences, 100)
    assert batch.input_ids_T.tolist() == [10, 11, 12, 30, 20, 21, 40, 41, 50, 51, 60, 61]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 3, 4, 3, 4, 0, 1, 2, 3]
    assert batch.layout.own.query_bounds == batch.layout.own.key_bounds == (0, 3, 4, 6, 8, 12)
    assert batch.layout.own.causal
    assert (batch.layout.shared.query_bounds, batch.layout.shared.key_bounds) == ((0, 5), (0, 3))
    assert not batch.layout.shared.causal
    assert (batch.layout.prompts, batch.layout.completions) == (slice(0, 3), slice(3, 8))
    assert batch.layout.longest == 5
    assert batch.source_N.tolist() == [2, 2, 4, 2, 6, 9, 10]
    assert batch.target_N.tolist() == [30, 20, 21, 40, 41, 60, 61]
    assert batch.sequence_N.tolist() == [1, 0, 0, 2, 2, 3, 3]
    assert batch.token_N.tolist() == [2, 0, 1, 3, 4, 5, 6]


def test_a_group_that_is_too_long_pays_its_prompt_once_per_part() -> None:
    """A prompt of 4 with completions of 6, 5, 3 and 2 under a limit of 12: two parts of 12 tokens, not four."""
    prompt = (1, 2, 3, 4)
    sequences = [TokenSequence(prompt, tuple(range(10, 10 + length))) for length in (6, 5, 3, 2)]
    batches = tiny.batches(sequences, 12)
    assert [len(batch.input_ids_T) for batch in batches] == [12, 12]
    assert [sorted(set(batch.sequence_N.tolist())) for batch in batches] == [[0, 3], [1, 2]]


def test_groups_that_fit_together_share_a_micro_batch() -> None:
    """Groups of 6, 5, 4 and 3 tokens under a limit of 9 need two micro-batches, and get no more."""
    sequences = _sequences([(3, [1, 2]), (4, [1]), (1, [1, 1, 1]), (1, [2])])
    assert sorted(len(batch.input_ids_T) for batch in tiny.batches(sequences, 9)) == [9, 9]


def test_only_neighbours_are_a_group() -> None:
    """The same prompt further away is computed again: who gives the sequences decides what belongs together."""
    first, other = TokenSequence((1, 2), (3,)), TokenSequence((4,), (5,))
    (together,) = tiny.batches([first, first, other], 100)
    (apart,) = tiny.batches([first, other, first], 100)
    assert (len(together.input_ids_T), len(apart.input_ids_T)) == (2 + 1 + 1 + 2, 3 + 2 + 3)


@pytest.mark.parametrize("max_tokens", [1, 8, 100])
def test_chosen_sequences_keep_their_numbers_and_places(max_tokens: int) -> None:
    """What is left out is in no micro-batch; numbers and places stay those among all sequences."""
    sequences = _sequences([(2, [3, 1, 2]), (3, [2]), (1, [1, 4])])
    offsets = [0, 3, 4, 6, 8, 9]
    chosen = [5, 0, 2]
    found = {}
    for batch in pack(sequences, max_tokens=max_tokens, device=CPU, indices=chosen):
        columns = zip(batch.token_N.tolist(), batch.sequence_N.tolist(), batch.target_N.tolist(), strict=True)
        found.update({token: (number, target) for token, number, target in columns})
    assert found == {
        offsets[number] + place: (number, token)
        for number in chosen
        for place, token in enumerate(sequences[number].completion_ids)
    }
    assert pack(sequences, max_tokens=max_tokens, device=CPU, indices=[]) == []
