"""Partial rollouts: completions that are sampled over several steps, from newer weights each time.

A step samples at most `sampler.segment_tokens` tokens of each completion. Long completions then hold up no step: they
are continued in the next one (Kimi k1.5, arXiv 2501.12599, section 2.6.2). Every step begins groups for
`prompts_per_step` problems, and learns from as many whose completions are all finished, the oldest first.

No token is learned from more than `max_staleness` updates after it was sampled, since
- a completion has `max_segments` segments at most: one that is not finished then is truncated;
- so all groups that began in one step are finished in the step of their last segment, and they are no more than a step
  learns from: with the older ones gone, as those were in the step before, all of them are learned from in that step.

Shape suffixes as in objective.py: P prompts, G completions per prompt.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from torch.profiler import record_function

from components.rollout.sampler import Completion
from components.shared.problem import Problem
from components.train_grpo.prefetched_rollouts import begin, known
from components.train_grpo.rollouts import Rollout, Rollouts, with_version
from components.train_grpo.scoring import Group


@dataclass(frozen=True)
class PartialGroup:
    """A problem whose completions are in flight, or finished and not learned from yet."""

    number: int
    """The place of the problem among all of the run, which is the order of age."""
    problem: Problem
    completions_G: tuple[Completion, ...] = ()
    """What is sampled so far; empty before the first segment, and again when they are finished and scored."""
    scored: Group | None = None
    """All completions with their rewards, once the last is finished."""

    @property
    def is_finished(self) -> bool:
        """Whether no completion goes on in another segment."""
        return bool(self.completions_G) and not any(each.paused for each in self.completions_G)


Segment = tuple[list[PartialGroup], float, float]
"""Groups in flight of this process, each with what it has sampled in a step, and the time for sampling and scoring."""
_PARTIAL_GROUPS = TypeAdapter(list[PartialGroup])
"""Turns groups into numbers, text, lists and dicts for a checkpoint, and back."""


@dataclass
class PartialRollouts(Rollouts):
    """Rollouts of completions that are sampled over several steps."""

    _groups: list[PartialGroup] = field(default_factory=list, init=False)
    """Groups of this process that nothing is sampled for now: finished ones, and all between two segments."""
    _segment: "Future[Segment] | None" = field(default=None, init=False)
    """The segment that is sampled ahead."""

    def of_step(self, step: int) -> Rollout:
        """Return the rollout to learn from: fewer groups than `prompts_per_step` until the first long ones finish."""
        with self.memory():
            segment, sync_s = self._segment, 0.0
            if segment is None:
                sync_s = self.sampler.update_weights(step - 1)
                segment = self._begin_segment(step, version=step - 1)
            groups, sampling_s, scoring_s = segment.result()
            self._groups, self._segment = self._groups + groups, None
            rollout = self._take_finished()
            if self.config.sampler.samples_ahead and step < self.config.num_steps:
                # The gathering above has waited for all processes: nothing is sampled while the weights change.
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
        """Return the place in the order of prompts and all groups that are not learned from yet, as plain values."""
        groups = self._groups + (self._segment.result()[0] if self._segment else [])
        own = _PARTIAL_GROUPS.dump_python(groups, mode="json")
        of_ranks = self.ranks.all_gather(own, "the end of prefetching")
        return {**super().state(), "groups_of_ranks": of_ranks, "is_ahead": self._segment is not None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; with as many processes as then, each has the groups it had."""
        super().restore(state)
        of_ranks = state["groups_of_ranks"]
        same = len(of_ranks) == self.ranks.world_size
        every = [group for groups in of_ranks for group in groups]
        groups = _PARTIAL_GROUPS.validate_python(of_ranks[self.ranks.rank] if same else self.ranks.shard(every))
        if state["is_ahead"]:
            self._segment = known((groups, 0.0, 0.0))
        else:
            self._groups = groups

    def _begin_segment(self, step: int, *, version: int) -> "Future[Segment]":
        """Begin another segment of the groups in flight in this process, and of the new groups of a step."""
        count = self.config.prompts_per_step
        numbered = list(enumerate(self.prompts.next_batch(count), start=count * (step - 1)))
        in_flight = [group for group in self._groups if group.scored is None]
        in_flight += [PartialGroup(number, problem) for number, problem in self.ranks.shard(numbered)]
        self._groups = [group for group in self._groups if group.scored is not None]
        sample = partial(self._sample_segment, in_flight, self._seed(f"step {step}", 0), version)
        return begin(sample, ahead=self.config.sampler.samples_ahead)

    def _sample_segment(self, groups: Sequence[PartialGroup], seed: int, version: int) -> Segment:
        """Return groups after another segment, from the weights after `version` updates; score those that finish."""
        started = time.monotonic()
        sampling = replace(self.sampling(seed), segment_tokens=self.config.sampler.segment_tokens)
        partial_PG = [group.completions_G for group in groups]
        with record_function("sampling"):
            completions_PG = self.sampler.generate([group.problem for group in groups], sampling, partial_PG)
        completions_PG = with_version(completions_PG, version, partial_PG)
        sampled = time.monotonic()
        after = [
            replace(group, completions_G=tuple(completions_G))
            for group, completions_G in zip(groups, completions_PG, strict=True)
        ]
        finished = [group for group in after if group.is_finished]
        with record_function("scoring"), self._scoring:
            scored = self.score([each.problem for each in finished], [each.completions_G for each in finished])
        numbered = {each.number: group for each, group in zip(finished, scored, strict=True)}
        after = [
            replace(each, completions_G=(), scored=numbered[each.number]) if each.number in numbered else each
            for each in after
        ]
        return after, sampled - started, time.monotonic() - sampled

    def _take_finished(self) -> Rollout:
        """Return the oldest groups of all processes that are finished, and keep the others."""
        finished = {group.number: group.scored for group in self._groups if group.scored is not None}
        of_ranks = self.ranks.all_gather((list(finished), len(self._groups)), "the end of sampling")
        chosen = sorted(number for numbers, _ in of_ranks for number in numbers)[: self.config.prompts_per_step]
        own = {number: group for number, group in finished.items() if number in chosen}
        taken: dict[int, Group] = {}
        for of_rank in self.ranks.all_gather(own, "the end of scoring"):
            taken |= of_rank
        self._groups = [group for group in self._groups if group.number not in taken]
        groups = self._recorded([taken[number] for number in chosen])
        in_flight = sum(count for _, count in of_ranks) - len(chosen)
        return Rollout(groups, groups, 0.0, 0.0, groups_in_flight=in_flight)
