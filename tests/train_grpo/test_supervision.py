from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.train_grpo.supervision import token_advantages

FLOATS = st.floats(-10, 10)


def test_a_token_sums_the_steps_that_end_at_it_or_later() -> None:
    """By hand, two completions: what follows the last step's end gets zero, and no completion sees the other's."""
    found = token_advantages(
        torch.tensor([[1.0, -2.0, 0.5, 0.25, -1.0]], dtype=torch.float64), [[(2, 4), (1, 2, 3)]], [[5, 3]]
    )
    assert found.tolist() == [-1.0, -1.0, -2.0, -2.0, 0.0, -0.25, -0.75, -1.0]


def test_padding_is_no_step() -> None:
    """The second group has fewer steps: what fills its row up reaches no token."""
    padded = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]], dtype=torch.float64)
    assert token_advantages(padded, [[(1,), (1, 2)], [(2,)]], [[1, 2], [2]]).tolist() == [1.0, 5.0, 3.0, 4.0, 4.0]


@settings(deadline=None)
@given(data=st.data())
def test_one_step_that_ends_with_the_completion_is_outcome_supervision(data: st.DataObject) -> None:
    """Every token of a completion then has its completion's advantage, to the last bit."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    advantages = data.draw(st.lists(FLOATS, min_size=len(lengths), max_size=len(lengths)))
    found = token_advantages(
        torch.tensor([advantages], dtype=torch.float64), [[(length,) for length in lengths]], [lengths]
    )
    each = zip(advantages, lengths, strict=True)
    assert found.tolist() == [advantage for advantage, length in each for _ in range(length)]


def _plainly(
    advantages_PK: Sequence[Sequence[float]], ends_PG: list[list[list[int]]], num: list[list[int]]
) -> list[float]:
    """Section 4.1.3, token by token and step by step."""
    tokens = []
    for advantages_K, ends_G, num_G in zip(advantages_PK, ends_PG, num, strict=True):
        first = 0
        for ends, num_tokens in zip(ends_G, num_G, strict=True):
            for token in range(num_tokens):
                total = 0.0
                for step, end in enumerate(ends):
                    if end - 1 >= token:
                        total += advantages_K[first + step]
                tokens.append(total)
            first += len(ends)
    return tokens


@settings(deadline=None)
@given(data=st.data())
def test_it_is_the_double_loop_over_tokens_and_steps(data: st.DataObject) -> None:
    """For any groups, completions and steps."""
    num_tokens_PG = data.draw(
        st.lists(st.lists(st.integers(1, 8), min_size=2, max_size=2), min_size=1, max_size=3), label="lengths"
    )
    ends_PG = [
        [sorted(data.draw(st.sets(st.integers(1, length), min_size=1), label="ends")) for length in lengths]
        for lengths in num_tokens_PG
    ]
    num_steps = max(sum(map(len, ends_G)) for ends_G in ends_PG)
    advantages_PK = [data.draw(st.lists(FLOATS, min_size=num_steps, max_size=num_steps)) for _ in ends_PG]
    found = token_advantages(torch.tensor(advantages_PK, dtype=torch.float64), ends_PG, num_tokens_PG)
    assert found.tolist() == pytest.approx(_plainly(advantages_PK, ends_PG, num_tokens_PG), abs=1e-12)
