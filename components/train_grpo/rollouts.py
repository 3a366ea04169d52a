"""Rollouts: prompts, a group of completions for each, and their rewards, as a policy update needs them.

Shape suffixes as in objective.py: P prompts, G completions per prompt, B all of them, K steps of a prompt's group.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from components.grading.verifier import Grade, Verdict, Verifier
from components.policy.packing import TokenSequence
from components.policy.parallel import Ranks
from components.rollout.sampler import Completion, Sampler, Sampling, grade_completions
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem
from components.train_grpo.config import Combination, TrainGRPOConfig
from components.train_grpo.custom_rewards import Failure
from components.train_grpo.objective import has_spread
from components.train_grpo.process_supervision import Step
from components.train_grpo.prompts import Prompts
from components.train_grpo.rewards import Scored, Scorer

Score = Callable[[Sequence[Problem], Sequence[Sequence[Completion]]], list[list[Scored]]]
"""From problems (P,) and the completions of each (P, G) to those completions with their rewards (P, G)."""


@dataclass(frozen=True)
class Group:
    """A problem with the completions that are each other's baseline."""

    problem: Problem
    scored_G: list[Scored]

    @property
    def num_right(self) -> int:
        """Completions with the right answer."""
        return sum(scored.grade.verdict is Verdict.RIGHT for scored in self.scored_G)

    @property
    def num_scorable(self) -> int:
        """Completions whose answer could be graded."""
        return sum(scored.grade.verdict is not Verdict.UNSCORABLE for scored in self.scored_G)


@dataclass
class Rollout:
    """The groups of all processes for one step, and the time they took in this process, without waiting for others."""

    sampled: list[Group]
    """All groups, in the order they were sampled."""
    trained: list[Group]
    """The groups that the policy is updated on."""
    sampling_s: float
    scoring_s: float
    sync_s: float = 0.0
    """Time to update the weights of the sampler."""


