import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from components.grading.verifier import Verifier
from components.policy.checkpoint import load, save
from components.policy.packing import TokenSequence
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.rollout.sampler import Completion, PartialCompletions, Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.problem import Problem
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import staleness_metrics
from components.train_grpo.partial_rollouts import PartialRollouts
from components.train_grpo.prompts import Prompts
from components.train_grpo.rollouts import Rollout
from components.train_grpo.scoring import Group
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.train_grpo.groups import SHORTNESS, graded
from tests.train_grpo.runs import in_processes
from tests.train_grpo.settings import SERVERS, grpo_config

WEIGHT = {"level": "token", "max": 2.0}
PARTIAL: dict[str, Any] = {
    "num_steps": 12,
    "sampler__max_staleness": 3,
    "sampler__segment_tokens": 4,
    "sampler__correction__weight": WEIGHT,
    "sampler__max_mismatch": 1.0,
}


class _Lengths:
    """A sampler whose completions have known lengths, sampled in segments.

    The length of a completion is given by its problem and its place in the group. Its tokens are the version of the
    weights that sampled them, and their log-probabilities minus their place: a later segment
    must continue the same completion.
    """

    def __init__(self, length: Callable[[int, int], int]) -> None:
        self._length, self.version = length, -1
        self.segments: list[list[int]] = []
        """Of each call the tokens that were there before, of every completion, new or continued."""

    def update_weights(self, version: int) -> float:
        self.version = version
        return 0.0

    def sleep(self) -> None:
        """Hold no memory."""

    def generate(
        self, problems: Sequence[Problem], sampling: Sampling, partial: PartialCompletions | None = None
    ) -> list[list[Completion]]:
        assert partial is not None
        assert sampling.segment_tokens is not None
        groups = []
        self.segments.append([])
        for problem, group in zip(problems, partial, strict=True):
            number = int(problem.id[-3:])
            before = group or [Completion(TokenSequence((1,), ()), (), "", finished=False, paused=True)] * 4
            assert len(before) == sampling.num_samples
            groups.append([self._continue(each, self._length(number, g), sampling) for g, each in enumerate(before)])
        return groups

    def _continue(self, partial: Completion, length: int, sampling: Sampling) -> Completion:
        if not partial.paused:
            return replace(partial, versions=())
        ids, limit = partial.tokens.completion_ids, min(length, sampling.max_new_tokens)
        assert partial.logprobs == tuple(-float(place) for place in range(len(ids)))
        self.segments[-1].append(len(ids))
        stop = min(limit, len(ids) + (sampling.segment_tokens or 0))
        ids += (100 + self.version,) * (stop - len(ids))
        logprobs = tuple(-float(place) for place in range(stop))
        is_finished, tokens = stop == length, TokenSequence((1,), ids)
        return Completion(tokens, logprobs, "#### 1", is_finished, paused=not is_finished and stop < limit)


def _score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[Group]:
    pairs = zip(problems_P, completions_PG, strict=True)
    return [Group(problem, [graded("1", each) for each in completions_G]) for problem, completions_G in pairs]


def _partial(config: TrainGRPOConfig, sampler: Any, ranks: Ranks = SINGLE_PROCESS) -> PartialRollouts:
    return PartialRollouts(config, Prompts(tiny.PROBLEMS, config.prompts, seed=config.seed), sampler, _score, ranks)


def _steps(config: TrainGRPOConfig, sampler: Any) -> Iterator[tuple[int, Rollout]]:
    rollouts = _partial(config, sampler)
    for step in range(1, config.num_steps + 1):
        yield step, rollouts.of_step(step)


def _completions(rollout: Rollout) -> list[Completion]:
    return [scored.completion for group in rollout.sampled for scored in group.scored_G]


def _varied(number: int, g: int) -> int:
    """From 1 to 16 tokens, the longest rare."""
    return 1 + (number * 7 + g * 5) % 16 if (number + g) % 3 == 0 else 1 + (number + g) % 4


