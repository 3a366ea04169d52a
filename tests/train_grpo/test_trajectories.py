"""What a policy learns from trajectories: turns that it sampled, with the text of an environment between them."""

import copy
import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.distributed import get_rank
from transformers import PreTrainedModel

from components.cluster.launch import run_ranks
from components.environments.pool import Environments
from components.grading.verifier import Grade, Submission, Verdict, Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.packing import TokenSequence
from components.policy.parallel import SINGLE_PROCESS, init_ranks
from components.rollout.sampler import Completion, Sampling, Turn, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Split
from components.shared.tools import ToolsConfig
from components.train_grpo import monitoring
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import completion_records, rollout_metrics, trajectory_metrics
from components.train_grpo.monitoring import require_scorable
from components.train_grpo.process_supervision import Step
from components.train_grpo.reward_examples import LabeledExample, examples_of
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import answer_format, length, overlong
from components.train_grpo.rollouts import Rollout, with_version
from components.train_grpo.scoring import Group, Scored, Scorer
from components.train_grpo.update import Experience, make_experience, rollout_advantages, split_minibatches, update
from components.train_grpo.validation import Validator
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.policy import plain
from tests.rollout import acting as words
from tests.train_grpo import acting
from tests.train_grpo.groups import CHECKED, completion, grade, trajectory
from tests.train_grpo.runs import rows, run
from tests.train_grpo.settings import grpo_config, reward_model_config
from tests.train_grpo.test_update import TRAJECTORIES, exact_experience, exact_model, gradients_of
from tests.train_grpo.written_out import plain_loss, plain_scores

# The gradient, in one process and in two ------------------------------------------------------------------------------

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sequence_mean": {},
    "token_mean": {"loss__aggregation": "token_mean"},
    "constant": {"loss__aggregation": "constant"},
    "sequence ratio": {"loss__ratio": "sequence"},
}


ZERO_STAGES = {0: list(OBJECTIVES), 2: ["token_mean"], 3: ["sequence_mean", "constant"]}
"""Objectives by which a step is taken under each stage of ZeRO."""


def _config(name: str, num_processes: int, zero_stage: int = 0) -> TrainGRPOConfig:
    changes = {"engine__num_processes": num_processes, "engine__max_gradient_norm": 1e6, **OBJECTIVES[name]}
    fixed = {"prompts_per_step": 2, "group_size": 3, "loss__kl__coefficient": 0.5, "sampler__max_mismatch": 1.0}
    return grpo_config(**fixed, engine__micro_batch_tokens=12, engine__zero_stage=zero_stage, **changes)


def _experience() -> Experience:
    """Return what the sampler and a reference said of trajectories, before the policy has scored them."""
    experience = exact_experience("the paper's", TRAJECTORIES)
    experience.old_logprobs_M = torch.full_like(experience.old_logprobs_M, torch.nan)
    return experience


def take_steps(config: TrainGRPOConfig, *, folder: Path) -> dict[str, float]:
    """Take a step by each objective as a process of a training; leave the gradients and the losses in the folder."""
    ranks = init_ranks(config.engine)
    results = {}
    for stage, name in ((stage, name) for stage, names in ZERO_STAGES.items() for name in names):
        settings = _config(name, config.engine.num_processes, stage)
        model = LogprobModel(copy.deepcopy(exact_model()).float(), temperature=1.0)
        policy, experience = Policy(model, settings.engine), _experience()
        minibatches = split_minibatches(settings, experience, ranks=ranks)
        figures = update(settings, policy, minibatches, experience, learning_rate=1e-3)
        # The optimizer's first moment is a tenth of its first gradient.
        moments = {key.removesuffix("/exp_avg"): each for key, each in policy.state().items() if "/exp_avg" in key}
        gradients = {key.removeprefix("model."): 10 * each for key, each in moments.items() if "/" not in key}
        results[stage, name] = {"loss": figures["loss"], "gradients": gradients}
    torch.save(results, folder / f"{get_rank()}.pt")
    return {}


