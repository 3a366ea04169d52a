"""The problems of each rollout: shares of sources, passes within each, resumable exactly.

Every shuffle has its own random generator, seeded by the config's seed and the number of the pass. The position in the
sequence is therefore a few counters and the problems that are left out or deferred.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.train_grpo.config import PromptsConfig

_ALL = "all"
"""Name of the only pool of problems if sources have no weights."""


class Prompts:
    """The batches of problems, in an order that can be resumed exactly.

    Without source weights all problems are one pool. With them each source is a pool, and over time has exactly its
    share of the problems. A pass over a pool has every problem once, in a new random order. With a maximum pass rate,
    later passes leave out the solved problems: ScaleRL's no-positive resampling (arXiv 2510.13786).
    """

    def __init__(self, problems: Sequence[Problem], config: PromptsConfig, *, seed: int) -> None:
        weights = config.source_weights
        self._problems = {problem.id: problem for problem in problems}
        self._pool_of = {problem.id: problem.source if weights else _ALL for problem in problems}
        self._shares = _shares(weights, self._pool_of.values()) if weights else {_ALL: Fraction(1)}
        self._max_pass_rate = config.max_pass_rate
        self._pools = {
            name: _Passes([each for each, pool in self._pool_of.items() if pool == name], f"{seed}/{name}")
            for name in self._shares
        }
        self._num_sampled = Counter(dict.fromkeys(self._pools, 0))

    def next_batch(self, count: int) -> list[Problem]:
        """Return the next `count` problems, all different; PipelineError if the pools have too few."""
        sizes = {name: len(pool.ids) for name, pool in self._pools.items()}
        if count > sum(sizes.values()):
            raise PipelineError(
                f"train_grpo.prompts_per_step is {count}, but there are only {sum(sizes.values())} problems to sample"
            )
        for name, share in self._shares.items():
            if share * count > sizes[name]:
                raise PipelineError(
                    f"train_grpo.prompts.source_weights: {float(share * count):g} of prompts_per_step = {count} have "
                    f"to come from `{name}`, which has only {sizes[name]} problems"
                )
        names = self._next_pools(count)
        ids = {name: iter(pool.next_ids(names.count(name))) for name, pool in self._pools.items()}
        return [self._problems[next(ids[name])] for name in names]

    def record(self, problem_id: str, *, num_right: int, num_scored: int) -> None:
        """Record how many of a problem's scored completions are right; later passes leave out solved problems."""
        if num_scored and self._max_pass_rate is not None:
            is_solved = num_right >= self._max_pass_rate * num_scored
            self._pools[self._pool_of[problem_id]].record(problem_id, is_solved=is_solved)

    def state(self) -> dict[str, Any]:
        """Return everything that the next batches depend on besides problems, config and seed, as plain JSON values."""
        pools = {name: {key: copy(vars(pool)[key]) for key in pool.saved} for name, pool in self._pools.items()}
        return {"num_sampled": dict(self._num_sampled), "pools": pools}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, with the same problems, config and seed."""
        self._num_sampled = Counter(state["num_sampled"])
        for name, pool in self._pools.items():
            self._pools[name] = replace(pool, **{key: copy(state["pools"][name][key]) for key in pool.saved})

    def _next_pools(self, count: int) -> list[str]:
        """Return the pool of each problem of a batch: each time the one that is furthest behind its share."""
        # A batch has different problems: from a pool, at most as many as it has.
        limits = {name: self._num_sampled[name] + len(pool.ids) for name, pool in self._pools.items()}
        first = self._num_sampled.total() + 1
        names: list[str] = []
        for total in range(first, first + count):
            deficits = {
                name: share * total - self._num_sampled[name]
                for name, share in self._shares.items()
                if self._num_sampled[name] < limits[name]
            }
            names.append(max(deficits, key=deficits.__getitem__))
            self._num_sampled[names[-1]] += 1
        return names


@dataclass
class _Passes:
    """Passes over a pool: each has every problem once, except those that were solved before it began."""

    ids: Sequence[str]
    seed: str
    number: int = 0
    """Number of the current pass."""
    place: int = 0
    """Problems of the current pass that have been returned or deferred."""
    left_out: list[str] = field(default_factory=list)
    """Problems that the current pass leaves out."""
    solved: list[str] = field(default_factory=list)
    """Problems that the next pass leaves out."""
    deferred: list[str] = field(default_factory=list)
    """Problems that the next batch begins with, see `next_ids`."""
    order: list[str] = field(default_factory=list, init=False)
    """Order of the current pass; empty until it is needed, as after `Prompts.restore`."""
    saved: ClassVar = ("number", "place", "left_out", "solved", "deferred")

    def next_ids(self, count: int) -> list[str]:
        """Return the next ids, all different.

        If a pass ends within the batch, the next pass may repeat an id: then the next batch begins with it.
        """
        batch = dict.fromkeys(self.deferred[:count])  # a dictionary as an ordered set
        deferred = self.deferred[count:]
        while len(batch) < count:
            if self.place == len(self.ids) - len(self.left_out):
                self._begin_pass(count)
            if not self.order:
                left_out = set(self.left_out)
                included = [id_ for id_ in self.ids if id_ not in left_out]
                self.order = random.Random(f"{self.seed}/{self.number}").sample(included, len(included))
            id_ = self.order[self.place]
            self.place += 1
            if id_ in batch:
                deferred.append(id_)
            batch[id_] = None
        self.deferred = deferred
        return list(batch)

    def _begin_pass(self, count: int) -> None:
        """Begin a pass over the unsolved problems, or over all of them if too few are left for a batch."""
        if len(self.ids) - len(self.solved) < count:
            self.solved = []
        self.number += 1
        self.place, self.left_out, self.order = 0, list(self.solved), []

    def record(self, problem_id: str, *, is_solved: bool) -> None:
        """Leave a problem out of later passes if it is solved; take it back if it no longer is."""
        if is_solved and problem_id not in self.solved:
            self.solved.append(problem_id)
        elif not is_solved and problem_id in self.solved:
            self.solved.remove(problem_id)


def _shares(weights: Mapping[str, float], sources: Iterable[str]) -> dict[str, Fraction]:
    """Return the exact shares of the sources whose weight is above 0, sorted: the params file's order has no effect."""
    sources = set(sources)
    if set(weights) != sources:
        raise PipelineError(
            f"train_grpo.prompts.source_weights: there are weights for {', '.join(sorted(weights))}, but problems from "
            f"{', '.join(sorted(sources))}; give each of these sources a weight (0 leaves it out), and no other"
        )
    exact = {source: Fraction(str(weights[source])) for source in sorted(weights) if weights[source]}
    return {source: weight / sum(exact.values()) for source, weight in exact.items()}
