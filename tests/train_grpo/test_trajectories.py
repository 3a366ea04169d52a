"""What a policy learns from trajectories: turns that it sampled, with the text of an environment between them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from components.environments.pool import Environments
from components.grading.verifier import Grade, Submission, Verdict, Verifier
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Turn, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.tools import ToolsConfig
from components.train_grpo.metrics import trajectory_metrics
from components.train_grpo.monitoring import require_scorable
from components.train_grpo.process_supervision import Step
from components.train_grpo.records import completion_records
from components.train_grpo.reward_examples import examples_of
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import answer_format
from components.train_grpo.rollouts import Rollout
from components.train_grpo.scoring import Group, ScoredCompletion, Scorer
from components.train_grpo.update import make_experience, rollout_advantages
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.rollout import acting as words
from tests.train_grpo.groups import completion, grade, trajectory
from tests.train_grpo.settings import grpo_config, reward_model_config

ASKED = Turn(3, "3+5=8\n", "18\n", {"valid": 0.5, "short": -0.25}, is_call=True)
ANSWERED = Turn(5, "#### 18", rewards={"valid": 1.0})
RIGHT = grade(Verdict.RIGHT)
FAILED = trajectory(Turn(2, "3+5", is_call=True), finished=False, failure="timeout: no answer after 10 s")


def _score(completions: list[Completion], **changes: Any) -> list[ScoredCompletion]:
    """Return completions of a problem with their rewards; each is right, unless its environment failed."""

    def verify(submissions: Sequence[Submission]) -> list[Grade]:
        return [RIGHT] * len(submissions)

    score = Scorer(grpo_config(**changes), tiny.checkpoint(), functools.partial(grade_completions, verify))  # type: ignore[arg-type]
    return score([tiny.PROBLEMS[0]], [completions])[0].scored_G


@pytest.mark.parametrize(
    ("first", "in_thought", "prompt", "last", "expected"),
    [
        ("3+5=8\n", False, "{question}\n", "#### 18", 1.0),
        ("#### 18\n", False, "{question}\n", "18", 0.0),
        ("<think>3+5=8</think>\n", False, "<think> first. {question}\n", "#### 18", 1.0),
        ("3+5=8</think>\n", True, "{question}\n<think>\n", "#### 18", 1.0),
        ("3+5=8\n", True, "{question}\n<think>\n", "#### 18", 0.0),
    ],
)
def test_the_format_of_a_trajectory_is_an_answer_at_its_end_and_a_thought_at_its_beginning(
    first: str, in_thought: bool, prompt: str, last: str, expected: float
) -> None:
    """Where thoughts are asked for; the turns before the last are its reasoning."""
    turns = Turn(3, first, "18\n", in_thought=in_thought), Turn(5, last)
    response = replace(trajectory(*turns), in_thought=in_thought)
    model = ModelConfig(base="scratch:tiny", prompt=prompt)
    assert answer_format(tiny.PROBLEMS[0], response, grade(Verdict.WRONG), model=model) == expected


def test_each_turn_may_be_a_step_with_its_own_rewards() -> None:
    """It ends where the turn does; the last is worth what the completion is worth, too. Else their sum is one."""
    weights = {"accuracy": 1.0, "environment": 2.0}
    several, one = _score([trajectory(ASKED, ANSWERED), completion()], reward__weights=weights)
    assert (several.combined(weights), one.combined(weights)) == ((3.5,), (1.0,))
    turn = {"reward__weights": weights, "reward__supervision": "turn"}
    several, one = _score([trajectory(ASKED, ANSWERED), completion()], **turn)
    assert [step.end for step in several.steps] == [3, 5]
    assert several.rewards == {"accuracy": (1.0,), "environment": (0.25, 1.0)}
    assert several.combined(weights) == (0.5, 3.0)
    assert (one.steps, one.combined(weights)) == ((Step(3, 1.0, "#### 0"),), (1.0,))
    # By hand: of 0.5, 3 and 1 the mean is 1.5; a token has the sum over the turns that end at it or later.
    config = grpo_config(**turn, advantage__estimator="mean_only")
    groups = [Group(tiny.PROBLEMS[0], [several, one])]
    assert rollout_advantages(config, groups).tolist() == pytest.approx([0.5] * 3 + [1.5] * 2 + [-0.5] * 3)


def test_a_trajectory_whose_environment_failed_has_no_reward_and_no_part_in_the_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is unscorable and not truncated; why is shown once, and where there are too many of them."""
    config = grpo_config(sampling__truncated="score", reward__max_unscorable_fraction=0.5)
    scored_g = _score([FAILED, trajectory(ASKED, ANSWERED), FAILED])
    assert [each.grade.verdict for each in scored_g] == [Verdict.UNSCORABLE, Verdict.RIGHT, Verdict.UNSCORABLE]
    assert all(math.isnan(value) for each in (scored_g[0], scored_g[2]) for value in each.combined({"accuracy": 1.0}))
    assert capsys.readouterr().out.count("its environment failed: timeout: no answer after 10 s") == 1
    groups = [Group(tiny.PROBLEMS[0], scored_g)]
    assert make_experience(config, groups, torch.device("cpu")).in_loss_B.tolist() == [False, True, False]
    assert [each.completion.truncated for each in scored_g] == [False] * 3
    message = r"^67.% of the 3 completions .*2 times, first for .*its environment failed.*train_sft\.model\.tools"
    with pytest.raises(PipelineError, match=message) as error:
        require_scorable(config, groups)
    assert "Check these rewards" not in str(error.value)


