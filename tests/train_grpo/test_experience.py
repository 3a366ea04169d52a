import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.train_grpo.advantages import advantages
from components.train_grpo.config import AdvantageEstimator
from components.train_grpo.experience import Experience, experience, rollout_advantages
from tests.train_grpo.groups import completion, group, rewarded, scored
from tests.train_grpo.settings import grpo_config

NAN = math.nan
THIRD = 1 / math.sqrt(3)
PROCESS: dict[str, Any] = {"reward__weights": {"steps": 1.0}, "reward__supervision": "process"}
DECOUPLED: dict[str, Any] = {
    "reward__weights": {"accuracy": 1.0, "format": 1.0},
    "reward__combination": "after_normalisation",
}


def test_outcome_supervision_gives_every_token_its_completions_advantage() -> None:
    """The worked example over completions of different lengths; a second group is normalised by itself."""
    found = rollout_advantages(
        grpo_config(), [rewarded(1, 1, 1, 0, lengths=[1, 2, 1, 3]), rewarded(0, 1, 0, 1, lengths=[1, 1, 2, 1])]
    )
    assert found.tolist() == pytest.approx([THIRD] * 4 + [-3 * THIRD] * 3 + [-1, 1, -1, -1, 1], rel=1e-12)
    assert found.dtype == torch.float64


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
def test_process_supervision_of_one_step_is_outcome_supervision(estimator: AdvantageEstimator) -> None:
    """With one step per completion, which ends with it, both give the same numbers to the last bit."""
    rewards, lengths = [[0.3, 1.7, -2.0], [0.1, 0.1, 0.7]], [5, 1, 7]
    as_steps = [
        group(*(scored({"steps": [reward]}, num_tokens=num) for reward, num in zip(row, lengths, strict=True)))
        for row in rewards
    ]
    of_steps = rollout_advantages(grpo_config(advantage__estimator=estimator, **PROCESS), as_steps)
    outcome = rollout_advantages(
        grpo_config(advantage__estimator=estimator), [rewarded(*row, lengths=lengths) for row in rewards]
    )
    assert of_steps.tolist() == outcome.tolist()
    found = advantages(torch.tensor(rewards, dtype=torch.float64), estimator).flatten().tolist()
    each = zip(found, lengths * 2, strict=True)
    assert outcome.tolist() == [advantage for advantage, length in each for _ in range(length)]


def test_process_supervision_normalises_over_all_steps_of_the_group() -> None:
    """By hand: steps 1, 1 and 1, 0 have mean 3/4 together; a token sums the steps to come, and after them has none."""
    one = scored({"steps": [1, 1]}, ends=[2, 4], num_tokens=4)
    other = scored({"steps": [1, 0]}, ends=[1, 4], num_tokens=5)
    found = rollout_advantages(grpo_config(**PROCESS), [group(one, other)])
    expected = [2, 2, 1, 1, 1 - 3, -3, -3, -3, 0]
    assert found.tolist() == pytest.approx([THIRD * each for each in expected], rel=1e-12)


def test_groups_with_different_numbers_of_steps_do_not_see_each_other() -> None:
    """Five steps beside two: the padding of the shorter row is no reward."""
    many = group(scored({"steps": [1, 0, 1]}, ends=[1, 2, 3]), scored({"steps": [1, 1]}, ends=[1, 3]))
    few = group(scored({"steps": [1]}, ends=[3]), scored({"steps": [0]}, ends=[3]))
    config = grpo_config(**PROCESS)
    assert rollout_advantages(config, [many, few])[6:].tolist() == [1, 1, 1, -1, -1, -1]
    assert rollout_advantages(config, [many, few])[:6].tolist() == rollout_advantages(config, [many]).tolist()


def test_a_step_that_could_not_be_scored_adds_nothing() -> None:
    """Its reward is in no statistic; the completion's other steps still count."""
    one = scored({"steps": [1, NAN]}, ends=[1, 2], num_tokens=2)
    other = scored({"steps": [1, 1, 0]}, ends=[1, 2, 3])
    found = rollout_advantages(grpo_config(**PROCESS), [group(one, other)])
    assert found.tolist() == pytest.approx([THIRD, 0, -THIRD, -2 * THIRD, -3 * THIRD], rel=1e-12)


def test_penalties_come_off_the_rewards_before_normalisation() -> None:
    """By hand: rewards 1, 1, 0, 0 less 1/2, 0, 0, -1/2 are 1/2, 1, 0, 1/2, of deviation sqrt(1/8)."""
    groups = [rewarded(1, 1, 0, 0), rewarded(1, 0, 1, 0)]
    found = rollout_advantages(grpo_config(), groups, torch.tensor([0.5, 0, 0, -0.5, 2, 2, 2, 2]))
    expected = [0, math.sqrt(2), -math.sqrt(2), 0, 1, -1, 1, -1]
    assert found.tolist() == pytest.approx([each for each in expected for _ in range(3)], rel=1e-12)