def _expected(name: str) -> tuple[float, dict[str, Tensor]]:
    """Return the written out loss of the policy that has just sampled, in float64, and its gradient."""
    model, experience = copy.deepcopy(exact_model()), _experience()
    with torch.no_grad():
        experience.old_logprobs_M = torch.cat([plain_scores(model, sequence)[0] for sequence in TRAJECTORIES])
    loss = plain_loss(_config(name, 1), experience, model)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_environments_tokens_have_no_part_in_the_gradient(tmp_path: Path, num_processes: int) -> None:
    """Under every stage of ZeRO it is that of the objective over sampled tokens alone, in float64.

    The optimizer has it in float32. That the parts of several processes add up in float64, test_update.py shows.
    """
    config = _config("sequence_mean", num_processes)
    run_ranks(take_steps, config, {"folder": tmp_path}, num_processes=num_processes, work=tmp_path / "work", grace_s=30)
    results = torch.load(tmp_path / "0.pt")
    expected = {name: _expected(name) for name in OBJECTIVES}
    for (stage, name), measured in results.items():
        loss, gradients = expected[name]
        assert measured["loss"] == pytest.approx(loss, rel=1e-5), (stage, name)
        assert measured["gradients"].keys() == gradients.keys()
        for key, gradient in gradients.items():
            plain.assert_near(measured["gradients"][key].double(), gradient, 1e-5, f"ZeRO {stage}, {name}, {key}")


# Rewards and steps ----------------------------------------------------------------------------------------------------

ASKED = Turn(3, "3+5=8\n", "18\n", {"valid": 0.5, "short": -0.25}, is_call=True)
ANSWERED = Turn(5, "#### 18", rewards={"valid": 1.0})
RIGHT = grade(Verdict.RIGHT)
FAILED = trajectory(Turn(2, "3+5", is_call=True), finished=False, failure="timeout: no answer after 10 s")


def _score(completions: list[Completion], **changes: Any) -> list[Scored]:
    """Return completions of a problem with their rewards; each is right, unless its environment failed."""

    def verify(submissions: Sequence[Submission]) -> list[Grade]:
        return [RIGHT] * len(submissions)

    score = Scorer(grpo_config(**changes), tiny.checkpoint(), functools.partial(grade_completions, verify))  # type: ignore[arg-type]
    return score([tiny.PROBLEMS[0]], [completions])[0].scored_G


def test_an_environment_rewards_a_completion_with_the_sum_of_its_parts() -> None:
    """Of all turns; a completion of one turn without any is worth 0."""
    weights = {"accuracy": 1.0, "environment": 2.0}
    several, one = _score([trajectory(ASKED, ANSWERED), completion()], reward__weights=weights)
    assert several.rewards == {"accuracy": (1.0,), "environment": (1.25,)}
    assert several.combined(weights) == (3.5,)
    assert one.rewards == {"accuracy": (1.0,), "environment": (0.0,)}


@pytest.mark.parametrize(
    ("first", "in_thought", "prompt", "last", "expected"),
    [
        ("3+5=8\n", False, "{question}\n", "#### 18", 1.0),
        ("3+5=8\n", False, "{question}\n", "18", 0.0),
        ("#### 18\n", False, "{question}\n", "18", 0.0),
        ("3+5=8\n", False, "<think> first. {question}\n", "#### 18", 0.0),
        ("<think>3+5=8</think>\n```calculator\n3+5\n```\n", False, "<think> first. {question}\n", "#### 18", 1.0),
        ("3+5=8</think>\n```calculator\n3+5\n```\n", True, "{question}\n<think>\n", "#### 18", 1.0),
        ("3+5=8\n```calculator\n3+5\n```\n", True, "{question}\n<think>\n", "#### 18", 0.0),
    ],
)
def test_the_format_of_a_trajectory_is_an_answer_at_its_end_and_a_thought_at_its_beginning(
    first: str, in_thought: bool, prompt: str, last: str, expected: float
) -> None:
    """Where thoughts are asked for; the turns before the last are its reasoning."""
    response = replace(trajectory(Turn(3, first, "18\n"), Turn(5, last)), in_thought=in_thought)
    model = ModelConfig(base="scratch:tiny", prompt=prompt)
    assert answer_format(tiny.PROBLEMS[0], response, grade(Verdict.WRONG), model=model) == expected


def test_each_turn_may_be_a_step_with_its_own_rewards() -> None:
    """It ends where the turn does; the last is worth what the completion is worth, too."""
    weights = {"accuracy": 1.0, "environment": 2.0}
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