@pytest.mark.parametrize(("supervision", "ends"), [("outcome", (7,)), ("turn", (3, 7))])
def test_a_reward_model_reads_completions_where_their_steps_end(supervision: str, ends: tuple[int, ...]) -> None:
    """In one call for all groups. The ends of steps count sampled tokens; the model reads an environment's, too."""
    config, calls = reward_model_config(reward__supervision=supervision), list[Any]()

    def score(tokens: Sequence[TokenSequence], step_ends: Sequence[tuple[int, ...]]) -> list[list[float]]:
        calls.append(tokens)
        return [[float(end) for end in ends] for ends in step_ends]

    scorer = Scorer(config, tiny.checkpoint(), lambda *_: [RIGHT] * 3, cast(RewardModel, SimpleNamespace(score=score)))
    groups = scorer(tiny.PROBLEMS[:2], [[completion(2), trajectory(ASKED, ANSWERED)], [completion(4)]])
    assert [each.rewards["reward_model"] for group in groups for each in group.scored_G] == [(2,), ends, (4,)]
    assert len(calls) == 1
    _, example = examples_of(config, groups[0])
    assert example.step_ends == (7,)


def test_the_metrics_of_trajectories_by_hand() -> None:
    """What they were cut off by, how many turns and calls they had, and each part of the environment's reward."""
    config, tools = grpo_config(sampling__max_new_tokens=6), ToolsConfig(environment="calculator", max_turns=2)
    responses = [
        trajectory(ASKED, ANSWERED),
        trajectory(Turn(4, "It is 18.")),
        trajectory(ASKED, Turn(6, "So"), finished=False),
        trajectory(ASKED, Turn(5, "3+4\n", is_call=True), finished=False),
        trajectory(Turn(3, "a long prompt"), finished=False),
        FAILED,
        completion(),
        completion(),
    ]
    rollout = Rollout([Group(tiny.PROBLEMS[0], _score(responses))], [], sampling_s=0.0, scoring_s=0.0)
    assert trajectory_metrics(config, tools, rollout) == pytest.approx(
        {
            "turns": 9 / 8,
            "turns_max": 2,
            "tool_calls": 5 / 8,
            "tool_use_fraction": 4 / 8,
            "environment_tokens": 6 / 8,
            "environment_failures": 1,
            "truncated_by_tokens_fraction": 1 / 8,
            "truncated_by_turns_fraction": 1 / 8,
            "truncated_by_context_fraction": 1 / 8,
            "reward_environment_short": -0.75 / 8,
            "reward_environment_valid": 2.5 / 8,
        }
    )