def test_penalties_make_a_difference_where_the_rewards_have_none() -> None:
    """A group that is all right is then told apart by its distance from the reference; the groups stay as they were."""
    groups = [rewarded(1, 1)]
    penalties = torch.tensor([0.0, 0.4], dtype=torch.float64)
    assert rollout_advantages(grpo_config(), groups, penalties).tolist() == pytest.approx([1.0] * 3 + [-1.0] * 3)
    assert rollout_advantages(grpo_config(), groups).tolist() == [0.0] * 6


def test_a_penalty_comes_off_the_last_step() -> None:
    """Under process supervision it is the answer's step that pays; what has no reward has none less either."""
    one = scored({"steps": [1, 1.5]}, ends=[1, 2], num_tokens=2)
    other = scored({"steps": [1, NAN]}, ends=[1, 2], num_tokens=2)
    third = scored({"steps": [0.25]}, num_tokens=1)
    found = rollout_advantages(
        grpo_config(**PROCESS), [group(one, other, third)], torch.tensor([0.5, 7.0, 0.25], dtype=torch.float64)
    )
    assert found.tolist() == pytest.approx([2 * THIRD, THIRD, THIRD, 0, -3 * THIRD], rel=1e-12)


def _judged(accuracy: list[float], format_: list[float]) -> Any:
    """A group of completions of one token with two rewards each."""
    pairs = zip(accuracy, format_, strict=True)
    return group(*(scored({"accuracy": [one], "format": [other]}, num_tokens=1) for one, other in pairs))


def test_rewards_normalised_by_themselves_are_summed_and_divided_by_the_deviation_of_the_rollout() -> None:
    """By hand, with s = 1 / sqrt(3): z-scores s, s, s, -3s and 1, -1, 1, -1, and in the second group s, s, s, -3s.

    The squares of the sums add up to 12 s^2 + 8 s + 4 = 8 + 8 s in the first group and to 12 s^2 = 4 in the second.
    """
    groups = [_judged([1, 1, 1, 0], [1, 0, 1, 0]), _judged([0, 0, 0, 0], [1, 1, 1, 0])]
    s = THIRD
    sums = [s + 1, s - 1, s + 1, -3 * s - 1, s, s, s, -3 * s]
    expected = [each / math.sqrt((12 + 8 * s) / 8) for each in sums]
    assert rollout_advantages(grpo_config(**DECOUPLED), groups).tolist() == pytest.approx(expected, rel=1e-12)


def test_rewards_with_the_same_sum_differ_once_normalised_by_themselves() -> None:
    """The rarer success stands out more: what summing before the normalisation cannot tell apart."""
    groups = [_judged([1, 0, 0, 0], [0, 1, 1, 1])]
    before = grpo_config(reward__weights={"accuracy": 1.0, "format": 1.0})
    assert rollout_advantages(before, groups).tolist() == [0.0] * 4
    groups = [_judged([1, 0, 0, 0], [0, 1, 1, 0])]
    rarer, common, *_ = rollout_advantages(before, groups).tolist()
    assert rarer == common
    rarer, common, *_ = rollout_advantages(grpo_config(**DECOUPLED), groups).tolist()
    assert rarer > common


@pytest.mark.parametrize("estimator", ["z_score", "mean_only"])
def test_the_weights_stand_before_the_normalised_rewards(estimator: str) -> None:
    """With weights 2 and 1/2 it is the plain formula; weights before the normalisation would cancel out."""
    accuracy, format_ = [1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0, 1.0]
    config = grpo_config(
        **{**DECOUPLED, "reward__weights": {"accuracy": 2.0, "format": 0.5}}, advantage__estimator=estimator
    )
    found = rollout_advantages(config, [_judged(accuracy, format_)])
    divisors = [statistics.pstdev(each) if estimator == "z_score" else 1.0 for each in (accuracy, format_)]
    sums = [
        2 * (one - 2 / 5) / divisors[0] + 0.5 * (other - 3 / 5) / divisors[1]
        for one, other in zip(accuracy, format_, strict=True)
    ]
    assert found.tolist() == pytest.approx([each / statistics.pstdev(sums) for each in sums], rel=1e-9)


def test_a_completion_that_lacks_one_of_the_rewards_has_no_advantage() -> None:
    """It is left out of the deviation too: of the sums 2, -, -2, - there remain 2 and -2."""
    config = grpo_config(**DECOUPLED)
    assert rollout_advantages(config, [_judged([1, NAN, 0, NAN], [1, 1, 0, 0])]).tolist() == [1, 0, -1, 0]
    assert rollout_advantages(config, [_judged([NAN] * 3, [1, 0, 0])]).tolist() == [0.0] * 3


