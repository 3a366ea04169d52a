"""Rollouts: prompts, a group of completions for each, and their rewards, as a policy update needs them.

Shape suffixes as in objective.py: P prompts, G completions per prompt, B all of them, K steps of a prompt's group.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.profiler import record_function

from components.policy.parallel import Ranks
from components.rollout.sampler import Completion, Sampler, Sampling
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.objective import has_spread
from components.train_grpo.prompts import Prompts
from components.train_grpo.rewards import Group

Score = Callable[[Sequence[Problem], Sequence[Sequence[Completion]]], list[Group]]
"""From problems (P,) and the completions of each (P, G) to these completions with their rewards: see `Scorer`."""
_GROUPS = TypeAdapter(list[Group])
"""Turns groups into numbers, text, lists and dicts for a checkpoint, and back."""
_GROUPS.rebuild(_types_namespace={"Completion": Completion})  # rewards.py cannot import it, with torch


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


@dataclass
class Rollouts:
    """Samples the rollouts of a run; with `sampler.overlap` each one while the policy learns from the one before."""

    config: TrainGRPOConfig
    prompts: Prompts
    sampler: Sampler
    score: Score
    ranks: Ranks
    _prefetched: Future[Rollout] | None = field(default=None, init=False)

    def of_step(self, step: int) -> Rollout:
        """Return the rollout to learn from."""
        with self.memory():
            if self.config.sampler.overlap:
                return self._overlapped(step)
            sync_s = self.sampler.update_weights(step - 1)
            rollout = self.sample(f"step {step}")
            self.sampler.sleep()
            rollout.sync_s = sync_s
            return rollout

    def of_reference(self, number: int) -> Rollout:
        """Return a rollout from before the first step, for the reward model to learn from."""
        with self.memory():
            self.sampler.update_weights(0)
            return self.sample(f"initial {number}")

    def sample(self, name: str) -> Rollout:
        """Sample and score a group for each of a batch of problems, with random numbers that depend on `name`.

        Every process samples and scores its shard of the problems, and gets all groups. Zero-variance groups teach
        nothing: with dynamic sampling (DAPO, section 3.2) they are replaced by groups of further problems, for a
        bounded number of rounds, the first in the order of their prompts where there are more than are missing. What is
        then missing stays missing, and the loss is divided by what is there.
        """
        rollout = Rollout([], [], 0.0, 0.0)
        max_rounds, wanted = self.config.prompts.max_resampling_rounds, self.config.prompts_per_step
        for round_ in range(max_rounds + 1):
            missing = wanted - len(rollout.trained)
            if not missing:
                break
            count = min(math.ceil(missing * self.config.prompts.oversampling), wanted)
            shard = self._sample_shard(self.ranks.shard(self.prompts.next_batch(count)), self._seed(name, round_))
            groups_P = self._gather(shard.sampled)
            rollout.sampled += groups_P
            usable = [group for group in groups_P if not max_rounds or differs(self.config, group)]
            # None of the surplus is for the next step: the policy would have moved on.
            rollout.trained += usable[:missing]
            rollout.sampling_s += shard.sampling_s
            rollout.scoring_s += shard.scoring_s
        return rollout

    def finish_prefetch(self) -> None:
        """Wait until all processes have sampled what they prefetch: the weights of the sampler may change then."""
        if self._prefetched is not None:
            self._prefetched.result()
            self.ranks.barrier("the end of prefetching")

    def state(self) -> dict[str, Any]:
        """Return the place in the order of prompts and any prefetched rollout, as plain values."""
        prefetched = None
        if self._prefetched is not None:
            shards = self.ranks.all_gather(self._prefetched.result().sampled, "the end of prefetching")
            prefetched = [group for groups in shards for group in _GROUPS.dump_python(groups, mode="json")]
        return {"prompts": self.prompts.state(), "prefetched": prefetched}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.prompts.restore(state["prompts"])
        if state["prefetched"] is not None:
            groups = _GROUPS.validate_python(self.ranks.shard(state["prefetched"]))
            self._prefetched = Future()
            self._prefetched.set_result(Rollout(groups, groups, 0.0, 0.0))

    def _overlapped(self, step: int) -> Rollout:
        """Take the prefetched rollout and begin the next: what is learned from is one update old (off-policy)."""
        if self._prefetched is None:
            self.sampler.update_weights(step - 1)
            self._prefetched = self._prefetch(step)
        # Weights that are sent to servers change for all: one process must not send them while another still samples.
        self.finish_prefetch()
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
        with record_function("sampling"):
            completions_PG = self.sampler.generate(problems_P, sampling)
        sampled = time.monotonic()
        with record_function("scoring"):
            groups = self.score(problems_P, completions_PG)
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

    def memory(self) -> AbstractContextManager[None]:
        """Name the keys that lower the memory for sampling or scoring where it runs out."""
        sampling, sampler = self.config.sampling, self.config.sampler
        remedies = [f"lower train_grpo.sampling.max_new_tokens (it is {sampling.max_new_tokens})"]
        if sampler.vllm:
            remedies.insert(0, f"lower train_grpo.sampler.vllm.cache_gib (it is {sampler.vllm.cache_gib:g})")
        elif not sampler.servers:
            remedies.insert(0, f"lower train_grpo.sampling.max_batch_size (it is {sampling.max_batch_size})")
        return explain_out_of_memory("the rollout", *remedies)


def reward_tensors(config: TrainGRPOConfig, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return what is normalised, each (P, K): the weighted sum of all rewards, or each of them on its own.

    The steps of each group's completions are laid end to end. A reward that a problem's source has not is NaN.
    """

    def padded(of_groups: Sequence[Sequence[Sequence[float]]]) -> Tensor:
        rows = [torch.tensor([x for steps in group for x in steps], dtype=torch.float64) for group in of_groups]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)

    if config.reward.combination == "before_normalisation":
        weights_P = [config.reward.weights_of(group.problem.source) for group in groups]
        pairs = zip(groups, weights_P, strict=True)
        return {
            "combined": padded([[scored.combined(weights) for scored in group.scored_G] for group, weights in pairs])
        }
    return {
        name: padded([[scored.rewards.get(name, (math.nan,)) for scored in group.scored_G] for group in groups])
        for name in config.reward.names
    }


def differs(config: TrainGRPOConfig, group: Group) -> bool:
    """Return whether a group's rewards differ, so that there is something to learn from it."""
    return any(bool(has_spread(rewards_PK).item()) for rewards_PK in reward_tensors(config, [group]).values())
