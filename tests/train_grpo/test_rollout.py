import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from components.grading.verifier import Verdict
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.rollout.sampler import Completion, Generate
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.experience import experience
from components.train_grpo.metrics import rollout_figures
from components.train_grpo.prompts import Prompts
from components.train_grpo.rollout import Group, Rollout, Score, differs, draw, reward_sets, roll_out
from components.train_grpo.scoring import Scored
from components.train_grpo.update import minibatches
from tests import tiny
from tests.train_grpo.groups import completion, graded, group, rewarded, scored
from tests.train_grpo.settings import grpo_config

NumRight = Callable[[int], int]
MIXED = [number for number in range(24) if number % 4 == 0]
"""The problems whose completions disagree, for `_sometimes`."""


def _sometimes(number: int) -> int:
    """Of every four problems one is solved half the time, two never and one always."""
    return {0: 2, 3: 4}.get(number % 4, 0)


def _roll_out(
    config: TrainGRPOConfig, generate: Generate, score: Score, *, seed: str, prompts: Prompts | None = None
) -> Rollout:
    return roll_out(
        config, prompts or _prompts(config), partial(draw, config, generate, score), seed=seed, ranks=SINGLE_PROCESS
    )


class _Policy:
    """A policy that gives a known number of right answers to each question, and remembers what it was asked."""

    def __init__(self, num_right: NumRight) -> None:
        self._num_right = num_right
        self.calls: list[dict[str, Any]] = []

    def __call__(self, questions: Sequence[str], **settings: Any) -> list[list[Completion]]:
        self.calls.append({"count": len(questions), **settings})
        numbers = [int(re.findall("[0-9]+", question)[0]) for question in questions]
        return [
            [
                completion(1 + sample, text=f"#### {number + number % 7 + (sample >= self._num_right(number))}")
                for sample in range(settings["num_samples"])
            ]
            for number in numbers
        ]


def _score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[list[Scored]]:
    """Rewards for right answers."""
    pairs = zip(problems_P, completions_PG, strict=True)
    return [[graded(problem.answer, each) for each in completions_G] for problem, completions_G in pairs]


def _prompts(config: TrainGRPOConfig) -> Prompts:
    return Prompts(tiny.PROBLEMS, config.prompts, seed=config.seed)


def _number(group: Group) -> int:
    return int(group.problem.id[-3:])


def test_a_rollout_asks_each_problem_and_scores_its_group() -> None:
    """Groups stand where their problems were drawn, and hold that problem's own completions."""
    config, policy = grpo_config(sampling__temperature=0.7, group_size=6), _Policy(lambda number: number % 5)
    rollout = _roll_out(config, policy, _score, seed="7")
    drawn = _prompts(config).draw(3)
    assert [group.problem for group in rollout.sampled] == drawn
    assert [group.num_right for group in rollout.sampled] == [int(problem.id[-3:]) % 5 for problem in drawn]
    assert [len(group.scored_G) for group in rollout.sampled] == [6] * 3
    (call,) = policy.calls
    assert {**call, "seed": None} == {
        "count": 3,
        "num_samples": 6,
        "temperature": 0.7,
        "max_new_tokens": 16,
        "seed": None,
    }
    assert rollout.sampling_s >= 0
    assert rollout.scoring_s >= 0


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_round_is_scored_at_once(rounds: int) -> None:
    """The grader gets all completions of a round in one call, and those of the next in another."""
    config = grpo_config(prompts__max_resampling_rounds=rounds)
    calls: list[list[str]] = []

    def score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[list[Scored]]:
        calls.append([problem.id for problem in problems_P])
        return _score(problems_P, completions_PG)

    rollout = _roll_out(config, _Policy(lambda _: 0), score, seed="1")
    assert [len(ids) for ids in calls] == [3] * (rounds + 1)
    assert [problem for ids in calls for problem in ids] == [group.problem.id for group in rollout.sampled]


@pytest.mark.parametrize("num_right", [0, 4])
def test_without_resampling_all_groups_are_kept(num_right: int) -> None:
    """Zero rounds: all right or all wrong, one round of groups is sampled and trained on."""
    config, policy = grpo_config(), _Policy(lambda _: num_right)
    rollout = _roll_out(config, policy, _score, seed="1")
    assert len(policy.calls) == 1
    assert rollout.trained == rollout.sampled
    assert len(rollout.trained) == 3