def test_a_completion_that_lacks_one_of_the_rewards_is_in_the_statistics_of_none() -> None:
    """By hand, with r = 1 / sqrt(2): of accuracy 1, 0, 1, - and format 1, 0, 0, (1) the first three count.

    Accuracy has mean 2/3, format 1/3, both deviation sqrt(2)/3: z-scores r, -2r, r and 2r, -r, -r, which add up to 3r,
    -3r, 0 = 2.12, -2.12, 0. Their deviation is 3r sqrt(2/3) = sqrt(3). (With the last one's format of 1 counted the
    z-scores of format would be 1, -1, -1, and the sums 1.71, -2.41, -0.29.)
    """
    found = rollout_advantages(grpo_config(**DECOUPLED), [_judged([1, 0, 1, NAN], [1, 0, 0, 1])])
    summed = 3 / math.sqrt(2)
    assert found.tolist() == pytest.approx([summed / math.sqrt(3), -summed / math.sqrt(3), 0, 0], rel=1e-12)


def test_rewards_that_cancel_out_leave_no_advantage() -> None:
    """What is left of opposite rewards in all groups is rounding, and is not blown up to one."""
    config = grpo_config(**{**DECOUPLED, "reward__weights": {"accuracy": 0.1, "format": 0.1}})
    groups = [_judged([1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]), _judged([0.1, 0.2, 0.4], [0.4, 0.3, 0.1])]
    for each in groups:
        assert rollout_advantages(config, [each]).tolist() == [0.0] * len(each.scored_G)


@pytest.mark.parametrize(("truncated", "counted"), [("score", True), ("mask", False)])
def test_what_was_cut_off_is_in_the_loss_unless_it_is_masked(truncated: str, counted: bool) -> None:
    """Only `mask` leaves it out; a completion that finished, or could not be scored, is always in."""
    config = grpo_config(sampling__truncated=truncated)
    groups = [group(scored({"accuracy": [1]}), scored({"accuracy": [NAN]}), scored({"accuracy": [0]}, finished=False))]
    assert experience(config, groups).counted_B.tolist() == [True, True, counted]


def test_an_experience_lists_the_completions_group_after_group() -> None:
    """Sequences, lengths, advantages and what the sampler said are in the order of the groups."""
    groups = [rewarded(1, 0, lengths=[1, 2]), rewarded(0, 1, lengths=[3, 1])]
    found = experience(grpo_config(group_size=2), groups)
    assert found.sequences_B == [completion(length).tokens for length in (1, 2, 3, 1)]
    assert found.num_tokens_B.tolist() == [1, 2, 3, 1]
    assert found.advantages_M.tolist() == pytest.approx([1, -1, -1, -1, -1, -1, 1])
    assert found.sampler_logprobs_M.tolist() == [-1.0] * 7
    assert found.sampler_logprobs_M.dtype == torch.float64
    penalised = experience(grpo_config(group_size=2), groups, torch.tensor([2.0, 0, 0, 0], dtype=torch.float64))
    assert penalised.advantages_M.tolist() == pytest.approx([-1, 1, 1, -1, -1, -1, 1])


def _of_size(num_groups: int, group_size: int) -> Experience:
    sequences = [completion(1).tokens] * (num_groups * group_size)
    nothing = torch.zeros(len(sequences))
    return Experience(sequences, group_size, nothing == 0, nothing, nothing)


@pytest.mark.parametrize(
    ("num_groups", "count", "expected"),
    [
        (4, 2, [range(6), range(6, 12)]),
        (4, 1, [range(12)]),
        (3, 2, [range(3), range(3, 9)]),
        (1, 3, [range(3)]),
        (4, 4, [range(3), range(3, 6), range(6, 9), range(9, 12)]),
    ],
)
def test_minibatches_are_whole_groups(num_groups: int, count: int, expected: list[range]) -> None:
    """By hand, groups of three; where dynamic sampling left fewer groups than parts, there are fewer parts."""
    assert _of_size(num_groups, 3).minibatches(count) == expected


@settings(deadline=None)
@given(num_groups=st.integers(1, 12), group_size=st.integers(2, 5), count=st.integers(1, 6))
def test_every_completion_is_in_one_minibatch(num_groups: int, group_size: int, count: int) -> None:
    """Parts follow each other without a gap, and their sizes differ by one group at most."""
    parts = _of_size(num_groups, group_size).minibatches(count)
    assert [number for part in parts for number in part] == list(range(num_groups * group_size))
    assert all(len(part) > 0 and len(part) % group_size == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= group_size
