"""Rollouts: prompts, a group of completions for each, and their rewards.

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
from components.rollout.sampler import Completion, Sampler, Sampling
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.objective import has_spread
from components.train_grpo.prompts import Prompts
from components.train_grpo.scoring import Group

Score = Callable[[Sequence[Problem], Sequence[Sequence[Completion]]], list[Group]]
"""Takes problems (P,) and the completions of each (P, G), and returns groups with rewards: see `Scorer`."""


@dataclass
class Rollout:
    """The groups of all processes for one step, and the time that this process spent on its own shard of them."""

    sampled: list[Group]
    """All groups, in the order they were sampled."""
    trained: list[Group]
    """The groups that the policy is updated on."""
    sampling_s: float
    scoring_s: float
    sync_s: float = 0.0
    """Time to update the weights of the sampler."""


@dataclass
class Rollouts:
    """Samples the rollouts of a run on-policy: each from the weights that learn from it.

    Here and in subclasses, the step number alone decides which weights sample a rollout, never time: a resumed run
    learns from the same rollouts as an uninterrupted one.
    """

    config: TrainGRPOConfig
    prompts: Prompts
    sampler: Sampler
    score: Score
    ranks: Ranks
    environments: Environments | None = None
    """Environments in which the policy acts; None for completions of one turn."""
    _scoring_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Custom rewards need not be thread-safe: rollouts that are sampled in threads are scored one after the other."""

    def of_step(self, step: int) -> Rollout:
        """Return the rollout that a step learns from."""
        with self.memory_for_rollout():
            sync_s = self.sampler.update_weights(step - 1)
            rollout = self.sample(f"step {step}", version=step - 1)
            self.sampler.sleep()
        rollout.sync_s = sync_s
        return rollout

    def of_reference(self, number: int) -> Rollout:
        """Return a rollout of the reference, from which the reward model learns before the first step."""
        with self.memory_for_rollout():
            self.sampler.update_weights(0)
            return self.sample(f"initial {number}", version=0)

    def sample(self, name: str, *, version: int) -> Rollout:
        """Sample and score a group for each of `prompts_per_step` problems, with a seed that depends on `name`.

        The sampler has the weights after `version` updates. Every process samples and scores its shard of the problems,
        and gets all groups. Zero-variance groups teach nothing: dynamic sampling (DAPO, section 3.2) replaces them by
        groups of further problems, in at most `max_resampling_rounds` rounds; `trained` may then have fewer groups.
        """
        rollout = Rollout([], [], 0.0, 0.0)
        max_rounds = self.config.prompts.max_resampling_rounds
        for round_ in range(max_rounds + 1):
            num_missing = self.config.prompts_per_step - len(rollout.trained)
            if num_missing == 0:
                break
            problems_P = self.ranks.shard(self.prompts.next_batch(num_missing))
            shard = self._sample_shard(problems_P, self._seed(name, round_), version)
            groups_P = self._gather(shard.sampled)
            rollout.sampled += groups_P
            keeps_all = max_rounds == 0
            rollout.trained += [group for group in groups_P if keeps_all or rewards_differ(self.config, group)]
            rollout.sampling_s += shard.sampling_s
            rollout.scoring_s += shard.scoring_s
        return rollout

    def finish_prefetch(self) -> None:
        """Wait until no process samples ahead, before the sampler's weights change; here, none does."""

    def state(self) -> dict[str, Any]:
        """Return as plain values what later rollouts depend on but the seed; all processes call it together."""
        return {"prompts": self.prompts.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.prompts.restore(state["prompts"])

    def _sample_shard(self, problems_P: Sequence[Problem], seed: int, version: int) -> Rollout:
        """Sample and score this process's shard of a rollout, from the weights after `version` updates."""
        sampling_began = time.monotonic()
        sampling = Sampling(
            num_samples=self.config.group_size,
            temperature=self.config.sampling.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=seed,
            environments=self.environments,
        )
        with record_function("sampling"):
            sampled_PG = self.sampler.generate(problems_P, sampling)
        completions_PG = [
            [replace(each, versions=(version,) * each.num_tokens) for each in group] for group in sampled_PG
        ]
        scoring_began = time.monotonic()
        with record_function("scoring"), self._scoring_lock:
            groups = self.score(problems_P, completions_PG)
        return Rollout(groups, groups, scoring_began - sampling_began, time.monotonic() - scoring_began)

    def _seed(self, name: str, round_: int) -> int:
        """Return the seed of a round of a rollout, a different one in each process."""
        suffix = f"/{self.ranks.rank}" if self.ranks.rank > 0 else ""
        return random.Random(f"{self.config.seed}/{name}/{round_}{suffix}").getrandbits(48)

    def _gather(self, groups: list[Group]) -> list[Group]:
        """Return the groups of all processes, and record their right answers in `prompts`."""
        shards = self.ranks.all_gather(groups, "the end of sampling")
        groups_P = [group for shard in shards for group in shard]
        for group in groups_P:
            self.prompts.record(group.problem.id, num_right=group.num_right, num_scored=group.num_scorable)
        return groups_P

    def memory_for_rollout(self) -> AbstractContextManager[None]:
        """Name the config keys to change if sampling or scoring in the block runs out of memory."""
        sampling, sampler = self.config.sampling, self.config.sampler
        remedies = [f"lower train_grpo.sampling.max_new_tokens (it is {sampling.max_new_tokens})"]
        if sampler.vllm:
            remedies.insert(0, f"lower train_grpo.sampler.vllm.cache_gib (it is {sampler.vllm.cache_gib:g})")
        elif not sampler.servers:
            remedies.insert(0, f"lower train_grpo.sampling.max_batch_size (it is {sampling.max_batch_size})")
        return explain_out_of_memory("the rollout", *remedies)


def combined_rewards(config: TrainGRPOConfig, groups: Sequence[Group]) -> Tensor:
    """Return the weighted sum of rewards of each step, (P, K): the steps of a group end to end, padded with NaN."""
    rewards_PK = []
    for group in groups:
        weights = config.reward.weights_of(group.problem.source)
        rewards_K = [reward for scored in group.scored_G for reward in scored.combined(weights)]
        rewards_PK.append(torch.tensor(rewards_K, dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(rewards_PK, batch_first=True, padding_value=torch.nan)


def rewards_differ(config: TrainGRPOConfig, group: Group) -> bool:
    """Return whether a group's rewards differ; the policy learns nothing from a group in which they are equal."""
    return bool(has_spread(combined_rewards(config, [group])).item())
