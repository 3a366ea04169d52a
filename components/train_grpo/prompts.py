"""The problems of each rollout: shares of sources, passes or a curriculum within each, resumable exactly.

Every shuffle and every weighted choice has its own stream of random numbers, made from the seed and a number. The place
in the sequence is therefore a few counters and pass rates.
"""

import hashlib
import heapq
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

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
        self._curriculum = config.curriculum
        self._pools = {name: self._pool(name, seed) for name in self._shares}
        self._num_sampled = Counter(dict.fromkeys(self._pools, 0))

    def next_batch(self, count: int) -> list[Problem]:
        """Return the next `count` problems, all different; PipelineError if the pools have too few."""
        self._require_enough(count)
        pools = self._apportion(count)
        ids = {name: iter(pool.next_ids(pools.count(name))) for name, pool in self._pools.items()}
        return [self._problems[next(ids[name])] for name in pools]

    def record(self, problem_id: str, *, num_right: int, num_scored: int) -> None:
        """Record how many of a problem's scored completions are right, for the curriculum if there is one."""
        pool = self._pools[self._pool_of[problem_id]]
        if num_scored and isinstance(pool, _Curriculum):
            pool.record(problem_id, num_right / num_scored)

    def state(self) -> dict[str, Any]:
        """Return everything that the next batches depend on beside problems and config, as plain JSON values."""
        return {
            "identity": self._identity(),
            "num_sampled": dict(self._num_sampled),
            "pools": {name: pool.state() for name, pool in self._pools.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with its seed; PipelineError if it is of other problems."""
        if state["identity"] != self._identity():
            raise PipelineError(
                "checkpoint: its order of prompts is of other problems, or of another train_grpo.prompts; resume with "
                "those of its run, or start a new one"
            )
        self._num_sampled = Counter(state["num_sampled"])
        for name, pool in self._pools.items():
            pool.restore(state["pools"][name])

    def _pool(self, name: str, seed: int) -> "_Passes | _Curriculum":
        ids = [problem_id for problem_id, pool in self._pool_of.items() if pool == name]
        stream = f"{seed}/{name}"
        return _Curriculum(ids, self._curriculum, stream) if self._curriculum else _Passes(ids, stream)

    def _require_enough(self, count: int) -> None:
        sizes = {name: len(pool) for name, pool in self._pools.items()}
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

    def _apportion(self, count: int) -> list[str]:
        """Return the pool of each problem of a batch: always the one that is furthest behind its share.

        So none gets more than a problem ahead of its share, unless all problems of another are in the batch already.
        """
        most = {name: self._num_sampled[name] + len(pool) for name, pool in self._pools.items()}
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

    def _identity(self) -> str:
        """Return a digest of what a state belongs to: the problems in their order, the pools and the kind of order."""
        identity = [list(self._pool_of), list(self._pools), self._curriculum is not None]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


class _Passes:
    """Passes over the problems of a pool, every problem once in each."""

    def __init__(self, ids: Sequence[str], stream: str) -> None:
        self._ids = ids
        self._stream = stream
        self._num_seen = 0
        self._order: list[str] = []
        self._deferred: list[str] = []

    def __len__(self) -> int:
        return len(self._ids)

    def next_ids(self, count: int) -> list[str]:
        """Return the next ids, all different.

        Where a pass ends within the batch, the next pass may repeat an id of the batch: that one is deferred to the
        beginning of the next batch.
        """
        batch = dict.fromkeys(self._deferred[:count])
        deferred = self._deferred[count:]
        while len(batch) < count:
            candidate = self._next()
            if candidate in batch:
                deferred.append(candidate)
            batch[candidate] = None
        self._deferred = deferred
        return list(batch)

    def state(self) -> dict[str, Any]:
        return {"stream": self._stream, "num_seen": self._num_seen, "deferred": list(self._deferred)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream, self._num_seen = state["stream"], state["num_seen"]
        self._deferred = list(state["deferred"])
        self._order = self._shuffled()

    def _next(self) -> str:
        place = self._num_seen % len(self._ids)
        if place == 0:
            self._order = self._shuffled()
        self._num_seen += 1
        return self._order[place]

    def _shuffled(self) -> list[str]:
        """Return the order of the pass that the next problem is in."""
        order = random.Random(f"{self._stream}/{self._num_seen // len(self._ids)}")
        return order.sample(self._ids, len(self._ids))


class _Curriculum:
    """Weighted random choices from a pool: problems whose completions disagree are chosen more often, none never."""

    def __init__(self, ids: Sequence[str], config: CurriculumConfig, stream: str) -> None:
        self._ids = ids
        self._config = config
        self._stream = stream
        self._num_batches = 0
        self._pass_rates: dict[str, float] = {}
        self._weights = {problem_id: self._weight(problem_id) for problem_id in ids}

    def __len__(self) -> int:
        return len(self._ids)

    def next_ids(self, count: int) -> list[str]:
        """Return different ids, each chosen with a probability proportional to its weight among those left.

        That is the order in which independent exponential clocks ring whose rates are the weights (Efraimidis and
        Spirakis, https://arxiv.org/abs/1012.0256).
        """
        clock = random.Random(f"{self._stream}/{self._num_batches}")
        self._num_batches += 1
        times = {problem_id: clock.expovariate(weight) for problem_id, weight in self._weights.items()}
        return heapq.nsmallest(count, times, key=times.__getitem__)

    def record(self, problem_id: str, measured: float) -> None:
        """Update the running pass rate; the first measurement replaces the assumed one."""
        before = self._pass_rates.get(problem_id, measured)
        self._pass_rates[problem_id] = before + (1 - self._config.memory) * (measured - before)
        self._weights[problem_id] = self._weight(problem_id)

    def state(self) -> dict[str, Any]:
        return {"stream": self._stream, "num_batches": self._num_batches, "pass_rates": dict(self._pass_rates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream, self._num_batches = state["stream"], state["num_batches"]
        self._pass_rates = dict(state["pass_rates"])
        self._weights = {problem_id: self._weight(problem_id) for problem_id in self._ids}

    def _weight(self, problem_id: str) -> float:
        return max(self._config.floor, learning_signal(self._pass_rates.get(problem_id, _UNTRIED)))


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
