"""Rollouts that are sampled ahead of the updates before them, for `sampler.max_staleness`."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter

from components.train_grpo.rollouts import Rollout, Rollouts
from components.train_grpo.scoring import Group
from components.train_grpo.slow_rewards import in_thread

_T = TypeVar("_T")
_GROUPS = TypeAdapter(list[Group])
"""Turns groups into numbers, text, lists and dicts for a checkpoint, and back."""


@dataclass
class PrefetchedRollouts(Rollouts):
    """Samples rollouts from weights that are up to `max_staleness` updates old when they are learned from."""

    _ahead: "deque[Future[Rollout]]" = field(default_factory=deque, init=False)
    """This process's part of the rollouts of the next steps, in their order."""

    def of_step(self, step: int) -> Rollout:
        """Take the rollout of a step from those that are sampled ahead, and begin the next where they are due.

        Every `max_staleness` steps the sampler gets the newest weights and begins as many rollouts from them, those of
        the next steps: the last of them is learned from that many updates later. Servers sample them all together while
        the policy learns, so that the longest completions of one hold up nothing else.
        """
        with self.memory():
            staleness, sync_s = self.config.sampler.max_staleness, 0.0
            last = min(step + staleness, self.config.num_steps)
            due = range(step + len(self._ahead), last + 1)  # in the first step, its own as well
            if due and (step - 1) % staleness == 0:
                # Weights that are sent to servers change for all: one process must not send them while another samples.
                self.finish_prefetch()
                sync_s = self.sampler.update_weights(step - 1)
                self._ahead += [self._begin(later, version=step - 1) for later in due]
                self.sampler.sleep()
            shard = self._ahead.popleft().result()
            groups = self._gather(shard.sampled)
            return Rollout(groups, groups, shard.sampling_s, shard.scoring_s, sync_s)

    def finish_prefetch(self) -> None:
        """See `Rollouts`."""
        if self._ahead:
            for rollout in self._ahead:
                rollout.result()
            self.ranks.barrier("the end of prefetching")

    def state(self) -> dict[str, Any]:
        """Return the place in the order of prompts and the rollouts that are sampled ahead, those of all processes."""
        own = [_GROUPS.dump_python(rollout.result().sampled, mode="json") for rollout in self._ahead]
        of_ranks = self.ranks.all_gather(own, "the end of prefetching")
        # Of each rollout the groups of all processes, in the order of their prompts.
        ahead = [[group for part in parts for group in part] for parts in zip(*of_ranks, strict=True)]
        return {**super().state(), "ahead": ahead}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        for groups_P in state["ahead"]:
            groups = _GROUPS.validate_python(self.ranks.shard(groups_P))
            self._ahead.append(known(Rollout(groups, groups, 0.0, 0.0)))

    def _begin(self, step: int, *, version: int) -> "Future[Rollout]":
        """Begin this process's part of the rollout of a step: in a thread if servers sample, else sample it now."""
        problems_P = self.ranks.shard(self.prompts.next_batch(self.config.prompts_per_step))
        return begin(
            partial(self._sample_shard, problems_P, self._seed(f"step {step}", 0), version),
            ahead=self.config.sampler.samples_ahead,
        )


def begin(sample: Callable[[], _T], *, ahead: bool) -> "Future[_T]":
    """Return the future result of sampling ahead in a thread, or the result of sampling now."""
    if ahead:
        return in_thread(sample)
    return known(sample())


def known(result: _T) -> "Future[_T]":
    """Return a future that has its result."""
    future: Future[_T] = Future()
    future.set_result(result)
    return future
