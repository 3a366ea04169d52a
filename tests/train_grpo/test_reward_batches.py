import torch

from components.policy.packing import TokenSequence
from components.train_grpo.reward_batches import ReadBatch, read_batches


def _batches(max_tokens: int) -> list[ReadBatch]:
    tokens = [TokenSequence((5, 6), (7, 8, 9)), TokenSequence((5,), (6,)), TokenSequence((1, 2, 3), (4,))]
    return read_batches(tokens, [(1, 3), (), (1,)], max_tokens=max_tokens, device=torch.device("cpu"))


def test_a_head_is_read_at_the_last_token_that_an_end_counts() -> None:
    """Rows go by length, padded on the right; ends 1 and 3 after a prompt of 2 are positions 2 and 4."""
    (batch,) = _batches(15)
    assert batch.sequences == (1, 2, 0)
    assert batch.input_ids_BS.tolist() == [[5, 6, 0, 0, 0], [1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]
    assert batch.attention_mask_BS.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert (batch.row_E.tolist(), batch.position_E.tolist()) == ([1, 2, 2], [3, 2, 4])


def test_micro_batches_hold_no_more_tokens_than_allowed() -> None:
    """Padding counts, and a sequence that alone is longer stands alone."""
    assert [batch.sequences for batch in _batches(14)] == [(1, 2), (0,)]
    assert [batch.sequences for batch in _batches(7)] == [(1,), (2,), (0,)]
    assert [batch.sequences for batch in _batches(1)] == [(1,), (2,), (0,)]


def test_sequences_that_are_read_nowhere_are_no_error() -> None:
    """A micro-batch without ends has empty places of an integer type, as indexing needs."""
    (batch,) = read_batches([TokenSequence((1,), (2,))], [()], max_tokens=9, device=torch.device("cpu"))
    assert (batch.row_E.shape, batch.position_E.dtype) == ((0,), torch.long)
