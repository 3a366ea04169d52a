from dataclasses import replace

import pytest

from components.grading.verifier import Grade, Verdict
from components.shared.errors import PipelineError
from components.train_grpo.failure import Failure
from components.train_grpo.rollout import Group
from components.train_grpo.scoring import Scored
from components.train_grpo.unscorable import refuse_unscorable
from tests import tiny
from tests.train_grpo.groups import scored
from tests.train_grpo.settings import grpo_config

FINE = scored({"accuracy": [0]}, verdict=Verdict.WRONG)


def _failed(detail: str, kind: str = "reward mine:own raised KeyError") -> Scored:
    return replace(FINE.without_reward(), failure=Failure(kind, f"{kind}: {detail}"))


def _ungraded(reason: str) -> Scored:
    return replace(FINE.without_reward(), grade=Grade(Verdict.UNSCORABLE, None, reason))


def _groups(*bad: Scored, size: int = 10) -> list[Group]:
    """Two groups with `size` completions in all, the bad ones last."""
    row = [FINE] * (size - len(bad)) + list(bad)
    return [Group(tiny.PROBLEMS[0], row[: size // 2]), Group(tiny.PROBLEMS[1], row[size // 2 :])]


@pytest.mark.parametrize(("limit", "count"), [(0.0, 0), (0.1, 1), (0.3, 3), (1.0, 10)])
def test_as_much_as_the_limit_passes(limit: float, count: int) -> None:
    """The limit itself is allowed."""
    refuse_unscorable(grpo_config(reward__max_unscorable_fraction=limit), _groups(*[_failed("a")] * count))
    of_hundred = _groups(*[_failed("a")] * 29, size=100)  # 0.29 times 100 is a little less than 29
    refuse_unscorable(grpo_config(reward__max_unscorable_fraction=0.29), of_hundred)


@pytest.mark.parametrize(("limit", "count"), [(0.0, 1), (0.1, 2), (0.3, 4), (0.99, 10)])
def test_more_than_the_limit_stops_the_run(limit: float, count: int) -> None:
    """It says how much there was, how much there may be, and by which key."""
    config = grpo_config(reward__max_unscorable_fraction=limit)
    with pytest.raises(PipelineError) as error:
        refuse_unscorable(config, _groups(*[_failed("a")] * count))
    assert f"{10 * count}% of the 10 completions of a rollout are unscorable" in str(error.value)
    assert f"train_grpo.reward.max_unscorable_fraction is {limit:g}" in str(error.value)


def test_the_commonest_reasons_come_first_with_their_counts_and_an_example() -> None:
    """What failed in the same way is counted together, whatever its details; three reasons are shown."""
    bad = [
        _ungraded("the comparison did not end"),
        _failed("'a'"),
        _failed("'b'"),
        _ungraded("the comparison did not end"),
        _failed("rare", kind="reward mine:other returned no finite number"),
        _failed("'c'"),
        _ungraded("the expected answer is empty"),
        _ungraded("the expected answer is empty"),
    ]
    with pytest.raises(PipelineError) as error:
        refuse_unscorable(grpo_config(), _groups(*bad, size=16))
    first, second = tiny.PROBLEMS[:2]
    message = str(error.value)
    assert f"3 times, first for problem {second.id}: reward mine:own raised KeyError: 'a'" in message
    assert f"2 times, first for problem {second.id}: the grader says: the comparison did not end" in message
    assert f"2 times, first for problem {second.id}: the grader says: the expected answer is empty" in message
    assert message.index("3 times") < message.index("2 times")
    assert "rare" not in message
    assert first.id not in message
    assert "\n" not in message


def test_what_is_masked_or_wrong_is_not_counted() -> None:
    """A completion without reward because it was cut off has a verdict."""
    masked = scored({"accuracy": [0]}, verdict=Verdict.WRONG, finished=False).without_reward()
    config = grpo_config(sampling__truncated="mask", reward__max_unscorable_fraction=0)
    refuse_unscorable(config, _groups(*[masked] * 9))
