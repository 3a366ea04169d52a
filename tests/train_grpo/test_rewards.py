import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.policy.checkpoint import Checkpoint
from components.policy.sequences import TokenSequence
from components.rollout.completion import Completion
from components.shared.grading.verdict import Verdict
from components.train_grpo.config import RewardModelConfig, RewardName
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import Scored, Scorer, accuracy, answer_format, overlong
from components.train_grpo.steps import Step
from tests import tiny
from tests.train_grpo.groups import completion, grade, scored
from tests.train_grpo.settings import grpo_config

PROBLEM = tiny.problem(3)  # its answer is 6
WORKED = "1+1=2\n2+2=5\n#### 6"
OVERLONG = {"reward__weights": {"overlong": 1.0}, "reward__overlong_buffer_tokens": 4}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """Return the policy whose tokens the completions are made of."""
    return tiny.checkpoint()


def _said(checkpoint: Checkpoint, *texts: str, finished: bool = True) -> list[Completion]:
    """Completions as the policy of `checkpoint` would give them."""
    prompt = checkpoint.prompt_ids(PROBLEM.question)
    end = checkpoint.end_ids[:1] if finished else ()
    sequences = [TokenSequence(prompt, (*checkpoint.encode(text), *end)) for text in texts]
    return [
        Completion(sequence, (0.0,) * len(sequence.completion_ids), text, finished)
        for sequence, text in zip(sequences, texts, strict=True)
    ]


def test_right_is_one_wrong_is_zero_and_unscorable_is_neither() -> None:
    """A crash of the verifier must not be taken for a wrong answer."""
    values = {verdict: accuracy(grpo_config(), completion(), grade(verdict)) for verdict in Verdict}
    assert (values[Verdict.RIGHT], values[Verdict.WRONG]) == (1.0, 0.0)
    assert math.isnan(values[Verdict.UNSCORABLE])


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("1+1=2\n#### 2", True, 1.0),
        (r"So it is \boxed{2}", True, 1.0),
        ("1+1=2\n#### 2", False, 0.0),
        ("#### 2", True, 0.0),
        ("1+1=2", True, 0.0),
        ("1+1=2\n####", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_format_asks_for_reasoning_and_an_answer_in_its_place(text: str, finished: bool, expected: float) -> None:
    """A bare answer, reasoning without one, or one that was cut off is worth nothing, whatever the verdict."""
    for verdict in Verdict:
        assert answer_format(grpo_config(), completion(text=text, finished=finished), grade(verdict)) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (12, 0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1)])
def test_overlong_falls_in_a_line_over_the_last_tokens(num_tokens: int, expected: float) -> None:
    """By hand: a limit of 16 tokens, of which the last four are the buffer."""
    assert overlong(grpo_config(**OVERLONG), completion(num_tokens), grade(Verdict.RIGHT)) == expected


def test_rewards_of_a_completion_stand_with_its_last_step() -> None:
    """By hand: steps 1, 0, 1 and half of the format reward; the order of the weights does not matter."""
    each = scored({"steps": [1, 0, 1], "format": [1]}, ends=[1, 2, 3])
    assert each.combined({RewardName.STEPS: 1.0, RewardName.FORMAT: 0.5}) == (1.0, 0.0, 1.5)
    assert each.combined({RewardName.FORMAT: 0.5, RewardName.STEPS: 2.0}) == (2.0, 0.0, 2.5)


def test_the_weighted_sum_by_hand() -> None:
    """Three rewards of one completion, one with a negative weight."""
    each = scored({"accuracy": [1], "format": [0.5], "overlong": [-0.25]})
    weights = {RewardName.ACCURACY: 2.0, RewardName.FORMAT: -1.0, RewardName.OVERLONG: 4.0}
    assert each.combined(weights) == (2 - 0.5 - 1,)


def test_a_missing_reward_leaves_its_step_without_any() -> None:
    """NaN wins over whatever else the step is worth, and does not reach the other steps."""
    found = scored({"steps": [1, 0, math.nan], "format": [1]}, ends=[1, 2, 3]).combined(
        {RewardName.STEPS: 1.0, RewardName.FORMAT: 1.0}
    )
    assert found[:2] == (1.0, 0.0)
    assert math.isnan(found[2])


def test_without_reward_nothing_is_worth_anything() -> None:
    """Every number of every reward becomes NaN; completion, grade and steps stay."""
    before = scored({"steps": [1, 0], "format": [1]}, ends=[1, 3])
    after = before.without_reward()
    assert (after.completion, after.grade, after.steps) == (before.completion, before.grade, before.steps)
    assert {name: len(values) for name, values in after.rewards.items()} == {"steps": 2, "format": 1}
    assert all(math.isnan(value) for values in after.rewards.values() for value in values)


def test_outcome_supervision_rewards_the_completion_as_one_step(checkpoint: Checkpoint) -> None:
    """The step is all of its tokens; every reward with a weight is there, and no other."""
    config = grpo_config(
        sampling__max_new_tokens=24,
        reward__weights={"format": 1.0, "accuracy": 1.0, "overlong": 1.0},
        reward__overlong_buffer_tokens=16,
    )
    completions = _said(checkpoint, WORKED, "#### 6", "1+1=2\n#### 7")
    found = Scorer(config, checkpoint, None)(PROBLEM, completions)
    lengths = [len(each.tokens.completion_ids) for each in completions]
    late = [-max(0, length - 8) / 16 for length in lengths]
    assert [each.rewards for each in found] == [
        {"format": (1.0,), "accuracy": (1.0,), "overlong": (late[0],)},
        {"format": (0.0,), "accuracy": (1.0,), "overlong": (late[1],)},
        {"format": (1.0,), "accuracy": (0.0,), "overlong": (late[2],)},
    ]
    assert min(late) < max(late) == 0
    assert [each.steps for each in found] == [
        (Step(length, each),) for length, each in zip(lengths, (1.0, 1.0, 0.0), strict=True)
    ]
    assert [each.completion for each in found] == completions
    assert [each.grade.verdict for each in found] == ["right", "right", "wrong"]