def test_a_custom_reward_sees_the_turns() -> None:
    """What the model wrote in each; not what the environment wrote."""
    called = Turn(3, "```calculator\n3+5\n```\n", "8, says the calculator\n")
    name = "tests.train_grpo.acting:num_calls"
    (scored,) = _score([trajectory(called, called, ANSWERED)], reward__weights={name: 1.0})
    assert scored.rewards == {name: (2.0,)}


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
    message = (
        r"^67% of the 3 completions .*2 times, first for problem .*its environment failed.*train_sft\.model\.tools"
    )
    with pytest.raises(PipelineError, match=message) as error:
        require_scorable(config, groups)
    assert "Check these rewards" not in str(error.value)


@pytest.mark.parametrize("supervision", ["outcome", "turn"])
def test_a_reward_model_reads_a_trajectory_where_its_turns_end(supervision: str) -> None:
    """The ends of steps count sampled tokens; the model reads those of an environment, too."""
    config = reward_model_config(reward__supervision=supervision)
    checkpoint = tiny.checkpoint()
    assert config.reward.model
    model = RewardModel(config, config.reward.model, checkpoint, None)
    seen: list[tuple[int, ...]] = []

    def record(tokens: Sequence[TokenSequence], step_ends: Sequence[tuple[int, ...]]) -> list[list[float]]:
        seen.extend(step_ends)
        return [[0.0] * len(ends) for ends in step_ends]

    with patch.object(model, "score", record):
        score = Scorer(config, checkpoint, lambda *_: [RIGHT], model)
        group = score([tiny.PROBLEMS[0]], [[trajectory(ASKED, ANSWERED)]])[0]
    assert seen == [(3, 7) if supervision == "turn" else (7,)]
    (example,) = examples_of(config, group)
    assert isinstance(example, LabeledExample)
    assert example.step_ends == (7,)


# Records --------------------------------------------------------------------------------------------------------------


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
    """Whichever of them a step has; a run has twenty at most, however many names an environment gives."""
    first = _rewarded_parts({"valid": 1.0, "short": 0.5})
    assert first == {"reward_environment_short": 0.5, "reward_environment_valid": 1.0}
    second = _rewarded_parts({"late": 2.0}, ["step", "reward", "reward_accuracy", *first])
    assert second == {"reward_environment_short": 0.0, "reward_environment_valid": 0.0, "reward_environment_late": 2.0}
    many = _rewarded_parts({f"a{number}": 1.0 for number in range(30)}, list(second))
    assert len(many) == 20
    assert set(second) < set(many)


@pytest.mark.parametrize("names", [("a.b", "a_b"), ("a.b", "a:b"), ("a:b", "a_b")])
def test_parts_of_an_environments_reward_that_would_share_a_column_are_an_error(names: tuple[str, str]) -> None:
    """The error names both."""
    with pytest.raises(PipelineError, match=rf"`({names[0]}|{names[1]})` .* `({names[0]}|{names[1]})` would share"):
        _rewarded_parts(dict.fromkeys(names, 1.0))


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


# What counts tokens ---------------------------------------------------------------------------------------------------

READ = TokenSequence((1, 2), (3, 4, 9, 9, 9, 9, 5, 6), ((2, 6),))
"""Four sampled tokens, and four equal ones of an environment in between."""
ACTED = Completion(READ, (-1.0,) * 4, "#### 18", finished=True)


def _rollout(response: Completion) -> Rollout:
    return Rollout([Group(tiny.PROBLEMS[0], _score([response]))], [], sampling_s=0.0, scoring_s=0.0)


def _overlong(response: Completion) -> float:
    buffer = {"reward__weights": {"overlong": 1.0}, "reward__overlong_buffer_tokens": 4}
    config = grpo_config(sampling__max_new_tokens=6, **buffer)
    return overlong(tiny.PROBLEMS[0], response, RIGHT, config=config)


def _length_reward(response: Completion) -> float:
    return length(tiny.PROBLEMS[0], [response, completion(6)], [RIGHT] * 2)[0]


