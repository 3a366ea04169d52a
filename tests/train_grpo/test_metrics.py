import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from components.grading.verifier import Verdict
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.train_grpo.config import ClipConfig, LossConfig, TrainGRPOConfig
from components.train_grpo.custom_rewards import Failure
from components.train_grpo.metrics import UpdateMetrics, metrics_without_update, rollout_metrics
from components.train_grpo.monitoring import check_first, first_look, missing_signal, require_learning
from components.train_grpo.objective import TokenObjective, Tokens
from components.train_grpo.records import Row, completion_records
from components.train_grpo.rollouts import Rollout
from components.train_grpo.scoring import Group
from components.train_grpo.update import rollout_advantages
from tests import tiny
from tests.train_grpo.groups import CHECKED, completion, graded, group, scored
from tests.train_grpo.settings import grpo_config

TEXTS = [
    ["1+1=2\n#### 0", "#### 0", "#### 5", "#### 0"],  # three right, one of them worked
    ["#### 2", "#### 2", "#### 2", "#### 2"],  # all right
    ["#### 9", "no idea", "#### 9", "#### 4"],  # all wrong, one of them cut off though it was right
]
FAILED = Failure("reward mine:own raised KeyError", "reward mine:own raised KeyError: 'a'")


def _groups() -> list[Group]:
    """Three groups of four completions, of 2, 3, 4 ... tokens."""
    groups = []
    for row, (problem, texts) in enumerate(zip(tiny.PROBLEMS[:3], TEXTS, strict=True)):
        responses = [
            completion(2 + row + sample, text=text, finished=text != "#### 4") for sample, text in enumerate(texts)
        ]
        groups.append(Group(problem, [graded(problem.answer, each) for each in responses]))
    return groups


def _metrics(sampled: list[Group], trained: Sequence[Group] = (), **changes: Any) -> dict[str, float]:
    rollout = Rollout(sampled, list(trained), sampling_s=0.0, scoring_s=0.0)
    return rollout_metrics(grpo_config(**changes), rollout, AnswerPolicy.DECLARED)


def _records(config: TrainGRPOConfig, groups: list[Group], *, step: int = 1) -> list[dict[str, Any]]:
    return list(completion_records(config, groups, rollout_advantages(config, groups), step=step))


def test_the_metrics_of_a_rollout_by_hand() -> None:
    """Shares are over all twelve completions; two of three groups have nothing to learn from."""
    result = _metrics(_groups(), _groups()[:1])
    assert result == pytest.approx(
        {
            "reward": 7 / 12,
            "reward_accuracy": 7 / 12,
            "accuracy": 7 / 12,
            "worked_fraction": 1 / 12,
            "completion_length_tokens": (2 + 3 + 4 + 5 + 3 + 4 + 5 + 6 + 4 + 5 + 6 + 7) / 12,
            "completion_length_max_tokens": 7,
            "truncated_fraction": 1 / 12,
            "unanswered_fraction": 1 / 12,
            "unscorable_fraction": 0,
            "reward_failures": 0,
            "distinct_answers": (2 + 1 + 1) / 12,  # an answer that was cut off is none
            "groups_sampled": 3,
            "groups_trained": 1,
            "groups_without_spread_fraction": 2 / 3,
            "groups_all_right_fraction": 1 / 3,
            "groups_all_wrong_fraction": 1 / 3,
        }
    )


def test_distinct_answers_are_told_apart_as_the_grader_does() -> None:
    """Right ones are one however they are written, spaces and case are nothing, and no answer is none."""
    texts = ["#### 3", "#### 3.0", "#### 6/2", "#### x + 1", "#### X+1", "#### 4", "no idea", "#### 5"]
    groups = [Group(tiny.PROBLEMS[3], [graded("3", completion(text=text)) for text in texts]) for _ in range(2)]
    assert _metrics(groups)["distinct_answers"] == 4 / 8


