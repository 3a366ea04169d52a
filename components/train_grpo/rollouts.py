"""Rollouts: prompts, a group of completions for each, and their rewards, as a policy update needs them.

Shape suffixes as in objective.py: P prompts, G completions per prompt, B all of them, K steps of a prompt's group.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from components.environments.pool import Environments
from components.policy.parallel import Ranks
from components.rollout.sampler import Completion, PartialCompletions, Sampler, Sampling
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.objective import has_spread
from components.train_grpo.prompts import Prompts
from components.train_grpo.scoring import Group

Score = Callable[[Sequence[Problem], Sequence[Sequence[Completion]]], list[Group]]
"""From problems (P,) and the completions of each (P, G) to these completions with their rewards: see `Scorer`."""


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
    groups_in_flight: int = 0
    """Groups that a later step learns from (see partial_rollouts.py)."""


@dataclass
class Rollouts:
    """Samples the rollouts of a run, each from the weights that learn from it.

    Which weights sample which rollout depends on the numbers of the steps alone, never on the clock, here as in
    subclasses: a run that is resumed learns from what it would have learned from.
    """

    config: TrainGRPOConfig
    prompts: Prompts
    sampler: Sampler
    score: Score
    ranks: Ranks
    environments: Environments | None = None
    """What the policy acts in; None for completions of one turn."""
    _scoring: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Rewards may be functions of a user: no two threads call them at once."""

    def of_step(self, step: int) -> Rollout:
        """Return the rollout to learn from."""
        with self.memory():
            sync_s = self.sampler.update_weights(step - 1)
            rollout = self.sample(f"step {step}", version=step - 1)
            self.sampler.sleep()
            rollout.sync_s = sync_s
            return rollout

    def of_reference(self, number: int) -> Rollout:
        """Return a rollout from before the first step, for the reward model to learn from."""
        with self.memory():
            self.sampler.update_weights(0)
            return self.sample(f"initial {number}", version=0)

    def sample(self, name: str, *, version: int) -> Rollout:
        """Sample and score a group for each of a batch of problems, with random numbers that depend on `name`.

        `version` is that of the sampler's weights.

        Every process samples and scores its shard of the problems, and gets all groups. Zero-variance groups teach
        nothing: with dynamic sampling (DAPO, section 3.2) they are replaced by groups of further problems, for a
        bounded number of rounds. What is then missing stays missing, and the loss is divided by what is there.
        """
        rollout = Rollout([], [], 0.0, 0.0)
        max_rounds, wanted = self.config.prompts.max_resampling_rounds, self.config.prompts_per_step
        for round_ in range(max_rounds + 1):
            missing = wanted - len(rollout.trained)
            if not missing:
                break
            problems_P = self.ranks.shard(self.prompts.next_batch(missing))
            shard = self._sample_shard(problems_P, self._seed(name, round_), version)
            groups_P = self._gather(shard.sampled)
            rollout.sampled += groups_P
            rollout.trained += [group for group in groups_P if not max_rounds or differs(self.config, group)]
            rollout.sampling_s += shard.sampling_s
            rollout.scoring_s += shard.scoring_s
        return rollout

    def finish_prefetch(self) -> None:
        """Wait until no process samples ahead, because the weights of the sampler are about to change."""

    def state(self) -> dict[str, Any]:
        """Return what further rollouts depend on beside random numbers, as plain values; processes call it together."""
        return {"prompts": self.prompts.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.prompts.restore(state["prompts"])

    def _sample_shard(self, problems_P: Sequence[Problem], seed: int, version: int) -> Rollout:
        """Sample and score this process's part of a rollout, from the weights after `version` updates."""
        started = time.monotonic()
        with record_function("sampling"):
            completions_PG = with_version(self.sampler.generate(problems_P, self.sampling(seed)), version)
        sampled = time.monotonic()
        with record_function("scoring"), self._scoring:
            groups = self.score(problems_P, completions_PG)
        return Rollout(groups, groups, sampled - started, time.monotonic() - sampled)

    def sampling(self, seed: int) -> Sampling:
        """Return how completions are sampled, with random numbers of a seed."""
        return Sampling(
            num_samples=self.config.group_size,
            temperature=self.config.sampling.temperature,
            max_new_tokens=self.config.max_sampled_tokens,
            seed=seed,
            environments=self.environments,
        )

    def _seed(self, name: str, round_: int) -> int:
        """Return the seed of a stream of random numbers: each process has its own in every round of every rollout."""
        stream = f"{self.config.seed}/{name}/{round_}" + (f"/{self.ranks.rank}" if self.ranks.rank else "")
        return random.Random(stream).getrandbits(48)

    def _gather(self, groups: list[Group]) -> list[Group]:
        """Return the groups of all processes; see `_recorded`."""
        shards = self.ranks.all_gather(groups, "the end of sampling")
        return self._recorded([group for shard in shards for group in shard])

    def _recorded(self, groups_P: list[Group]) -> list[Group]:
        """Return groups, and record their pass rates for the choice of problems."""
        for group in groups_P:
            self.prompts.record(group.problem.id, num_right=group.num_right, num_scored=group.num_scorable)
        return groups_P

    def memory(self) -> AbstractContextManager[None]:
        """Name the keys that lower the memory for sampling or scoring where it runs out."""
        sampling, sampler = self.config.sampling, self.config.sampler
        remedies = [f"lower train_grpo.sampling.max_new_tokens (it is {sampling.max_new_tokens})"]
        if sampler.vllm:
            remedies.insert(0, f"lower train_grpo.sampler.vllm.cache_gib (it is {sampler.vllm.cache_gib:g})")
        elif not sampler.servers:
            remedies.insert(0, f"lower train_grpo.sampling.max_batch_size (it is {sampling.max_batch_size})")
        return explain_out_of_memory("the rollout", *remedies)


def with_version(
    completions_PG: Sequence[Sequence[Completion]], version: int, partial_PG: PartialCompletions | None = None
) -> list[list[Completion]]:
    """Return completions with the version of the weights that sampled each token; tokens in `partial` keep theirs."""
    groups = []
    for completions_G, partial_G in zip(completions_PG, partial_PG or [()] * len(completions_PG), strict=True):
        before_G = [each.versions for each in partial_G] or [()] * len(completions_G)
        pairs = zip(completions_G, before_G, strict=True)
        groups.append([replace(each, versions=old + (version,) * (each.num_tokens - len(old))) for each, old in pairs])
    return groups


def combined_rewards(config: TrainGRPOConfig, groups: Sequence[Group]) -> Tensor:
    """Return the weighted sum of the rewards of each step, (P, K), those of a group's completions end to end."""
    rows_P = []
    for group in groups:
        weights = config.reward.weights_of(group.problem.source)
        rewards_K = [x for scored in group.scored_G for x in scored.combined(weights)]
        rows_P.append(torch.tensor(rewards_K, dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(rows_P, batch_first=True, padding_value=torch.nan)


def differs(config: TrainGRPOConfig, group: Group) -> bool:
    """Return whether a group's rewards differ, so that there is something to learn from it."""
    return bool(has_spread(combined_rewards(config, [group])).item())
