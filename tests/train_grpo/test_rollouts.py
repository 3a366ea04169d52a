import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from components.grading.verifier import Grade, Reason, Verdict, Verifier
from components.policy.checkpoint import load, save
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.rollout.sampler import Completion, Sampling
from components.rollout.vllm.sampler import VllmSampler
from components.rollout.vllm.verification import StaleWeightsError
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.custom_rewards import Failure
from components.train_grpo.monitoring import require_scorable
from components.train_grpo.prefetched_rollouts import PrefetchedRollouts
from components.train_grpo.prompts import Prompts
from components.train_grpo.rollouts import Rollout, Rollouts
from components.train_grpo.scoring import Group, ScoredCompletion
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.train_grpo.groups import SHORTNESS, completion, graded, scored
from tests.train_grpo.own_weights import OwnWeights
from tests.train_grpo.runs import OneOf, in_processes
from tests.train_grpo.settings import SERVERS, grpo_config

MIXED = [number for number in range(24) if number % 4 == 0]
"""The problems whose completions disagree, for `_sometimes`."""


def _sometimes(number: int) -> int:
    """Of every four problems one is solved half the time, two never and one always."""
    return {0: 2, 3: 4}.get(number % 4, 0)


class _Sampler:
    """A sampler that gives a known number of right answers to each question, and records what it was asked."""

    def __init__(self, num_right: Callable[[int], int]) -> None:
        self._num_right = num_right
        self.calls: list[dict[str, Any]] = []
        self.events: list[str] = []

    def update_weights(self, version: int) -> float:
        self.events.append(f"weights {version}")
        return 0.0

    def sleep(self) -> None:
        pass

    def generate(self, problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        self.calls.append({"count": len(problems), **asdict(sampling)})
        numbers = [int(re.findall("[0-9]+", problem.question)[0]) for problem in problems]
        return [
            [
                completion(1 + sample, text=f"#### {number + number % 7 + (sample >= self._num_right(number))}")
                for sample in range(sampling.num_samples)
            ]
            for number in numbers
        ]


def _score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[Group]:
    """Return rewards for right answers."""
    pairs = zip(problems_P, completions_PG, strict=True)
    return [
        Group(problem, [graded(problem.answer, each) for each in completions_G]) for problem, completions_G in pairs
    ]


def _rollouts(config: TrainGRPOConfig, sampler: Any, *, score: Any = _score, ranks: Ranks = SINGLE_PROCESS) -> Rollouts:
    kind = PrefetchedRollouts if config.sampler.max_staleness else Rollouts
    return kind(config, Prompts(tiny.PROBLEMS, config.prompts, seed=config.seed), sampler, score, ranks)


def _number(group: Group) -> int:
    return int(group.problem.id[-3:])


def test_a_rollout_has_a_group_of_completions_for_each_problem() -> None:
    """Groups are in the order of their problems, with that problem's own completions, sampled as configured."""
    config, sampler = grpo_config(sampling__temperature=0.7, group_size=6), _Sampler(lambda number: number % 5)
    rollout = _rollouts(config, sampler).sample("7", version=0)
    problems = Prompts(tiny.PROBLEMS, config.prompts, seed=config.seed).next_batch(3)
    assert [group.problem for group in rollout.sampled] == problems
    assert [group.num_right for group in rollout.sampled] == [_number(group) % 5 for group in rollout.sampled]
    assert [len(group.scored_G) for group in rollout.sampled] == [6] * 3
    (call,) = sampler.calls
    expected = {"count": 3, "num_samples": 6, "temperature": 0.7, "max_new_tokens": 16, "stop": ()}
    assert {name: call[name] for name in expected} == expected


@pytest.mark.parametrize(("rounds", "seed"), [(1, 0), (2, 1), (20, 2)])
def test_zero_variance_groups_are_replaced_for_a_bounded_number_of_rounds(rounds: int, seed: int) -> None:
    """Each round asks for just what is missing; only groups that disagree are trained on, and never too many."""
    sampler = _Sampler(_sometimes)
    rollout = _rollouts(grpo_config(seed=seed, prompts__max_resampling_rounds=rounds), sampler).sample("1", version=0)
    assert rollout.trained == [group for group in rollout.sampled if _number(group) in MIXED]
    assert 1 <= len(sampler.calls) <= rounds + 1
    first = num_trained = 0
    for call in sampler.calls:
        assert call["count"] == 3 - num_trained > 0
        num_trained += sum(_number(group) in MIXED for group in rollout.sampled[first : first + call["count"]])
        first += call["count"]
    assert first == len(rollout.sampled)
    # It went on until the step was full or the rounds were over.
    assert num_trained == len(rollout.trained)
    assert num_trained == 3 or (len(sampler.calls) == rounds + 1 and rounds < 20)


def test_resampling_trains_on_the_same_groups_with_any_number_of_processes() -> None:
    """The processes' shards are put together in the order of the prompts."""
    config = grpo_config(prompts_per_step=6, prompts__max_resampling_rounds=20)
    alone = _rollouts(config, _Sampler(_sometimes)).sample("1", version=0)

    def sample(ranks: Ranks) -> Rollout:
        return _rollouts(config, _Sampler(_sometimes), ranks=ranks).sample("1", version=0)

    for each in in_processes(3, sample):
        assert each.trained == alone.trained
        assert each.sampled == alone.sampled


def test_every_process_round_and_step_has_random_numbers_of_its_own() -> None:
    """No two of three processes sample with the same seed in any round of any step."""
    every = [_rollouts(grpo_config(), None, ranks=OneOf(rank, 3)) for rank in range(3)]
    seeds = {each._seed(f"step {step}", round_) for each in every for step in (1, 2) for round_ in range(3)}
    assert len(seeds) == 3 * 2 * 3


def test_the_problem_of_every_group_that_is_solved_is_left_out() -> None:
    """Of all that was sampled, also of what is not trained on; unscorable is not wrong."""
    config = grpo_config(prompts={"max_resampling_rounds": 1, "max_pass_rate": 0.6}, prompts_per_step=6)

    def score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[Group]:
        groups = _score(problems_P, completions_PG)
        for each in groups:
            if each.scored_G[-1].grade.verdict is Verdict.WRONG:
                each.scored_G[-1] = scored({"accuracy": [math.nan]}, verdict=Verdict.UNSCORABLE)
        return groups

    rollouts = _rollouts(config, _Sampler(_sometimes), score=score)
    rollout = rollouts.sample("1", version=0)
    assert len(rollout.sampled) > len(rollout.trained) > 0
    rates = {4: 1.0, 2: 2 / 3, 0: 0.0}
    solved = [group.problem.id for group in rollout.sampled if rates[_sometimes(_number(group))] >= 0.6]
    assert rollouts.prompts.state()["pools"]["all"]["solved"] == solved
    assert 0 < len(solved) < len(rollout.sampled)


FINE = scored({"accuracy": [0.0]}, verdict=Verdict.WRONG)
A, LATER, RARE = (
    replace(FINE, failure=Failure(*each)) for each in (("raised", "raised a"), ("raised", "raised b"), ("rare", "rare"))
)
SLOW, EMPTY = (replace(FINE, grade=Grade(Verdict.UNSCORABLE, None, reason)) for reason in (Reason.TIME, Reason.NO_GOLD))


def _groups(*bad: ScoredCompletion, size: int) -> list[Group]:
    """Return two groups with `size` completions in all, the bad ones last."""
    row = [FINE] * (size - len(bad)) + list(bad)
    return [Group(tiny.PROBLEMS[0], row[: size // 2]), Group(tiny.PROBLEMS[1], row[size // 2 :])]


def test_the_commonest_reasons_come_first_with_their_counts_and_an_example() -> None:
    """Failures of one kind are counted together; three reasons are shown. The limit itself is allowed, unrounded."""
    config = grpo_config(reward__max_unscorable_fraction=0.29)
    require_scorable(config, _groups(*[A] * 29, size=100))  # 0.29 times 100 is a little less than 29
    with pytest.raises(PipelineError, match=r"30.% of the 100 completions .*max_unscorable_fraction is 0\.29"):
        require_scorable(config, _groups(*[A] * 30, size=100))
    with pytest.raises(PipelineError) as error:
        require_scorable(grpo_config(), _groups(SLOW, A, LATER, SLOW, RARE, A, EMPTY, EMPTY, size=16))
    second = tiny.PROBLEMS[1].id
    reasons = [f"3 times, first for problem {second}: raised a"]
    reasons += [f"2 times, first for problem {second}: the grader says: {why}" for why in (Reason.TIME, Reason.NO_GOLD)]
    assert f"{'; '.join(reasons)}. Check" in str(error.value)
    assert "rare" not in str(error.value)


WEIGHT = {"sampler__correction__weight": {"level": "token", "max": 2.0}}
OVERLAP = {"sampler__servers": SERVERS, "sampler__max_staleness": 1, "sampler__max_mismatch": 1.0, **WEIGHT}
LORA = {"rank": 4, "alpha": 6.0, "targets": ["all-linear"]}
ADAPTERS = {"synchronise": "adapters"}
Make = Callable[..., tuple[Trainer, OwnWeights]]


@pytest.fixture
def make(tmp_path: Path, verify: Verifier) -> Make:
    """Return a function that makes a trainer whose sampler has weights of its own."""
    (tmp_path / "reference").mkdir()
    save(tiny.checkpoint(), tmp_path / "reference")
    (tmp_path / "weights").mkdir()

    def trainer(saved: Any = None, engine: dict[str, Any] | None = None, **changes: Any) -> tuple[Trainer, OwnWeights]:
        config = grpo_config(**{"reward__weights": SHORTNESS, "num_steps": 4, **changes})
        checkpoint = load(tmp_path / "reference", dtype=torch.float32)
        own = OwnWeights(checkpoint, tmp_path / "reference", **engine or {})
        mismatch, folder = config.sampler.max_mismatch, tmp_path / "weights"
        sampler = VllmSampler(own, checkpoint, temperature=1.0, max_mismatch=mismatch, folder=folder)
        held_out = [tiny.problem(30, split=Split.DEV)] if config.validation else []
        return build_trainer(config, checkpoint, tiny.PROBLEMS, verify, sampler, saved, held_out), own

    return trainer


def _run(trainer: Trainer, *, steps_done: int = 0, after_step: Callable[[int], None] = lambda _: None) -> None:
    trainer.run(steps_done=steps_done, after_step=after_step)


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ({}, {}),
        ({"weights_by": "nccl"}, {"engine__lora": LORA}),
        (ADAPTERS, {"engine__lora": LORA}),
        pytest.param(ADAPTERS, {"engine__lora": LORA, "engine__zero_stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_the_sampler_gets_the_weights_of_every_update(
    make: Make, tmp_path: Path, engine: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Its log-probabilities are the trainer's; one copy is left in the folder, none if weights are sent directly."""
    trainer, own = make(engine=engine, num_steps=2, **changes)
    _run(trainer)
    assert own.versions == own.sampled_from == [0, 1]
    assert all((row["sampler_mismatch"] or 0.0) < 1e-5 for row in trainer.history.curves)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ([] if "weights_by" in engine else ["1"])


def test_a_sampler_with_stale_weights_stops_the_run_after_the_first_step(make: Make) -> None:
    """Before anything is sampled from them, though the step is too small for the bound on the mismatch."""
    trainer, engine = make(engine={"stale": True, "weights_by": "nccl"}, learning_rate=1e-5)
    with pytest.raises(StaleWeightsError, match=r"a copy (still samples from|received the trainer)"):
        _run(trainer)
    assert len(trainer.history.curves) == 1
    assert engine.sampled_from == [0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("servers", [SERVERS, None])
def test_any_error_while_prefetching_ends_the_run(servers: Any) -> None:
    """In the thread that samples, too, nobody waits for it forever."""

    def fail(number: int) -> int:
        raise SystemExit(3)

    rollouts = _rollouts(grpo_config(**{**OVERLAP, "sampler__servers": servers}), _Sampler(fail))
    with pytest.raises((RuntimeError, SystemExit)):
        rollouts.of_step(1)


def test_weights_change_after_all_processes_have_prefetched() -> None:
    """Servers would sample what is left of a rollout from the next weights."""
    sampler = _Sampler(lambda _: 1)

    class Waiting(OneOf):
        def barrier(self, what: str) -> None:
            sampler.events.append(what)

    rollouts = _rollouts(grpo_config(**OVERLAP), sampler, ranks=Waiting(0, 2))
    for step in (1, 2):
        rollouts.of_step(step)
    assert sampler.events[-2:] == ["the end of prefetching", "weights 1"]


def test_staleness_is_bounded_and_does_not_depend_on_where_is_sampled(make: Make, tmp_path: Path) -> None:
    """Servers change when a rollout is sampled, not what; a resumed run goes on with those that were sampled ahead."""
    sampled_from = [0, 0, 0, 2]
    settings = {**OVERLAP, "sampler__max_staleness": 2, "num_steps": 4, "prompts_per_step": 1}
    rows, saved = [], dict[str, Any]()

    def save_state(step: int) -> None:
        if step == 2:
            save_file(trainer.policy.state(), tmp_path / "policy.safetensors")
            saved.update(values=trainer.state(), policy=tmp_path / "policy.safetensors")

    for servers in (SERVERS, None):
        trainer, engine = make(**{**settings, "sampler__servers": servers})
        _run(trainer, after_step=save_state)
        assert sorted(engine.sampled_from) == sampled_from
        assert engine.versions == sorted(set(sampled_from))
        rows.append(trainer.history.curves)
    resumed, engine = make(**settings, saved=type("Saved", (), saved))
    _run(resumed, steps_done=2)
    assert engine.sampled_from == [2]
    assert rows[0] == rows[1] == resumed.history.curves
    pairs = zip(resumed.checkpoint.model.parameters(), trainer.checkpoint.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    ages = [step - version for step, version in enumerate(sampled_from)]
    assert [row["staleness_mean"] for row in rows[0]] == [row["staleness_max"] for row in rows[0]] == ages
    mismatches = [row["sampler_mismatch"] or 0.0 for row in rows[0]]  # an update's worth for each
    assert mismatches[0] < 1e-5
    assert min(mismatches[1:]) > 1e-4
    assert all(row["gradient_norm"] for row in rows[0])
    rates = [row["learning_rate"] for row in rows[0]]  # a warm-up of one step, then down to a tenth
    assert [rates[0], rates[-1]] == pytest.approx([1e-3, 1e-4])


def test_validation_leaves_prefetched_rollouts_as_they_are(make: Make) -> None:
    """It waits for them, then samples from the newest weights, which are sent once."""
    validated, engine = make(**OVERLAP, num_steps=3, prompts_per_step=1, validation={"every_steps": 2})
    _run(validated)
    assert engine.versions == [0, 1, 2, 3]
    assert engine.sampled_from == [0, 0, 0, 1, 2, 3]  # validations are the first and the last two
    assert [row["staleness_max"] for row in validated.history.curves] == [0, 1, 1]