def test_the_mean_of_a_reward_is_over_the_problems_that_have_it() -> None:
    """That of all rewards is over all problems, each with the weights of its source."""
    sums = group(scored({"accuracy": [1]}), scored({"accuracy": [0]}))
    code = group(scored({"format": [1]}), scored({"format": [1]}))
    of_code = Group(code.problem.model_copy(update={"source": "code"}), code.scored_G)
    changes: dict[str, Any] = {"reward__weights": {"accuracy": 1.0}, "reward__by_source": {"code": {"format": 2.0}}}
    result = _metrics([sums, of_code], **changes)
    assert (result["reward"], result["reward_accuracy"], result["reward_format"]) == (5 / 4, 1 / 2, 1)
    assert math.isnan(_metrics([sums], **changes)["reward_format"])
    records = _records(grpo_config(**changes, logged_completions_per_step=4, group_size=2), [sums, of_code])
    assert [each["reward"] for each in records] == [1, 0, 2, 2]


def test_what_has_no_verdict_or_a_reward_that_failed_is_counted_and_left_out_of_the_means() -> None:
    """By hand over four completions, of which one is unscorable and one has a verdict; steps have one mean for all."""
    weights = {CHECKED: 1.0, "mine:own": 0.5}
    worth = [scored({CHECKED: [1, 0, value], "mine:own": [1]}, ends=[1, 2, 3]) for value in (1, 0)]
    nothing = {name: [math.nan] for name in weights}
    failed, unscorable = (scored(nothing, verdict=each) for each in (Verdict.WRONG, Verdict.UNSCORABLE))
    failed.failure = FAILED
    settings: dict[str, Any] = {"reward__weights": weights, "reward__supervision": "process"}
    result = _metrics([group(*worth, failed, unscorable)], **settings)
    assert (result["reward_failures"], result["unscorable_fraction"], result["accuracy"]) == (1, 2 / 4, 2 / 3)
    means = (result["reward"], result["reward_tests_train_grpo_groups_checked"], result["reward_mine_own"])
    assert means == pytest.approx(((2.5 + 1.5) / 2, 3 / 6, 1))
    result = _metrics([group(unscorable, unscorable)], **settings)
    assert math.isnan(result["reward"])
    assert math.isnan(result["accuracy"])
    # Without a right or a wrong answer in it, a group is neither all right nor all wrong.
    assert result["groups_without_spread_fraction"] == 1
    assert result["groups_all_right_fraction"] == result["groups_all_wrong_fraction"] == 0


def test_records_name_problem_sample_and_grade() -> None:
    """The first completions of a rollout, in order, with text, reward, and the advantage of their first token."""
    config, groups = grpo_config(logged_completions_per_step=5), _groups()
    groups[1].scored_G[0] = replace(groups[1].scored_G[0], rewards={"accuracy": (math.nan,)}, failure=FAILED)
    records = _records(config, groups, step=7)
    assert [(row["id"], row["sample"], row["completion"]) for row in records] == [
        *((tiny.PROBLEMS[0].id, sample, TEXTS[0][sample]) for sample in range(4)),
        (tiny.PROBLEMS[1].id, 0, TEXTS[1][0]),
    ]
    third = 1 / math.sqrt(3)
    assert [row["reward"] for row in records] == [1, 1, 0, 1, None]
    assert [row["advantage"] for row in records] == pytest.approx([third, third, -3 * third, third, 0])
    del records[2]["sample"], records[2]["reward"], records[2]["advantage"]
    assert records[2] == {
        "step": 7,
        "id": tiny.PROBLEMS[0].id,
        "question": tiny.PROBLEMS[0].question,
        "answer": "0",
        "completion": "#### 5",
        "extracted": "5",
        "verdict": "wrong",
        "reason": "different number",
        "detail": "",
        "num_tokens": 4,
        "finished": True,
        "rewards": {"accuracy": [0.0]},
        "reward_failure": None,
    }
    assert records[4]["reward_failure"] == FAILED.message
    assert [len(_records(grpo_config(logged_completions_per_step=count), _groups())) for count in (0, 99)] == [0, 12]