@pytest.mark.parametrize("rounds", [1, 2, 4, 20])
@pytest.mark.parametrize("seed", range(3))
def test_groups_without_spread_are_replaced_for_a_bounded_number_of_rounds(rounds: int, seed: int) -> None:
    """Each round asks for just what is missing; only groups that disagree are trained on, and never too many."""
    config = grpo_config(seed=seed, prompts__max_resampling_rounds=rounds)
    policy = _Policy(_sometimes)
    rollout = _roll_out(config, policy, _score, seed="1")
    assert rollout.trained == [group for group in rollout.sampled if _number(group) in MIXED]
    assert len(rollout.trained) <= 3
    assert 1 <= len(policy.calls) <= rounds + 1
    place = kept = 0
    for call in policy.calls:
        assert call["count"] == 3 - kept > 0
        kept += sum(_number(group) in MIXED for group in rollout.sampled[place : place + call["count"]])
        place += call["count"]
    assert place == len(rollout.sampled)
    # It went on until the step was full or the rounds were over.
    assert kept == len(rollout.trained)
    assert kept == 3 or len(policy.calls) == rounds + 1
    assert kept == 3 or rounds < 20


def test_the_rounds_have_seeds_of_their_own() -> None:
    """A replacement is not sampled with the numbers that failed before, nor with those of the next steps."""
    config = grpo_config(prompts__max_resampling_rounds=4)
    seeds = []
    for step in (1, 2, 3):
        policy = _Policy(lambda _: 0)
        _roll_out(config, policy, _score, seed=f"{step}")
        seeds += [call["seed"] for call in policy.calls]
    assert len(seeds) == len(set(seeds)) == 15
    again = _Policy(lambda _: 0)
    _roll_out(config, again, _score, seed="1")
    assert [call["seed"] for call in again.calls] == seeds[:5]


class _Apart(Ranks):
    """A process that hears of no other."""

    def gather(self, value: Any, what: str) -> list[Any]:
        del what
        return [value]


def test_processes_have_random_numbers_of_their_own() -> None:
    """In no round do two of three processes sample with the same seed, nor does one in two rounds."""
    config = grpo_config(prompts__max_resampling_rounds=2)
    policies = [_Policy(lambda _: 0) for _ in range(3)]
    for rank, policy in enumerate(policies):
        sample = partial(draw, config, policy, _score)
        roll_out(config, _prompts(config), sample, seed="1", ranks=_Apart(rank, 3))
    seeds = [call["seed"] for policy in policies for call in policy.calls]
    assert len(seeds) == len(set(seeds)) == 9


def test_a_policy_that_always_agrees_with_itself_has_nothing_to_train_on() -> None:
    """The rounds end, everything sampled is kept for the metrics, and they say which way it agreed."""
    config = grpo_config(prompts__max_resampling_rounds=2)
    rollout = _roll_out(config, _Policy(lambda number: 4 * (number % 2)), _score, seed="1")
    assert rollout.trained == []
    assert len(rollout.sampled) == 9
    figures = rollout_figures(config, rollout, AnswerPolicy.DECLARED)
    odd = sum(_number(group) % 2 for group in rollout.sampled)
    assert (figures["groups_sampled"], figures["groups_trained"]) == (9, 0)
    assert figures["groups_without_spread_fraction"] == 1
    assert figures["groups_all_right_fraction"] == pytest.approx(odd / 9)
    assert figures["groups_all_wrong_fraction"] == pytest.approx(1 - odd / 9)
    assert 0 < odd < 9


def test_what_is_missing_is_not_divided_by() -> None:
    """A step that got one group of three is averaged over the completions of that group alone."""
    config = grpo_config(prompts__max_resampling_rounds=1)
    prompts = Prompts(tiny.PROBLEMS[:5], config.prompts, seed=1)
    rollout = _roll_out(config, _Policy(lambda number: 2 * (number == 0)), _score, seed="1", prompts=prompts)
    assert [_number(group) for group in rollout.trained] == [0]
    given = experience(config, rollout.trained)
    assert given.num_tokens_B.tolist() == [1, 2, 3, 4]
    assert given.advantages_M.tolist() == [1] * 3 + [-1] * 7
    (part,) = minibatches(config, given, torch.device("cpu"), ranks=SINGLE_PROCESS)
    assert part.weights_B.tolist() == pytest.approx([1 / 4, 1 / 8, 1 / 12, 1 / 16], rel=1e-12)