def test_process_supervision_rewards_each_worked_line_and_the_answer(checkpoint: Checkpoint) -> None:
    """By hand: a right line, a wrong one and a right answer; each step ends with its line's last token."""
    config = grpo_config(reward__weights={"steps": 1.0, "format": 0.5}, reward__supervision="process")
    (said,) = _said(checkpoint, WORKED)
    (found,) = Scorer(config, checkpoint, None)(PROBLEM, [said])
    assert found.rewards == {"steps": (1.0, 0.0, 1.0), "format": (1.0,)}
    assert found.combined(config.reward.weights) == (1.0, 0.0, 1.5)
    ends = [step.end for step in found.steps]
    assert [checkpoint.decode(said.tokens.completion_ids[:end]) for end in ends] == [
        "1+1=2\n",
        "1+1=2\n2+2=5\n",
        WORKED,
    ]
    assert ends[-1] == len(said.tokens.completion_ids)


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_a_reward_model_is_read_at_the_end_of_each_step(checkpoint: Checkpoint, supervision: str) -> None:
    """The reward of each step is what the model itself says there, completion by completion."""
    model_config = RewardModelConfig(
        base="reference", initial_rollouts=1, learning_rate=1e-3, epochs=1, replay_fraction=0.1
    )
    model = RewardModel.load(model_config, checkpoint, micro_batch_tokens=100)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.model.score.weight)  # a new head says the same of everything
    config = grpo_config(
        reward__weights={"reward_model": 1.0, "accuracy": 1.0},
        reward__supervision=supervision,
        reward__model=model_config.model_dump(),
    )
    completions = _said(checkpoint, WORKED, "#### 7")
    found = Scorer(config, checkpoint, model)(PROBLEM, completions)
    assert [len(each.rewards[RewardName.REWARD_MODEL]) for each in found] == (
        [3, 1] if supervision == "process" else [1, 1]
    )
    for each in found:
        (expected,) = model.score([each.completion.tokens], [tuple(step.end for step in each.steps)])
        assert each.rewards[RewardName.REWARD_MODEL] == pytest.approx(expected, rel=1e-5)
        assert len(set(expected)) == len(each.steps)
    assert [each.rewards[RewardName.ACCURACY] for each in found] == [(1.0,), (0.0,)]


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_what_was_cut_off_is_wrong_or_has_no_reward_at_all(checkpoint: Checkpoint, supervision: str) -> None:
    """`score` counts it as a wrong answer, `mask` gives none of its steps a reward; finished ones are untouched."""
    weights = {"accuracy": 1.0} if supervision == "outcome" else {"steps": 1.0}
    both = [*_said(checkpoint, WORKED, finished=False), *_said(checkpoint, WORKED)]

    def combined(truncated: str) -> tuple[Scored, Scored, list[Sequence[float]]]:
        config = grpo_config(reward__weights=weights, reward__supervision=supervision, sampling__truncated=truncated)
        one, other = Scorer(config, checkpoint, None)(PROBLEM, both)
        return one, other, [each.combined(config.reward.weights) for each in (one, other)]

    cut_off, _, (rewards, finished) = combined("score")
    assert (cut_off.grade.verdict, rewards[-1], finished[-1]) == ("wrong", 0.0, 1.0)
    cut_off, _, (rewards, finished) = combined("mask")
    assert cut_off.grade.verdict == "wrong"
    assert all(math.isnan(reward) for reward in rewards)
    assert finished == combined("score")[2][1]


def test_an_answer_that_cannot_be_graded_has_no_reward(checkpoint: Checkpoint) -> None:
    """Under outcome supervision that is the whole completion, under process supervision its last step."""
    unreadable = tiny.problem(3, answer="\\frac{1}{")
    (said,) = _said(checkpoint, WORKED)
    (found,) = Scorer(grpo_config(), checkpoint, None)(unreadable, [said])
    assert math.isnan(found.rewards[RewardName.ACCURACY][0])
    assert list(found.rewards) == ["accuracy"]
    process = grpo_config(reward__weights={"steps": 1.0}, reward__supervision="process")
    (found,) = Scorer(process, checkpoint, None)(unreadable, [said])
    assert found.rewards[RewardName.STEPS][:2] == (1.0, 0.0)
    assert math.isnan(found.rewards[RewardName.STEPS][2])


@settings(deadline=None)
@given(num_tokens=st.integers(1, 16), buffer=st.integers(1, 15))
def test_overlong_is_a_share_of_the_buffer_below_zero(num_tokens: int, buffer: int) -> None:
    """Never positive, -1 at the limit and only there, and 0 exactly up to the buffer."""
    config = grpo_config(reward__weights={"overlong": 1.0}, reward__overlong_buffer_tokens=buffer)
    found = overlong(config, completion(num_tokens), grade(Verdict.WRONG))
    assert -1 <= found <= 0
    assert (found == -1) == (num_tokens == 16)
    assert (found == 0) == (num_tokens <= 16 - buffer)
