import torch
from hypothesis import given
from hypothesis import strategies as st

from components.policy.sequences import TokenSequence, micro_batches

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def _sequences(sizes: list[tuple[int, int]]) -> list[TokenSequence]:
    """Sequences in which every token is a different number, so that a wrong place shows."""
    token, found = 1, []
    for prompt, completion in sizes:
        ids = tuple(range(token, token + prompt + completion))
        token += prompt + completion
        found.append(TokenSequence(ids[:prompt], ids[prompt:]))
    return found


@given(lengths, st.integers(1, 60))
def test_every_completion_token_is_predicted_once_from_the_token_before_it(
    sizes: list[tuple[int, int]], max_tokens: int
) -> None:
    """Each completion token appears once, in its own sequence, and is predicted at the position of the one before."""
    sequences = _sequences(sizes)
    found = {}
    for batch in micro_batches(sequences, max_tokens=max_tokens, pad_id=0, device=torch.device("cpu")):
        before_N = batch.input_ids_BS[batch.row_N, batch.position_N]
        for sequence, before, target in zip(batch.sequence_N, before_N, batch.target_N, strict=True):
            assert int(target) == int(before) + 1
            found[int(target)] = int(sequence)
    assert found == {token: index for index, each in enumerate(sequences) for token in each.completion_ids}


@given(lengths, st.integers(1, 60))
def test_micro_batches_keep_to_their_limit_with_padding(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    """No micro-batch exceeds the limit unless it is a single sequence that does, and padding is never attended to."""
    sequences = _sequences(sizes)
    for batch in micro_batches(sequences, max_tokens=max_tokens, pad_id=0, device=torch.device("cpu")):
        assert batch.input_ids_BS.numel() <= max_tokens or len(batch.sequences) == 1
        assert batch.attention_mask_BS.sum(dim=1).tolist() == [len(sequences[index]) for index in batch.sequences]
        assert torch.equal(batch.input_ids_BS > 0, batch.attention_mask_BS.bool())
