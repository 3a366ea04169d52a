import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.train_grpo.advantages import group_advantages, has_spread

NAN = math.nan
rewards = st.lists(st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3)), min_size=2, max_size=16)


def _advantages(*group: float) -> list[float]:
    return group_advantages(torch.tensor([group], dtype=torch.float64))[0].tolist()


def test_three_right_and_one_wrong() -> None:
    """The worked example: mean 0.75, biased standard deviation 0.433."""
    assert _advantages(1, 1, 1, 0) == pytest.approx([1 / math.sqrt(3)] * 3 + [-math.sqrt(3)])


def test_one_right_among_many_stands_out_by_the_root_of_the_others() -> None:
    """A single success in G has advantage sqrt(G - 1)."""
    assert _advantages(1, *[0] * 7)[0] == pytest.approx(math.sqrt(7))


@pytest.mark.parametrize("group", [(1, 1, 1), (0, 0, 0), (0.1 + 0.2, 0.3, 0.3), (1e8, 1e8, 1e8)])
def test_a_group_without_spread_has_advantage_exactly_zero(group: tuple[float, ...]) -> None:
    """All right, all wrong, or different only by rounding: nothing to learn, not even noise."""
    assert _advantages(*group) == [0.0, 0.0, 0.0]


@given(rewards)
def test_advantages_have_mean_zero_and_variance_one(group: list[float]) -> None:
    """Whatever the rewards, unless they are all equal."""
    found = torch.tensor(_advantages(*group), dtype=torch.float64)
    if bool(has_spread(torch.tensor([group], dtype=torch.float64))):
        assert float(found.mean()) == pytest.approx(0, abs=1e-6)
        assert float(found.square().mean()) == pytest.approx(1)
    else:
        assert found.tolist() == [0.0] * len(group)


@given(rewards, st.floats(0.5, 10), st.floats(-5, 5))
def test_scaling_and_shifting_rewards_changes_nothing(group: list[float], scale: float, shift: float) -> None:
    """Advantages are relative: 0 and 1 teach the same as -3 and 5."""
    spread = max(group) - min(group)
    if spread > 0.01:
        moved = _advantages(*(scale * reward + shift for reward in group))
        assert moved == pytest.approx(_advantages(*group), abs=1e-6)


def test_what_could_not_be_scored_is_left_out() -> None:
    """NaN counts neither in the mean nor in the deviation, and its own advantage is zero."""
    assert _advantages(1, NAN, 1, 1, 0, NAN) == pytest.approx([3**-0.5, 0, 3**-0.5, 3**-0.5, -(3**0.5), 0])
    assert _advantages(NAN, NAN) == [0.0, 0.0]
    assert _advantages(NAN, 1) == [0.0, 0.0]


def test_groups_do_not_see_each_other() -> None:
    """Each row is normalised by itself."""
    both = group_advantages(torch.tensor([[1, 0, 0, 0], [5, 5, 5, 5]], dtype=torch.float64))
    assert both[0].tolist() == pytest.approx(_advantages(1, 0, 0, 0))
    assert both[1].tolist() == [0.0] * 4