@pytest.mark.parametrize("servers", [None, SERVERS])
@pytest.mark.parametrize(("segment", "staleness"), [(1, 2), (4, 3), (5, 7)])
def test_no_token_is_older_than_the_bound_and_nothing_is_lost(
    servers: dict[str, Any] | None, segment: int, staleness: int
) -> None:
    """Tokens say which weights sampled them; each problem is learned from once, in the order in which they began."""
    changes = {"num_steps": 30, "sampler__segment_tokens": segment, "sampler__max_staleness": staleness}
    config = grpo_config(**{**PARTIAL, **changes, "sampler__servers": servers})
    sampler, oldest = _Lengths(_varied), 0
    order = Prompts(tiny.PROBLEMS, config.prompts, seed=config.seed)
    begun = [problem.id for _ in range(30) for problem in order.next_batch(3)]
    learned: list[str] = []
    for step, rollout in _steps(config, sampler):
        assert len(rollout.trained) <= 3
        learned += [group.problem.id for group in rollout.trained]
        for each in _completions(rollout):
            assert each.versions == tuple(token - 100 for token in each.tokens.completion_ids)
            assert list(each.versions) == sorted(each.versions)
            assert each.finished or each.num_tokens == config.max_sampled_tokens
            oldest = max(oldest, step - 1 - each.versions[0])
        assert rollout.groups_in_flight == 3 * step - len(learned)
    assert oldest <= staleness
    assert not Counter(learned) - Counter(begun)
    assert len(learned) >= 3 * (30 - staleness)
    assert all(len(each) <= 3 * 4 * config.sampler.max_segments for each in sampler.segments)


def test_what_would_become_too_old_is_truncated_and_counted() -> None:
    """Two segments of 4 tokens are all that a bound of one update leaves; the limit itself would be 16."""
    config = grpo_config(**{**PARTIAL, "sampler__max_staleness": 1, "num_steps": 3})
    assert config.max_sampled_tokens == 8
    sampler = _Lengths(lambda _, g: (3, 8, 9, 16)[g])
    figures = [staleness_metrics(config, rollout, step) for step, rollout in _steps(config, sampler)]
    assert figures[0]["groups_in_flight"] == 3
    assert math.isnan(figures[0]["stale_truncated_fraction"])
    for each in figures[1:]:
        assert each == {
            "staleness_mean": pytest.approx((3 * 1 + 3 * 4) / (3 + 3 * 8)),
            "staleness_max": 1,
            "stale_truncated_fraction": 2 / 4,
            "groups_in_flight": 3,
        }
    enough = grpo_config(**PARTIAL)  # 4 segments of 4 tokens
    (_, first), *_ = _steps(enough, _Lengths(lambda *_: 4))
    assert staleness_metrics(enough, first, 1)["stale_truncated_fraction"] == 0


def test_several_processes_learn_from_the_groups_that_one_would() -> None:
    """Each samples its shard of the problems, and the oldest of all are taken; resumed, each has the groups it had."""
    config = grpo_config(**{**PARTIAL, "num_steps": 8})
    alone = dict(_steps(config, _Lengths(_varied)))

    def run(ranks: Ranks) -> list[Rollout]:
        rollouts, sampler = _partial(config, _Lengths(_varied), ranks), _Lengths(_varied)
        before = [rollouts.of_step(step) for step in range(1, 5)]
        resumed, states = _partial(config, sampler, ranks), ranks.all_gather(rollouts.state(), "")
        assert [len(state["groups_of_ranks"]) for state in states] == [3, 3, 3]
        resumed.restore(states[0])  # what the main process has written
        own = [group.number for group in rollouts._groups]
        assert [group.number for group in resumed._groups] == own
        return before + [resumed.of_step(step) for step in range(5, 9)]

    for shared in in_processes(3, run):
        for step, rollout in enumerate(shared, start=1):
            assert rollout.trained == alone[step].trained
            assert rollout.groups_in_flight == alone[step].groups_in_flight


def test_segments_that_hold_a_whole_completion_change_nothing(tmp_path: Path, verify: Verifier) -> None:
    """Weights and metrics are those of the synchronous trainer, to the last bit; nothing is ever in flight or old."""
    save(tiny.checkpoint(), tmp_path)

    def trained(**changes: Any) -> Trainer:
        correction = {"sampler__correction__weight": {"level": "token", "max": 2.0}, "sampler__max_mismatch": 1.0}
        config = grpo_config(**{"reward__weights": SHORTNESS, "num_steps": 4, **correction, **changes})
        checkpoint = load(tmp_path, dtype=torch.float32)
        trainer = build_trainer(config, checkpoint, tiny.PROBLEMS, verify, TransformersSampler(checkpoint, 64))
        trainer.run(steps_done=0, after_step=lambda _: None)
        return trainer

    synchronous, partial = trained(), trained(sampler__max_staleness=3, sampler__segment_tokens=16)
    pairs = zip(partial.checkpoint.model.parameters(), synchronous.checkpoint.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    extra = {"staleness_mean": 0.0, "staleness_max": 0, "stale_truncated_fraction": 0.0, "groups_in_flight": 0}
    assert partial.history.curves == [{**row, **extra} for row in synchronous.history.curves]
    assert partial.history.completions == synchronous.history.completions
