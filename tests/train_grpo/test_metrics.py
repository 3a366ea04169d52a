import math
from dataclasses import replace
from typing import Any

import pytest

from components.grading.verifier import Verdict
from components.shared.answer_policy import AnswerPolicy
from components.train_grpo.experience import experience
from components.train_grpo.failure import Failure
from components.train_grpo.metrics import completion_records, mean, rollout_figures
from components.train_grpo.rollout import Group, Rollout
from tests import tiny
from tests.train_grpo.groups import completion, graded, group, rewarded, scored
from tests.train_grpo.settings import grpo_config

TEXTS = [
    ["1+1=2\n#### 0", "#### 0", "#### 5", "#### 0"],  # three right, one of them worked
    ["#### 2", "#### 2", "#### 2", "#### 2"],  # all right
    ["#### 9", "no idea", "#### 9", "#### 4"],  # all wrong, one of them cut off though it was right
]


def _groups() -> list[Group]:
    """Three groups of four completions, of 2, 3, 4 ... tokens."""
    return [
        Group(
            problem,
            [
                graded(problem.answer, completion(2 + row + sample, text=text, finished=text != "#### 4"))
                for sample, text in enumerate(texts)
            ],
        )
        for row, (problem, texts) in enumerate(zip(tiny.PROBLEMS[:3], TEXTS, strict=True))
    ]


def _figures(
    sampled: list[Group],
    trained: list[Group] | None = None,
    policy: AnswerPolicy = AnswerPolicy.DECLARED,
    **changes: Any,
) -> dict[str, float]:
    rollout = Rollout(sampled, sampled if trained is None else trained, sampling_s=0.0, scoring_s=0.0)
    return rollout_figures(grpo_config(**changes), rollout, policy)


def test_the_figures_of_a_rollout_by_hand() -> None:
    """Shares are over all twelve completions; two of three groups have nothing to learn from."""
    found = _figures(_groups(), _groups()[:1])
    assert found == pytest.approx(
        {
            "reward": 7 / 12,
            "reward_accuracy": 7 / 12,
            "accuracy": 7 / 12,
            "worked_fraction": 1 / 12,
            "completion_length_tokens": (2 + 3 + 4 + 5 + 3 + 4 + 5 + 6 + 4 + 5 + 6 + 7) / 12,
            "completion_length_max_tokens": 7,
            "truncated_fraction": 1 / 12,
            "unscorable_fraction": 0,
            "reward_failures": 0,
            "groups_sampled": 3,
            "groups_trained": 1,
            "groups_without_spread_fraction": 2 / 3,
            "groups_all_right_fraction": 1 / 3,
            "groups_all_wrong_fraction": 1 / 3,
        }
    )


def test_what_could_not_be_scored_is_counted_and_left_out_of_the_means() -> None:
    """A gold answer that nobody can read: one unscorable of four, and it is neither right nor wrong."""
    unreadable = tiny.problem(0, answer="\\frac{1}{")
    one = graded(unreadable.answer, completion(text="#### 1"))
    found = _figures([group(one, *_groups()[0].scored_G[:3])])
    assert (found["unscorable_fraction"], found["reward"], found["accuracy"]) == pytest.approx((1 / 4, 2 / 3, 2 / 3))
    assert found["reward_failures"] == 0
    nothing = _figures([group(one, one)])
    assert nothing["unscorable_fraction"] == 1
    assert math.isnan(nothing["reward"])
    assert math.isnan(nothing["accuracy"])
    # Without a right or a wrong answer in it, a group is neither all right nor all wrong.
    assert nothing["groups_without_spread_fraction"] == 1
    assert nothing["groups_all_right_fraction"] == nothing["groups_all_wrong_fraction"] == 0


def test_every_reward_has_a_mean_of_its_own() -> None:
    """By hand: the weighted sum of each completion, and each reward before its weight, over all steps."""
    weights = {"steps": 1.0, "format": 0.5}
    found = _figures(
        [group(scored({"steps": [1, 0, 0], "format": [1]}, ends=[1, 2, 3]), scored({"steps": [1], "format": [0]}))],
        reward__weights=weights,
        reward__supervision="process",
    )
    assert (found["reward"], found["reward_steps"], found["reward_format"]) == pytest.approx((2.5 / 2, 2 / 4, 1 / 2))