def _recorded_length(response: Completion) -> tuple[float, float]:
    metrics = rollout_metrics(grpo_config(), _rollout(response), AnswerPolicy.DECLARED)
    return metrics["completion_length_tokens"], metrics["completion_length_max_tokens"]


def _versions(response: Completion) -> list[tuple[int, ...]]:
    paused = replace(completion(1), versions=(2,))
    return [with_version([[response]], 3, partial)[0][0].versions for partial in (None, [[paused]])]


def _speed(response: Completion) -> float:
    """Tokens per second of a step of two seconds."""
    with (
        patch.object(monitoring, "measure_matmul_flops", lambda *_: 1e12),
        patch.object(monitoring, "time", Mock(monotonic=Mock(side_effect=[5.0, 7.0]))),
    ):
        timer = monitoring.StepTimer(grpo_config(), tiny.checkpoint())
        timer.start()
        return timer.row(1, _rollout(response), [], SINGLE_PROCESS)["tokens_per_s"]


def _validated_length(response: Completion) -> float:
    sampler = Mock(generate=lambda problems, sampling: [[response] for _ in problems])
    settings = grpo_config(), tiny.PROBLEMS[:3], sampler, lambda problems, *_: [RIGHT] * len(problems)
    measured = Validator(*settings, AnswerPolicy.DECLARED, SINGLE_PROCESS).measure(1)
    return float(measured["completion_length_tokens"])


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (_overlong, -0.5),
        (_length_reward, 0.5),
        (_recorded_length, (4.0, 4)),
        (_versions, [(3, 3, 3, 3), (2, 3, 3, 3)]),
        (_speed, 2.0),
        (_validated_length, 4.0),
    ],
)
def test_what_counts_tokens_counts_the_sampled_ones(count: Callable[[Completion], Any], expected: Any) -> None:
    """By hand; an environment's tokens between them change nothing."""
    assert count(replace(ACTED, tokens=TokenSequence((1, 2), (3, 4, 5, 6)))) == expected
    assert count(ACTED) == expected


# From the sampler to the loss -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actor() -> Checkpoint:
    """A model that mostly calls a calculator before it answers."""
    return acting.fitted(acting.CALCULATOR, acting.PROBLEMS, steps=20)


