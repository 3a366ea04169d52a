"""Rollouts that are sampled before the preceding updates are done (`sampler.max_staleness`)."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from components.train_grpo.rollouts import Rollout, Rollouts
from components.train_grpo.scoring import Group
from components.train_grpo.slow_rewards import in_thread

_GROUPS = TypeAdapter(list[Group])
"""Turns groups into numbers, text, lists and dicts for a checkpoint, and back."""


@dataclass
class PrefetchedRollouts(Rollouts):
    """Samples rollouts from weights that are up to `max_staleness` updates old when they are learned from."""

    _ahead: deque[Callable[[], Rollout]] = field(default_factory=deque, init=False)
    """Functions that wait for this process's shards of the rollouts of the next steps, in order, and return them."""

    def of_step(self, step: int) -> Rollout:
        """Return the rollout that a step learns from; every `max_staleness` steps, begin the next rollouts.

        The sampler then gets the newest weights and begins the rollouts of the next `max_staleness` steps; the last of
        them is that many updates old when it is learned from. Servers sample all of them at once while the policy
        learns, so that the longest completions of one rollout do not delay the others.
        """
        with self.memory_for_rollout():
            staleness, sync_s = self.config.sampler.max_staleness, 0.0
            first_missing = step + len(self._ahead)  # nothing is ahead in the first step, whose own rollout is missing
            last = min(step + staleness, self.config.num_steps)
            if first_missing <= last and (step - 1) % staleness == 0:
                # All processes share the servers: none may send weights while another still samples.
                self.finish_prefetch()
                sync_s = self.sampler.update_weights(step - 1)
                missing = range(first_missing, last + 1)
                self._ahead += [self._begin(each, version=step - 1) for each in missing]
                self.sampler.sleep()
            wait_for_shard = self._ahead.popleft()
            shard = wait_for_shard()
            groups = self._gather(shard.sampled)
            return Rollout(groups, groups, shard.sampling_s, shard.scoring_s, sync_s)

    def finish_prefetch(self) -> None:
        """See `Rollouts`."""
        if self._ahead:
            for wait_for_shard in self._ahead:
                wait_for_shard()
            self.ranks.barrier("the end of prefetching")

    def state(self) -> dict[str, Any]:
        """Return the position in the order of prompts and all processes' rollouts that are sampled ahead."""
        own_shards = [_GROUPS.dump_python(wait_for_shard().sampled, mode="json") for wait_for_shard in self._ahead]
        of_ranks = self.ranks.all_gather(own_shards, "the end of prefetching")
        # From a list of rollouts per process to one list of rollouts, each with the groups of all processes.
        ahead = [[group for shard in shards for group in shard] for shards in zip(*of_ranks, strict=True)]
        return {**super().state(), "ahead": ahead}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        for groups_P in state["ahead"]:
            groups = _GROUPS.validate_python(self.ranks.shard(groups_P))
            self._ahead.append(partial(Rollout, groups, groups, sampling_s=0.0, scoring_s=0.0))

    def _begin(self, step: int, *, version: int) -> Callable[[], Rollout]:
        """Sample this process's shard of the rollout of a step: in a thread if servers sample, else at once."""
        problems_P = self.ranks.shard(self.prompts.next_batch(self.config.prompts_per_step))
        sample = partial(self._sample_shard, problems_P, self._seed(f"step {step}", 0), version)
        if self.config.sampler.samples_ahead:
            return in_thread(sample).result
        shard = sample()
        return lambda: shard