def test_a_reward_that_failed_is_counted_and_left_out_of_the_means() -> None:
    """By hand, one failure of four: the verdict still counts among the verdicts; its own column says how many."""
    failure = Failure("reward mine:own raised KeyError", "reward mine:own raised KeyError: 'a' (mine.py, line 2)")
    weights = {"accuracy": 1.0, "mine:own": 0.5}
    worth = [scored({"accuracy": [value], "mine:own": [1]}) for value in (1, 1, 0)]
    failed = replace(scored({name: [1] for name in weights}, verdict=Verdict.WRONG).without_reward(), failure=failure)
    found = _figures([group(*worth, failed)], reward__weights=weights)
    assert (found["reward_failures"], found["unscorable_fraction"]) == (1, 1 / 4)
    assert (found["reward"], found["reward_accuracy"], found["reward_mine_own"]) == pytest.approx((3.5 / 3, 2 / 3, 1))
    assert found["accuracy"] == 3 / 4


def test_what_is_worked_is_worked_for_the_answer_in_its_place() -> None:
    """A box is no answer where a mark is asked for."""
    boxed = group(*(scored({"accuracy": [0]}) for _ in range(2)))
    boxed = group(*(replace(each, completion=completion(text=r"So \boxed{1}")) for each in boxed.scored_G))
    assert _figures([boxed], policy=AnswerPolicy.BOXED)["worked_fraction"] == 1
    assert _figures([boxed], policy=AnswerPolicy.MARKED)["worked_fraction"] == 0


def test_the_mean_is_over_numbers_only() -> None:
    """NaN is left out; nothing has no mean, which is not the mean zero."""
    assert mean([1, math.nan, 3]) == 2
    assert mean([True, False, False, False]) == 0.25
    assert math.isnan(mean([math.nan]))
    assert math.isnan(mean([]))


def test_records_name_problem_and_sample() -> None:
    """What is kept to read says which problem, which sample, what was said and what it was worth."""
    config = grpo_config(completions_kept_per_step=5)
    groups = _groups()
    kept = list(completion_records(config, groups, experience(config, groups), step=7))
    assert [(row["id"], row["sample"], row["completion"]) for row in kept] == [
        *((tiny.PROBLEMS[0].id, sample, TEXTS[0][sample]) for sample in range(4)),
        (tiny.PROBLEMS[1].id, 0, TEXTS[1][0]),
    ]
    third = 1 / math.sqrt(3)
    assert [row["reward"] for row in kept] == [1, 1, 0, 1, 1]
    assert [row["advantage"] for row in kept] == pytest.approx([third, third, -3 * third, third, 0])
    assert {name: kept[2][name] for name in ("step", "question", "answer", "verdict", "num_tokens", "finished")} == {
        "step": 7,
        "question": tiny.PROBLEMS[0].question,
        "answer": "0",
        "verdict": "wrong",
        "num_tokens": 4,
        "finished": True,
    }
    assert kept[2]["rewards"] == {"accuracy": [0.0]}


def test_records_show_all_rewards_of_all_steps() -> None:
    """A missing reward is null; the advantage is that of the first token, which all steps add to."""
    config = grpo_config(group_size=2, reward__weights={"steps": 1.0, "format": 0.5}, reward__supervision="process")
    groups = [
        group(
            scored({"steps": [1, 0], "format": [1]}, ends=[1, 3]),
            scored({"steps": [1, math.nan], "format": [0]}, ends=[1, 3]),
        )
    ]
    given = experience(config, groups)
    first, second = completion_records(config, groups, given, step=1)
    assert (first["reward"], first["rewards"]) == (1.5, {"steps": [1.0, 0.0], "format": [1.0]})
    assert (second["reward"], second["rewards"]) == (None, {"steps": [1.0, None], "format": [0.0]})
    assert (first["advantage"], second["advantage"]) == (float(given.advantages_M[0]), float(given.advantages_M[3]))


def test_records_say_what_was_graded_and_why() -> None:
    """Extracted answer, verdict and reason of the grader, and which reward failed, if one did."""
    config = grpo_config(group_size=2)
    right, wrong = (graded("7", completion(text=text)) for text in ("#### 7", "seven"))
    failed = replace(right.without_reward(), failure=Failure("kind", "reward mine:own returned None"))
    groups = [group(failed, wrong)]
    first, second = completion_records(config, groups, experience(config, groups), step=1)
    assert (first["verdict"], first["extracted"], first["reason"]) == ("right", "7", right.grade.reason)
    assert (first["reward"], first["reward_failure"]) == (None, "reward mine:own returned None")
    assert (second["verdict"], second["extracted"], second["reason"]) == ("wrong", None, wrong.grade.reason)
    assert (second["reward"], second["reward_failure"]) == (0.0, None)
    assert right.grade.reason != wrong.grade.reason != ""


def test_no_more_is_kept_than_there_is() -> None:
    """Fewer completions than are asked for, and none at all."""
    groups = [rewarded(1, 0)]
    for count, expected in ((99, 2), (1, 1), (0, 0)):
        config = grpo_config(group_size=2, completions_kept_per_step=count)
        assert len(list(completion_records(config, groups, experience(config, groups), step=1))) == expected