def _rewarded_parts(rewards: dict[str, float], columns_before: Sequence[str] = ()) -> dict[str, float]:
    """Return the columns of the parts of the reward that an environment gives of one turn."""
    rollout = Rollout([Group(tiny.PROBLEMS[0], _score([trajectory(Turn(3, "18", rewards=rewards))]))], [], 0.0, 0.0)
    metrics = trajectory_metrics(grpo_config(), ToolsConfig(environment="calculator"), rollout, columns_before)
    return {column: value for column, value in metrics.items() if column.startswith("reward_")}


def test_parts_of_an_environments_reward_keep_their_columns() -> None:
    """Whichever of them a step has; a run has twenty at most, however many names it gives, and none for two."""
    first = _rewarded_parts({"valid": 1.0, "short": 0.5})
    assert first == {"reward_environment_short": 0.5, "reward_environment_valid": 1.0}
    second = _rewarded_parts({"late": 2.0}, ["step", "reward", "reward_accuracy", *first])
    assert second == {"reward_environment_short": 0.0, "reward_environment_valid": 0.0, "reward_environment_late": 2.0}
    many = _rewarded_parts({f"a{number}": 1.0 for number in range(30)}, list(second))
    assert len(many) == 20
    assert set(second) < set(many)
    with pytest.raises(PipelineError, match=r"`a_b` .* `a\.b` would share"):
        _rewarded_parts({"a.b": 1.0, "a_b": 1.0})


def test_the_record_of_a_trajectory_shows_its_turns() -> None:
    """With what the environment answered and how it rewarded each, and why it failed."""
    groups = [Group(tiny.PROBLEMS[0], _score([trajectory(ASKED, ANSWERED), FAILED]))]
    config = grpo_config(logged_completions_per_step=4)
    first, second = completion_records(config, groups, rollout_advantages(config, groups), step=1)
    assert first["turns"] == [
        {"text": "3+5=8\n", "observation": "18\n", "rewards": {"valid": 0.5, "short": -0.25}},
        {"text": "#### 18", "observation": "", "rewards": {"valid": 1.0}},
    ]
    assert (first["num_tokens"], first["environment_failure"]) == (5, None)
    assert (second["verdict"], second["reason"]) == ("unscorable", "environment")
    assert second["environment_failure"] == "timeout: no answer after 10 s"
    assert [each["finished"] for each in (first, second)] == [True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward__weights": {"environment": 1.0}, "reward__supervision": "turn"},
        {"sampler__vllm": {}, "sampler__correction": {"weight": {}, "mask": {"level": "sequence"}}},
    ],
)
def test_completions_without_tokens_are_masked(
    changes: dict[str, Any], verify: Verifier, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their prompts fill the context, which is named once; the step learns from the others."""
    settings = {"prompts_per_step": 2, "num_steps": 1, "warmup_steps": 0, "logged_completions_per_step": 8}
    config = grpo_config(**settings, **changes)
    checkpoint = words.checkpoint()
    problems = tiny.asked(["1+2" * 40, "1+2"])
    environments = cast(Environments, words.ActingEnvironments())
    sampler = TransformersSampler(checkpoint, 64)
    trainer = build_trainer(config, checkpoint, problems, verify, sampler, environments=environments)
    trainer.run(steps_done=0, after_step=lambda _: None)
    records = trainer.history.completions
    empty = [each for each in records if not each["num_tokens"]]
    assert [each["num_tokens"] > 0 for each in records] == [each["question"] == "1+2" for each in records]
    assert len(empty) == 4
    assert all((each["reward"], each["advantage"], each["finished"]) == (None, 0.0, False) for each in empty)
    assert capsys.readouterr().out.count("its prompt fills the context of the model") == 1
