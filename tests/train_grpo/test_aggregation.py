import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.train_grpo.aggregation import token_weights
from components.train_grpo.config import Aggregation


def _weights(aggregation: str, *num_tokens: int) -> list[float]:
    found: list[float] = token_weights(
        torch.tensor(num_tokens, dtype=torch.float64), Aggregation(aggregation), max_new_tokens=10
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sequence_mean", [1 / 2, 1 / 8]), ("token_mean", [1 / 5, 1 / 5]), ("constant", [1 / 20, 1 / 20])],
)
def test_the_weights_by_hand(aggregation: str, expected: list[float]) -> None:
    """Completions of one and four tokens, under a length limit of ten."""
    assert _weights(aggregation, 1, 4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sequence_mean", (3 + 3) / 2), ("token_mean", 15 / 5), ("constant", 15 / 20)]
)
def test_the_weighted_sum_is_the_mean_that_is_meant(aggregation: str, expected: float) -> None:
    """Token losses 3 and 1, 2, 3, 6: the mean of two means of 3, fifteen over five tokens, fifteen over twice ten."""
    losses = [[3.0], [1.0, 2.0, 3.0, 6.0]]
    weights = _weights(aggregation, 1, 4)
    total = sum(weight * sum(tokens) for weight, tokens in zip(weights, losses, strict=True))
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sequence_mean", [1 / 4, 0, 1 / 8]), ("token_mean", [1 / 6, 0, 1 / 6]), ("constant", [1 / 20, 0, 1 / 20])],
)
def test_a_completion_of_no_tokens_is_not_counted(aggregation: str, expected: list[float]) -> None:
    """A masked completion has no weight, and the others have what they would have without it."""
    assert _weights(aggregation, 2, 0, 4) == pytest.approx(expected, rel=1e-12)
    assert [_weights(aggregation, 2, 4)[index] for index in (0, 1)] == pytest.approx([expected[0], expected[2]])


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_nothing_at_all_has_no_weight(aggregation: Aggregation) -> None:
    """With every completion masked the weights are zero, and none is the ratio of nothing to nothing."""
    assert _weights(aggregation, 0, 0, 0) == [0.0] * 3


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 10), min_size=1, max_size=8).filter(any))
def test_the_weights_of_all_tokens_sum_to_one(lengths: list[int]) -> None:
    """Both means do; the constant's weights sum to the mean length over the limit."""
    totals = {
        each: sum(weight * num for weight, num in zip(_weights(each, *lengths), lengths, strict=True))
        for each in Aggregation
    }
    num_counted = sum(length > 0 for length in lengths)
    assert totals[Aggregation.SEQUENCE_MEAN] == pytest.approx(1)
    assert totals[Aggregation.TOKEN_MEAN] == pytest.approx(1)
    assert totals[Aggregation.CONSTANT] == pytest.approx(sum(lengths) / num_counted / 10)