CLIP = ClipConfig(low=0.2, high=0.5)
# Two micro-batches: ratio, advantage, kl, entropy, old and sampler log-probability, and weight of each token.
BATCHES = [
    [
        (1.6, 1.0, 0.3, 1.0, -1.0, -1.1, 0.5),
        (0.5, -2.0, 0.1, 2.0, -2.0, -1.5, 0.0),
        (4.0, -1.0, 0.7, 0.25, -0.5, -0.2, 2.0),
    ],
    [(1.4, 1.0, 0.0, 0.5, -3.0, -3.0, 1.0)],
]
STEP = {"loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.5}


def _update_metrics(*batches: Sequence[tuple[float, ...]], all_terms: bool = True) -> UpdateMetrics:
    metrics = UpdateMetrics()
    for batch in batches:
        columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*batch, strict=True)]
        ratio_N, advantages_N, kl_N, entropy_N, old_N, sampler_N, weight_N = columns
        index_N = torch.zeros(len(batch), dtype=torch.long)
        tokens = Tokens(old_N, old_N, sampler_N, None, entropy_N, advantages_N, index_N, index_N)
        terms = (kl_N, weight_N) if all_terms else (None, None)
        metrics.add(LossConfig(clip=CLIP), tokens, TokenObjective(ratio_N, ratio_N, *terms))
    return metrics


def test_update_metrics_are_means_over_the_tokens_of_all_processes() -> None:
    """By hand over two micro-batches of three tokens and one, in one process or two of three, in any order."""
    tokens = [token for batch in BATCHES for token in batch]
    expected = {
        "kl": statistics.fmean(token[2] for token in tokens),
        "entropy": statistics.fmean(token[3] for token in tokens),
        "clip_high_fraction": 1 / 4,
        "clip_low_fraction": 1 / 4,
        "importance_weight": 3.5 / 4,
        "masked_token_fraction": 1 / 4,
        "sampler_mismatch": (0.1 + 0.5 + 0.0 + 0.3) / 4,
        "sampler_mismatch_max": 0.5,
        "ratio_min": 0.5,
        "ratio_max": 4.0,
        **STEP,
    }
    of_ranks = [_update_metrics(*batches) for batches in (BATCHES[:1], BATCHES[1:], [])]
    for metrics in (_update_metrics(*BATCHES), UpdateMetrics.merged(of_ranks), UpdateMetrics.merged(of_ranks[::-1])):
        figures = metrics.figures([STEP])
        assert math.isnan(figures.pop("teacher_kl"))  # without a teacher
        assert figures == pytest.approx(expected, rel=1e-12)
        assert metrics.mean_mismatch == pytest.approx(0.9 / 4, rel=1e-12)


def test_what_optimizer_steps_return_is_averaged_over_them() -> None:
    """Loss and norm are means over the optimizer steps; without a step nothing was measured, in the same columns."""
    steps = [{"loss": 1.0, "gradient_norm": 2.0}, {"loss": -3.0, "gradient_norm": 1.0}]
    figures = _update_metrics(*BATCHES, all_terms=False).figures(steps)
    assert (figures["loss"], figures["gradient_norm"]) == (-1.0, 1.5)
    for name in ("kl", "importance_weight", "masked_token_fraction"):  # without a reference, and without a correction
        assert math.isnan(figures[name])
    nothing = metrics_without_update(0.25)
    assert set(nothing) == {*figures, "learning_rate"}
    measured = {name: value for name, value in nothing.items() if not math.isnan(value)}
    assert measured == {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.25}


EQUAL, DIFFERENT, SOLVED = "equal", "different", "solved"


def _rows(*kinds: str) -> list[Row]:
    return [
        {
            "groups_without_spread_fraction": 0.75 if kind == DIFFERENT else 1.0,
            "groups_all_right_fraction": 1.0 if kind == SOLVED else 0.5,
            "reward": None,
            "accuracy": 0.5,
            "truncated_fraction": 0.25,
            "unanswered_fraction": 0.125,
            "kl": 1.5,
        }
        for kind in kinds
    ]


