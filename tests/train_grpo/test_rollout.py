import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from components.policy.sequences import TokenSequence
from components.rollout.completion import Completion
from components.train_grpo.rollout import figures, prompt_batches, records, roll_out
from tests import tiny
from tests.train_grpo.settings import grpo_config

TEXTS = {
    0: ["1+1=2\n#### 0", "#### 0", "#### 5", "#### 0"],  # three right, one of them worked
    1: ["#### 2", "#### 2", "#### 2", "#### 2"],  # all right
    2: ["#### 9", "no idea", "#### 9", "#### 4"],  # one right, but it was cut off
}


def _generate(
    questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
) -> list[list[Completion]]:
    """A policy that knows its lines."""
    assert (num_samples, temperature, max_new_tokens) == (4, 1.0, 16)
    return [
        [
            Completion(TokenSequence((1, 2), tuple(range(3, 5 + row + sample))), text, finished=text != "#### 4")
            for sample, text in enumerate(TEXTS[row])
        ]
        for row, _ in enumerate(questions)
    ]


def test_a_rollout_scores_each_group_by_itself() -> None:
    """Rewards and advantages stand where their completions do."""
    rollout = roll_out(grpo_config(), _generate, tiny.PROBLEMS[:3], seed=1)
    assert rollout.rewards_PG.tolist() == [[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    third = 1 / math.sqrt(3)
    assert rollout.advantages_PG[0].tolist() == pytest.approx([third, third, -3 * third, third])
    assert rollout.advantages_PG[1:].tolist() == [[0] * 4] * 2


def test_the_figures_of_a_rollout_by_hand() -> None:
    """Shares are over all twelve completions; two of three groups have nothing to learn from."""
    found = figures(roll_out(grpo_config(), _generate, tiny.PROBLEMS[:3], seed=1))
    assert found["reward"] == found["accuracy"] == pytest.approx(7 / 12)
    assert found["worked_fraction"] == pytest.approx(1 / 12)
    assert found["truncated_fraction"] == pytest.approx(1 / 12)
    assert found["completion_length_tokens"] == pytest.approx(
        sum(2 + row + n for row in range(3) for n in range(4)) / 12
    )
    assert found["groups_without_spread_fraction"] == pytest.approx(2 / 3)
    assert found["unscorable_fraction"] == 0


def test_records_name_problem_and_sample() -> None:
    """What is kept to read says which problem, which sample, what was said and what it was worth."""
    rollout = roll_out(grpo_config(), _generate, tiny.PROBLEMS[:3], seed=1)
    kept = list(records(rollout, step=7, count=5))
    assert [(row["id"], row["sample"], row["completion"]) for row in kept] == [
        *((tiny.PROBLEMS[0].id, sample, TEXTS[0][sample]) for sample in range(4)),
        (tiny.PROBLEMS[1].id, 0, TEXTS[1][0]),
    ]
    assert [row["reward"] for row in kept] == [1, 1, 0, 1, 1]
    assert kept[2]["advantage"] == pytest.approx(-math.sqrt(3))


def test_an_unscorable_completion_has_no_reward() -> None:
    """A gold answer that nobody can read gives no reward, no advantage, and is counted."""
    unreadable = [tiny.problem(0, answer="\\frac{1}{")]
    rollout = roll_out(grpo_config(), _generate, unreadable, seed=1)
    assert bool(torch.isnan(rollout.rewards_PG).all())
    assert rollout.advantages_PG.tolist() == [[0.0] * 4]
    assert figures(rollout)["unscorable_fraction"] == 1
    assert next(iter(records(rollout, step=1, count=1)))["reward"] is None


def test_every_pass_over_the_prompts_takes_each_once_in_a_new_order() -> None:
    """No batch holds a problem twice, and the same seed gives the same batches."""
    batches = list(islice(prompt_batches(tiny.PROBLEMS, 6, seed=1), 8))
    for start in (0, 4):
        ids = [problem.id for batch in batches[start : start + 4] for problem in batch]
        assert Counter(ids) == Counter(problem.id for problem in tiny.PROBLEMS)
    assert batches[:4] != batches[4:]
    assert batches == list(islice(prompt_batches(tiny.PROBLEMS, 6, seed=1), 8))
    assert batches != list(islice(prompt_batches(tiny.PROBLEMS, 6, seed=2), 8))