class Rollouts:
    """Samples the rollouts of a run; with `sampler.overlap` each one while the policy learns from the one before."""

    def __init__(
        self, config: TrainGRPOConfig, prompts: Prompts, sampler: Sampler, score: Score, *, ranks: Ranks
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.sampler = sampler
        self.score = score
        self.ranks = ranks
        self._prefetched: Future[Rollout] | None = None

    def of_step(self, step: int) -> Rollout:
        """Return the rollout to learn from."""
        with self._memory():
            return self._overlapped(step) if self.config.sampler.overlap else self._in_turn(step)

    def of_reference(self, number: int) -> Rollout:
        """Return a rollout from before the first step, for the reward model to learn from."""
        with self._memory():
            self.sampler.update_weights(0)
            return self.sample(f"initial {number}")

    def sample(self, name: str) -> Rollout:
        """Sample and score a group for each of a batch of problems, with random numbers that depend on `name`.

        Every process samples and scores its shard of the problems, and gets all groups. Zero-variance groups teach
        nothing: with dynamic sampling (DAPO, section 3.2) they are replaced by groups of further problems, for a
        bounded number of rounds. What is then missing stays missing, and the loss is divided by what is there.
        """
        rollout = Rollout([], [], 0.0, 0.0)
        max_rounds = self.config.prompts.max_resampling_rounds
        for round_ in range(max_rounds + 1):
            missing = self.config.prompts_per_step - len(rollout.trained)
            if not missing:
                break
            shard = self._sample_shard(self.ranks.shard(self.prompts.next_batch(missing)), self._seed(name, round_))
            groups_P = self._gather(shard.sampled)
            rollout.sampled += groups_P
            rollout.trained += [group for group in groups_P if not max_rounds or differs(self.config, group)]
            rollout.sampling_s += shard.sampling_s
            rollout.scoring_s += shard.scoring_s
        return rollout

    def state(self) -> dict[str, Any]:
        """Return the place in the order of prompts and any prefetched rollout, as plain values."""
        prefetched = None
        if self._prefetched is not None:
            shards = self.ranks.all_gather(self._prefetched.result().sampled, "the end of prefetching")
            prefetched = [group_to_plain(group) for shard in shards for group in shard]
        return {"prompts": self.prompts.state(), "prefetched": prefetched}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.prompts.restore(state["prompts"])
        if state["prefetched"] is not None:
            groups = [group_from_plain(values) for values in self.ranks.shard(state["prefetched"])]
            self._prefetched = Future()
            self._prefetched.set_result(Rollout(groups, groups, 0.0, 0.0))

    def _in_turn(self, step: int) -> Rollout:
        sync_s = self.sampler.update_weights(step - 1)
        rollout = self.sample(f"step {step}")
        self.sampler.sleep()
        rollout.sync_s = sync_s
        return rollout

    def _overlapped(self, step: int) -> Rollout:
        """Take the prefetched rollout and begin the next: what is learned from is one update old (off-policy)."""
        if self._prefetched is None:
            self.sampler.update_weights(step - 1)
            self._prefetched = self._prefetch(step)
        shard, self._prefetched = self._prefetched.result(), None
        sync_s = self.sampler.update_weights(step - 1)
        if step < self.config.num_steps:
            self._prefetched = self._prefetch(step + 1)
        groups = self._gather(shard.sampled)
        return Rollout(groups, groups, shard.sampling_s, shard.scoring_s, sync_s)

    def _prefetch(self, step: int) -> "Future[Rollout]":
        """Begin this process's part of the rollout of a step in a thread, with the weights that the sampler has."""
        problems_P = self.ranks.shard(self.prompts.next_batch(self.config.prompts_per_step))
        seed = self._seed(f"step {step}", 0)
        rollout: Future[Rollout] = Future()

        def run() -> None:
            try:
                rollout.set_result(self._sample_shard(problems_P, seed))
            except Exception as error:
                rollout.set_exception(error)

        # A daemon: a run that ends for another reason does not wait for it.
        threading.Thread(target=run, daemon=True).start()
        return rollout

    def _sample_shard(self, problems_P: Sequence[Problem], seed: str) -> Rollout:
        """Sample and score this process's part of a rollout."""
        started = time.monotonic()
        sampling = Sampling(
            num_samples=self.config.group_size,
            temperature=self.config.sampling.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=random.Random(seed).getrandbits(48),
        )
        completions_PG = self.sampler.generate([problem.question for problem in problems_P], sampling)
        sampled = time.monotonic()
        scored_PG = self.score(problems_P, completions_PG)
        groups = [Group(*pair) for pair in zip(problems_P, scored_PG, strict=True)]
        return Rollout(groups, groups, sampled - started, time.monotonic() - sampled)

    def _seed(self, name: str, round_: int) -> str:
        """Return the name of a stream of random numbers: each process has its own in every round of every rollout."""
        return f"{self.config.seed}/{name}/{round_}" + (f"/{self.ranks.rank}" if self.ranks.rank else "")

    def _gather(self, groups: list[Group]) -> list[Group]:
        """Return the groups of all processes, and record their pass rates for the choice of problems."""
        groups_P = [group for shard in self.ranks.all_gather(groups, "the end of sampling") for group in shard]
        for group in groups_P:
            self.prompts.record(group.problem.id, num_right=group.num_right, num_scored=group.num_scorable)
        return groups_P

    def _memory(self) -> AbstractContextManager[None]:
        """Name the keys that lower the memory for sampling or scoring where it runs out."""
        sampling, sampler = self.config.sampling, self.config.sampler
        remedies = [f"lower train_grpo.sampling.max_new_tokens (it is {sampling.max_new_tokens})"]
        if sampler.vllm:
            remedies.insert(0, f"lower train_grpo.sampler.vllm.cache_gib (it is {sampler.vllm.cache_gib:g})")
        elif not sampler.servers:
            remedies.insert(0, f"lower train_grpo.sampling.max_batch_size (it is {sampling.max_batch_size})")
        return explain_out_of_memory("the rollout", *remedies)


def scoring(scorer: Scorer, verify: Verifier) -> Score:
    """Return the function that grades all completions in one call, which keeps every grader busy, and rewards them."""

    def score(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[list[Scored]]:
        answers_B = [problem.answer for problem, group in zip(problems_P, completions_PG, strict=True) for _ in group]
        policy = scorer.checkpoint.config.answer
        grades_B = iter(grade_completions(verify, answers_B, list(chain(*completions_PG)), policy))
        return [
            scorer(problem, completions_G, list(islice(grades_B, len(completions_G))))
            for problem, completions_G in zip(problems_P, completions_PG, strict=True)
        ]

    return score


def reward_tensors(config: TrainGRPOConfig, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return what is normalised, each (P, K): the weighted sum of all rewards, or each of them on its own."""
    weights = config.reward.weights
    if config.reward.combination is Combination.BEFORE_NORMALISATION:
        return {"combined": _padded([[scored.combined(weights) for scored in group.scored_G] for group in groups])}
    return {
        name: _padded([[scored.rewards[name] for scored in group.scored_G] for group in groups]) for name in weights
    }


def differs(config: TrainGRPOConfig, group: Group) -> bool:
    """Return whether a group's rewards differ, so that there is something to learn from it."""
    return any(bool(has_spread(rewards_PK).item()) for rewards_PK in reward_tensors(config, [group]).values())


def _padded(rewards_PGK: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """Lay the steps of each group's completions end to end."""
    rows = [torch.tensor([x for steps in group for x in steps], dtype=torch.float64) for group in rewards_PGK]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)


def group_to_plain(group: Group) -> dict[str, Any]:
    """Return a group as numbers, text, lists and dicts, for a checkpoint."""
    scored_G = [asdict(scored) for scored in group.scored_G]
    for scored in scored_G:
        scored["grade"]["verdict"] = scored["grade"]["verdict"].value
    return {"problem": group.problem.model_dump(mode="json"), "scored_G": scored_G}


def group_from_plain(values: dict[str, Any]) -> Group:
    """Return the group of which `group_to_plain` returned the values."""
    return Group(Problem.model_validate(values["problem"]), [_scored_from_plain(each) for each in values["scored_G"]])


def _scored_from_plain(values: dict[str, Any]) -> Scored:
    completion, grade, failure = values["completion"], values["grade"], values["failure"]
    return Scored(
        completion=Completion(**{**completion, "tokens": TokenSequence(**completion["tokens"])}),
        grade=Grade(**{**grade, "verdict": Verdict(grade["verdict"])}),
        steps=tuple(Step(**step) for step in values["steps"]),
        rewards=dict(values["rewards"]),
        failure=Failure(**failure) if failure else None,
    )
