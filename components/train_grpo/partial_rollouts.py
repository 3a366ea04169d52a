"""Partial rollouts: completions that are sampled over several steps, from newer weights each time.

A step samples at most `sampler.segment_tokens` tokens of each completion. Long completions then hold up no step: they
are continued in the next one (Kimi k1.5, arXiv 2501.12599, section 2.6.2). Every step begins groups for
`prompts_per_step` problems, and learns from as many whose completions are all finished, the oldest first.

No token is learned from more than `max_staleness` updates after it was sampled:
- A completion has at most `max_segments` segments, and is truncated if it is not finished then. So all groups that
  began in the same step are finished when they have had their last segment.
- They are `prompts_per_step` groups, as many as a step learns from. All older groups were learned from in the steps
  before, for the same reason, so that step learns from all of these.

Shape suffixes as in objective.py: P prompts, G completions per prompt.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from torch.profiler import record_function

from components.rollout.sampler import Completion
from components.shared.problem import Problem
from components.train_grpo.prefetched_rollouts import begin, completed_future
from components.train_grpo.rollouts import Rollout, Rollouts, with_version
from components.train_grpo.scoring import Group


@dataclass(frozen=True)
class PartialGroup:
    """A problem whose completions are in flight, or finished and not learned from yet."""

    number: int
    """Number of the problem in the run, by which the oldest groups are found."""
    problem: Problem
    completions_G: tuple[Completion, ...] = ()
    """What is sampled so far; empty before the first segment, and again once they are in `scored`."""
    scored: Group | None = None
    """All completions with their rewards, once the last is finished."""

    @property
    def is_finished(self) -> bool:
        """Whether all completions are sampled to their ends, and not scored yet."""
        return bool(self.completions_G) and not any(each.paused for each in self.completions_G)


Segment = tuple[list[PartialGroup], float, float]
"""This process's groups after another segment, scored if they finished, and the seconds of sampling and scoring."""
_PARTIAL_GROUPS = TypeAdapter(list[PartialGroup])
"""Turns groups into numbers, text, lists and dicts for a checkpoint, and back."""


@dataclass
class PartialRollouts(Rollouts):
    """Rollouts of completions that are sampled over several steps."""

    _groups: list[PartialGroup] = field(default_factory=list, init=False)
    """All groups of this process that are not learned from yet, except those in `_segment`."""
    _segment: "Future[Segment] | None" = field(default=None, init=False)
    """The segment of the next step, if it is sampled ahead."""

    def of_step(self, step: int) -> Rollout:
        """Return the rollout that a step learns from: fewer than `prompts_per_step` groups until long ones finish."""
        with self.memory_for_rollout():
            segment, sync_s = self._segment, 0.0
            if segment is None:
                sync_s = self.sampler.update_weights(step - 1)
                segment = self._begin_segment(step, version=step - 1)
            groups, sampling_s, scoring_s = segment.result()
            self._groups, self._segment = self._groups + groups, None
            rollout = self._take_finished()
            if self.config.sampler.samples_ahead and step < self.config.num_steps:
                # `_take_finished` has waited for all processes, so none samples while the weights change.
                sync_s += self.sampler.update_weights(step - 1)
                self._segment = self._begin_segment(step + 1, version=step - 1)
            self.sampler.sleep()
            return replace(rollout, sampling_s=sampling_s, scoring_s=scoring_s, sync_s=sync_s)

    def finish_prefetch(self) -> None:
        """See `Rollouts`."""
        if self._segment is not None:
            self._segment.result()
            self.ranks.barrier("the end of prefetching")

    def state(self) -> dict[str, Any]:
        """Return the position in the order of prompts and all groups not learned from yet, as plain values."""
        groups = self._groups + (self._segment.result()[0] if self._segment else [])
        own = _PARTIAL_GROUPS.dump_python(groups, mode="json")
        of_ranks = self.ranks.all_gather(own, "the end of prefetching")
        return {**super().state(), "groups_of_ranks": of_ranks, "is_ahead": self._segment is not None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; if the number of processes is the same, each keeps its own groups."""
        super().restore(state)
        of_ranks = state["groups_of_ranks"]
        if len(of_ranks) == self.ranks.world_size:
            own = of_ranks[self.ranks.rank]
        else:
            own = self.ranks.shard([group for groups in of_ranks for group in groups])
        groups = _PARTIAL_GROUPS.validate_python(own)
        if state["is_ahead"]:
            self._segment = completed_future((groups, 0.0, 0.0))
        else:
            self._groups = groups

    def _begin_segment(self, step: int, *, version: int) -> "Future[Segment]":
        """Begin another segment of this process's unscored groups, and of its shard of a step's new groups."""
        count = self.config.prompts_per_step
        numbered = list(enumerate(self.prompts.next_batch(count), start=count * (step - 1)))
        unscored = [group for group in self._groups if group.scored is None]
        unscored += [PartialGroup(number, problem) for number, problem in self.ranks.shard(numbered)]
        self._groups = [group for group in self._groups if group.scored is not None]
        sample = partial(self._sample_segment, unscored, self._seed(f"step {step}", 0), version)
        return begin(sample, ahead=self.config.sampler.samples_ahead)

    def _sample_segment(self, groups: list[PartialGroup], seed: int, version: int) -> Segment:
        """Return groups after another segment, from the weights after `version` updates; score those that finish."""
        sampling_began = time.monotonic()
        sampling = replace(self.sampling(seed), segment_tokens=self.config.sampler.segment_tokens)
        partial_PG = [group.completions_G for group in groups]
        with record_function("sampling"):
            completions_PG = self.sampler.generate([group.problem for group in groups], sampling, partial_PG)
        completions_PG = with_version(completions_PG, version, partial_PG)
        scoring_began = time.monotonic()
        pairs = zip(groups, completions_PG, strict=True)
        groups = [replace(group, completions_G=tuple(completions_G)) for group, completions_G in pairs]
        finished = [group for group in groups if group.is_finished]
        with record_function("scoring"), self._scoring_lock:
            scored = iter(self.score([each.problem for each in finished], [each.completions_G for each in finished]))
        groups = [replace(each, completions_G=(), scored=next(scored)) if each.is_finished else each for each in groups]
        return groups, scoring_began - sampling_began, time.monotonic() - scoring_began

    def _take_finished(self) -> Rollout:
        """Return the oldest scored groups of all processes, up to `prompts_per_step`, and keep the others."""
        scored = {group.number: group.scored for group in self._groups if group.scored is not None}
        # Groups are large: the processes exchange numbers first, then only the groups that the step learns from.
        of_ranks = self.ranks.all_gather((list(scored), len(self._groups)), "the end of sampling")
        chosen = sorted(number for numbers, _ in of_ranks for number in numbers)[: self.config.prompts_per_step]
        own = {number: group for number, group in scored.items() if number in chosen}
        taken: dict[int, Group] = {}
        for of_rank in self.ranks.all_gather(own, "the end of scoring"):
            taken |= of_rank
        self._groups = [group for group in self._groups if group.number not in taken]
        groups = [taken[number] for number in chosen]
        self._record_pass_rates(groups)
        in_flight = sum(count for _, count in of_ranks) - len(chosen)
        return Rollout(groups, groups, 0.0, 0.0, groups_in_flight=in_flight)