def _with_own_attention(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return a copy of the model that computes one sequence at a time, as transformers does."""
    model = copy.deepcopy(checkpoint.model)
    model.set_attn_implementation("sdpa")
    return model


def test_a_sampled_trajectory_has_the_log_probabilities_that_it_was_sampled_with(actor: Checkpoint) -> None:
    """Its tokens are the sampled ones, never tokenised again, with the observations in their places."""
    assert actor.format.tools
    with Environments(actor.format.tools) as environments:
        sampling = Sampling(num_samples=4, temperature=1.0, max_new_tokens=40, seed=1, environments=environments)
        groups = TransformersSampler(actor, 64).generate(acting.PROBLEMS, sampling)
    completions = [each for group in groups for each in group]
    assert sum(len(each.turns) > 1 for each in completions) > len(completions) / 2
    for each in completions:
        sequence, turns = each.tokens, each.turns
        observed = [sequence.completion_ids[start:stop] for start, stop in sequence.environment]
        read = [turn.observation for turn in turns if turn.observation]
        assert observed == [actor.read_observation(text, ended=False).ids for text in read]
        ends = [0, *(turn.end for turn in turns)]
        of_turns = [sequence.sampled_ids[start:stop] for start, stop in pairwise(ends)]
        assert [actor.decode(ids) for ids in of_turns] == [turn.text for turn in turns]
        assert each.num_tokens == len(each.logprobs) == ends[-1]
    sampled_M = torch.tensor([logprob for each in completions for logprob in each.logprobs], dtype=torch.float64)
    sequences = [each.tokens for each in completions]
    batches = tiny.batches(sequences, 300)
    trained_M = completion_logprobs(LogprobModel(actor.model, temperature=1.0), batches, len(sampled_M))
    with torch.no_grad():
        model = _with_own_attention(actor)
        plain_M = torch.cat([plain_scores(model, sequence)[0] for sequence in sequences])
    torch.testing.assert_close(trained_M, plain_M, rtol=0, atol=1e-4)
    torch.testing.assert_close(trained_M, sampled_M, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward__weights": {CHECKED: 1.0}, "reward__supervision": "process"},
        {"reward__weights": {"environment": 1.0}, "reward__supervision": "turn"},
        {
            "sampler__max_staleness": 1,
            "sampler__correction": {"weight": {}, "mask": {"level": "sequence"}},
            "sampler__max_mismatch": 1.0,
        },
    ],
    ids=["outcome", "process", "turn", "a mask of completions"],
)
@pytest.mark.parametrize("questions", [["1+2" * 40, "1+2"], ["1+2" * 40, "3+3" * 40]], ids=["one of two", "all"])
def test_completions_without_tokens_are_masked(
    changes: dict[str, Any], questions: list[str], verify: Verifier, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their prompts fill the context, which is named once; the step learns from the others."""
    config = grpo_config(prompts_per_step=2, num_steps=1, warmup_steps=0, logged_completions_per_step=8, **changes)
    checkpoint = words.checkpoint()
    problems = tiny.asked(questions)
    environments = cast(Environments, words.ActingEnvironments())
    sampler = TransformersSampler(checkpoint, 64)
    trainer = build_trainer(config, checkpoint, problems, verify, sampler, environments=environments)
    trainer.run(steps_done=0, after_step=lambda _: None)
    records = trainer.history.completions
    empty = [each for each in records if not each["num_tokens"]]
    (row,) = trainer.history.curves
    if questions[1] == "1+2":
        assert [each["num_tokens"] > 0 for each in records] == [each["question"] == "1+2" for each in records]
        assert len(empty) == 4
        assert all((each["reward"], each["advantage"], each["finished"]) == (None, 0.0, False) for each in empty)
    else:
        assert (row["completion_length_tokens"], row["gradient_norm"]) == (0, 0)
    assert capsys.readouterr().out.count("its prompt fills the context of the model") == 1


# Runs -----------------------------------------------------------------------------------------------------------------


def _processes() -> list[int]:
    """Return the processes of environments that this process has started."""
    parent = str(os.getpid()).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            arguments = path.read_bytes().split(b"\0")
            if b"components.environments.worker:EnvironmentService" in arguments and parent in arguments:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    "num_steps",
    [
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(300, marks=[pytest.mark.long(minutes=6), pytest.mark.timeout(3600)]),
    ],
)
def test_environments_that_crash_and_hang_cost_their_own_trajectories_alone(tmp_path: Path, num_steps: int) -> None:
    """Every step is recorded with how many failed, the others are learned from, and no process is left."""
    reference = acting.write_reference(tmp_path / "reference", acting.FLAKY, acting.QUESTIONED, steps=25)
    held_out = [each.model_copy(update={"split": Split.DEV, "id": f"dev/{each.id}"}) for each in acting.QUESTIONED[:4]]
    run(
        tmp_path,
        acting.QUESTIONED,
        reference,
        held_out,
        num_steps=num_steps,
        prompts_per_step=4,
        group_size=8,
        logged_completions_per_step=32,
        learning_rate=1e-5,  # it is to fail as often at the end
        sampling__max_new_tokens=12,
        reward__weights={"accuracy": 1.0, "environment": 0.5},
        reward__max_unscorable_fraction=1.0,
        validation={"every_steps": 2},
    )
    assert _processes() == []
    curves, records = rows(tmp_path), rows(tmp_path, "completions")
    assert [row["step"] for row in curves] == list(range(1, num_steps + 1))
    assert all(row["gradient_norm"] > 0 for row in curves)
    assert len(records) == 32 * num_steps
    failed = [each for each in records if each["environment_failure"]]
    assert sum(row["environment_failures"] for row in curves) == len(failed)
    assert all(row["unscorable_fraction"] == row["environment_failures"] / 32 for row in curves)
    for cause in ("exit code 3", "within 0.5 s", "nine"):
        assert any(cause in each["environment_failure"] for each in failed), cause
    assert all((each["reward"], each["advantage"]) == (None, 0.0) for each in failed)
    answered = [each for each in records if not each["environment_failure"]]
    assert all(each["reward"] is not None for each in answered)
    turns = [turn for each in answered for turn in each["turns"][: None if each["finished"] else -1]]
    assert not any(digit in turn["text"] for turn in turns for digit in "789")