def test_the_limit_is_of_steps_in_a_row() -> None:
    """A step with a signal, or with nothing left to learn, begins the count anew; a policy that is lost is named."""
    limited, unlimited = (grpo_config(reward__max_steps_without_signal=number) for number in (3, 0))
    assert missing_signal(unlimited, _rows(*[EQUAL] * 3)) is None
    for kinds in ([EQUAL, EQUAL, DIFFERENT, EQUAL], [SOLVED] * 9, [EQUAL, SOLVED, EQUAL, EQUAL]):
        assert missing_signal(limited, _rows(*kinds)) is None
    shown = "truncated 0.25, without an answer 0.125). The KL divergence is 1.5: train_grpo.learning_rate is"
    assert shown in str(missing_signal(limited, _rows(*[EQUAL] * 3)))


@pytest.mark.parametrize(
    ("texts", "shown", "advice"),
    [
        (["#### 0", "#### 1", "no idea", "#### 4"], "25% right, 25% wrong, 25% truncated, 25% without an answer", None),
        (["#### 4"] * 4, "100% truncated", "raise train_grpo.sampling.max_new_tokens"),
        (["#### 4"] * 3 + ["#### 1"], "25% wrong, 75% truncated", "fine-tune the model first (train_sft.num_steps)"),
        (["no idea", "none", "#### 4", "?"], "25% truncated, 75% without an answer", "set answer: last_sentence"),
        (["#### 1"] * 4, "100% wrong", "set prepare_data.difficulty and raise its min_pass_rate"),
        (["#### 0"] * 4, "100% right", "set prepare_data.difficulty and lower its max_pass_rate"),
    ],
)
def test_the_first_rollout_says_whether_the_policy_can_learn(texts: list[str], shown: str, advice: str | None) -> None:
    """What most completions lack is named with the key that changes it, where no rewards differ."""
    scored_g = [graded("0", completion(text=text, finished=text != "#### 4")) for text in texts]
    line, *warnings = first_look(grpo_config(), [group(*scored_g)])
    mixed = int(len(set(texts)) > 2 and "right" in shown)
    assert line.replace("\u202f", "") == f"the first 4 samples: {shown}; rewards differ in {mixed} of 1 groups"
    assert len(warnings) == (advice is not None)
    assert all(advice in warning for warning in warnings if advice)


def test_few_mixed_groups_print_a_warning_or_end_the_run() -> None:
    """One group in five prints a warning, or ends a run that asks for two in five; two in five go on."""
    mixed = group(*(graded("0", completion(text=text)) for text in ("#### 0", "#### 1")))
    cut = group(*[graded("0", completion(finished=False))] * 2)
    few, many = ([mixed] * number + [cut] * (5 - number) for number in (1, 2))
    _, warning = first_look(grpo_config(), few)
    assert "truncated at 16 tokens: raise train_grpo.sampling.max_new_tokens to 32" in warning
    assert len(list(first_look(grpo_config(), many))) == 1
    demanding = grpo_config(reward__min_mixed_at_start=0.4)
    with pytest.raises(PipelineError, match=r"1 of the first 5 groups; .*min_mixed_at_start asks for 40.%"):
        check_first(demanding, few, is_main=True)
    check_first(demanding, many, is_main=True)


def test_a_run_needs_a_learning_signal_in_one_of_its_steps() -> None:
    """Unless every answer was right, or the limit is switched off."""
    config = grpo_config(reward__max_steps_without_signal=100)
    require_learning(config, _rows(DIFFERENT, EQUAL, SOLVED))
    require_learning(config, _rows(SOLVED, SOLVED))
    for kinds in ((EQUAL, EQUAL), (EQUAL, SOLVED)):
        with pytest.raises(PipelineError, match="no learning signal in any step"):
            require_learning(config, _rows(*kinds))
        require_learning(grpo_config(reward__max_steps_without_signal=0), _rows(*kinds))