def test_a_curriculum_hears_of_every_group() -> None:
    """The pass rates of all that was sampled are recorded, also of what is dropped; unscorable is not wrong."""
    config = grpo_config(
        prompts__max_resampling_rounds=1, prompts__curriculum={"memory": 0.0, "floor": 0.05}, prompts_per_step=6
    )
    prompts = _prompts(config)

    def score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[list[Scored]]:
        nothing = scored({"accuracy": [math.nan]}, verdict=Verdict.UNSCORABLE)
        return [
            [*others, nothing if last.grade.verdict is Verdict.WRONG else last]
            for *others, last in _score(problems_P, completions_PG)
        ]

    rollout = _roll_out(config, _Policy(_sometimes), score, seed="1", prompts=prompts)
    assert len(rollout.sampled) > len(rollout.trained) > 0
    rates = {4: 1.0, 2: 2 / 3, 0: 0.0}
    expected = {group.problem.id: rates[_sometimes(_number(group))] for group in rollout.sampled}
    assert prompts.state()["pools"]["all"]["pass_rates"] == expected


def test_groups_count_what_is_right_and_what_could_be_graded() -> None:
    """Two right, one wrong, one that nothing can be said of."""
    verdicts = (Verdict.RIGHT, Verdict.WRONG, Verdict.UNSCORABLE, Verdict.RIGHT)
    found = group(*(scored({"accuracy": [0]}, verdict=verdict) for verdict in verdicts))
    assert (found.num_right, found.num_scorable) == (2, 3)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((1, 0), True), ((1, 1), False), ((0.1 + 0.2, 0.3), False), ((1, math.nan), False), ((math.nan, math.nan), False)],
)
def test_a_group_differs_where_its_rewards_do(rewards: tuple[float, ...], expected: bool) -> None:
    """Rounding is no difference, and neither is a missing reward."""
    assert differs(grpo_config(), rewarded(*rewards)) is expected


def test_what_differs_is_what_is_normalised() -> None:
    """Opposite rewards cancel out in a sum before the normalisation, and differ if each is normalised by itself."""
    weights = {"accuracy": 1.0, "format": 1.0}
    found = group(scored({"accuracy": [1], "format": [0]}), scored({"accuracy": [0], "format": [1]}))
    assert not differs(grpo_config(reward__weights=weights), found)
    by_themselves = grpo_config(reward__weights=weights, reward__combination="after_normalisation")
    assert differs(by_themselves, found)
    assert differs(by_themselves, group(*(scored({"accuracy": [x], "format": [1]}) for x in (0, 1))))
    assert not differs(by_themselves, group(*(scored({"accuracy": [0], "format": [1]}) for _ in range(2))))


def test_steps_that_differ_within_a_completion_are_a_difference() -> None:
    """Two completions of equal steps: what is compared are all steps of the group."""
    config = grpo_config(reward__weights={"steps": 1.0}, reward__supervision="process")
    both = [scored({"steps": [1, 0]}, ends=[1, 3]) for _ in range(2)]
    assert differs(config, group(*both))
    assert not differs(config, group(scored({"steps": [1, 1]}, ends=[1, 3]), scored({"steps": [1]})))


def test_the_rewards_of_a_rollout_are_laid_end_to_end() -> None:
    """One weighted sum per step, rows filled up with no reward at all."""
    config = grpo_config(reward__weights={"steps": 1.0, "format": 0.5}, reward__supervision="process")
    first = group(scored({"steps": [1, 0], "format": [1]}, ends=[1, 3]), scored({"steps": [1], "format": [0]}))
    second = group(scored({"steps": [0], "format": [1]}), scored({"steps": [1], "format": [1]}))
    (name, found) = next(iter(reward_sets(config, [first, second]).items()))
    assert name == "combined"
    assert found[:, :2].tolist() == [[1.0, 0.5], [0.5, 1.5]]
    assert found[0, 2] == 1.0
    assert math.isnan(found[1, 2])


def test_each_reward_stands_by_itself_where_it_is_normalised_by_itself() -> None:
    """The weights come later."""
    config = grpo_config(reward__weights={"accuracy": 3.0, "format": 0.5}, reward__combination="after_normalisation")
    groups = [group(scored({"accuracy": [1], "format": [0]}), scored({"accuracy": [0], "format": [1]}))] * 2
    found = {name: rewards.tolist() for name, rewards in reward_sets(config, groups).items()}
    assert found == {"accuracy": [[1, 0]] * 2, "format": [[0, 1]] * 2}
