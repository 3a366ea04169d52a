"""The problems of each rollout: shares of sources, passes or a curriculum within each, resumable exactly.

Every shuffle and every weighted choice has its own stream of random numbers, made from the seed and a number. The place
in the sequence is therefore a few counters and pass rates.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.train_grpo.config import CurriculumConfig, PromptsConfig

_ALL = "all"
"""The one pool of problems where sources have no weights."""
_UNTRIED = 0.5
"""The pass rate assumed of a problem before it is tried: the one with the most to learn from."""


def learning_signal(pass_rate: float) -> float:
    """Return 4 p (1 - p), the variance of a pass-or-fail reward: 0 where all or none pass, 1 where half do.

    Preferring problems by this variance is proposed in https://arxiv.org/abs/2502.12272.
    """
    return 4 * pass_rate * (1 - pass_rate)


class Prompts:
    """The batches of problems, in an order that can be resumed exactly.

    Without source weights all problems are one pool; with them each source is a pool, and has exactly its share of the
    problems over time. Within a pool there are passes, every problem once in each, in a new order; or, with a
    curriculum, random choices weighted by `learning_signal` of the running pass rates.
    """

    def __init__(self, problems: Sequence[Problem], config: PromptsConfig, *, seed: int) -> None:
        weights = config.source_weights
        self._problems = {problem.id: problem for problem in problems}
        self._pool_of = {problem.id: problem.source if weights else _ALL for problem in problems}
        self._shares = _shares(weights, self._pool_of.values()) if weights else {_ALL: Fraction(1)}
        self._pools: dict[str, _Passes | _Curriculum] = {}
        for name in self._shares:
            ids, stream = [each for each, pool in self._pool_of.items() if pool == name], f"{seed}/{name}"
            curriculum = config.curriculum
            self._pools[name] = _Curriculum(ids, stream, curriculum) if curriculum else _Passes(ids, stream)
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
        pools = self._apportion(count)
        ids = {name: iter(pool.next_ids(pools.count(name))) for name, pool in self._pools.items()}
        return [self._problems[next(ids[name])] for name in pools]

    def record(self, problem_id: str, *, num_right: int, num_scored: int) -> None:
        """Record how many of a problem's scored completions are right, for the curriculum if there is one."""
        pool = self._pools[self._pool_of[problem_id]]
        if num_scored and isinstance(pool, _Curriculum):
            pool.record(problem_id, num_right / num_scored)

    def state(self) -> dict[str, Any]:
        """Return everything that the next batches depend on beside problems, config and seed, as plain JSON values."""
        pools = {name: {key: copy(vars(pool)[key]) for key in pool.saved} for name, pool in self._pools.items()}
        return {"num_sampled": dict(self._num_sampled), "pools": pools}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with the same problems, config and seed."""
        self._num_sampled = Counter(state["num_sampled"])
        for name, pool in self._pools.items():
            self._pools[name] = replace(pool, **{key: copy(state["pools"][name][key]) for key in pool.saved})

    def _apportion(self, count: int) -> list[str]:
        """Return the pool of each problem of a batch: always the one that is furthest behind its share.

        So none gets more than a problem ahead of its share, unless all problems of another are in the batch already.
        """
        most = {name: self._num_sampled[name] + len(pool.ids) for name, pool in self._pools.items()}
        first = self._num_sampled.total() + 1
        pools: list[str] = []
        for total in range(first, first + count):
            behind = {
                name: share * total - self._num_sampled[name]
                for name, share in self._shares.items()
                if self._num_sampled[name] < most[name]
            }
            pools.append(max(behind, key=behind.__getitem__))
            self._num_sampled[pools[-1]] += 1
        return pools


@dataclass
class _Passes:
    """Passes over the problems of a pool, every problem once in each."""

    ids: Sequence[str]
    stream: str
    num_seen: int = 0
    deferred: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list, init=False)
    """That of the current pass; empty where it has to be made again."""
    saved: ClassVar = ("num_seen", "deferred")

    def next_ids(self, count: int) -> list[str]:
        """Return the next ids, all different.

        Where a pass ends within the batch, the next pass may repeat an id of the batch: that one is deferred to the
        beginning of the next batch.
        """
        batch = dict.fromkeys(self.deferred[:count])
        deferred = self.deferred[count:]
        while len(batch) < count:
            number, place = divmod(self.num_seen, len(self.ids))
            if not self.order or place == 0:
                self.order = random.Random(f"{self.stream}/{number}").sample(self.ids, len(self.ids))
            self.num_seen += 1
            if self.order[place] in batch:
                deferred.append(self.order[place])
            batch[self.order[place]] = None
        self.deferred = deferred
        return list(batch)


@dataclass
class _Curriculum:
    """Weighted random choices from a pool: problems whose completions disagree are chosen more often, none never."""

    ids: Sequence[str]
    stream: str
    config: CurriculumConfig
    num_batches: int = 0
    pass_rates: dict[str, float] = field(default_factory=dict)
    saved: ClassVar = ("num_batches", "pass_rates")

    def next_ids(self, count: int) -> list[str]:
        """Return different ids, each chosen with a probability proportional to its weight among those left.

        That is the order in which independent exponential clocks ring whose rates are the weights (Efraimidis and
        Spirakis, https://arxiv.org/abs/1012.0256).
        """
        clock = random.Random(f"{self.stream}/{self.num_batches}")
        self.num_batches += 1
        signals = {problem_id: learning_signal(self.pass_rates.get(problem_id, _UNTRIED)) for problem_id in self.ids}
        times = {name: clock.expovariate(max(self.config.floor, signal)) for name, signal in signals.items()}
        return heapq.nsmallest(count, times, key=times.__getitem__)

    def record(self, problem_id: str, measured: float) -> None:
        """Update the running pass rate; the first measurement replaces the assumed one."""
        before = self.pass_rates.get(problem_id, measured)
        self.pass_rates[problem_id] = before + (1 - self.config.memory) * (measured - before)


def _shares(weights: Mapping[str, float], sources: Iterable[str]) -> dict[str, Fraction]:
    """Return the exact shares of the sources with a weight, in an order that does not depend on the params file."""
    present = set(sources)
    if set(weights) != present:
        raise PipelineError(
            f"train_grpo.prompts.source_weights: there are weights for {', '.join(sorted(weights))}, but problems from "
            f"{', '.join(sorted(present))}; give each of these sources a weight (0 leaves it out), and no other"
        )
    if not any(weights.values()):
        raise PipelineError(f"train_grpo.prompts.source_weights: {dict(weights)}: at least one must be above 0")
    exact = {source: Fraction(str(weights[source])) for source in sorted(weights) if weights[source]}
    return {source: weight / sum(exact.values()) for source, weight in exact.items()}
