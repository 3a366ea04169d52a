"""The problems of each rollout: shares of sources, passes or a curriculum within each, resumable exactly.

Every shuffle and every weighted draw has a random stream of its own, made from the seed and a number. The place in
the sequence is therefore a few counters and pass rates, whatever was drawn before.
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
"""The pass rate that a problem is taken to have before it is tried: the one with the most to learn from."""


def learning_signal(pass_rate: float) -> float:
    """Return 4 p (1 - p), the variance of a pass-or-fail reward as a share of the largest there is.

    0 where every completion passes or every one fails, 1 where half do. Preferring problems by this variance
    is proposed in https://arxiv.org/abs/2502.12272.
    """
    return 4 * pass_rate * (1 - pass_rate)


class Prompts:
    """The problems of each rollout: which are drawn, in what order, resumable exactly.

    Without source weights all problems are one pool; with them each source is one, and is drawn from in exactly its
    share over time. Within a pool there are passes, every problem once in each and each in an order of its own; or,
    with a curriculum, draws weighted by `learning_signal` of the running pass rates.
    """

    def __init__(self, problems: Sequence[Problem], config: PromptsConfig, *, seed: int) -> None:
        weights = config.source_weights
        self._problems = {problem.id: problem for problem in problems}
        self._pool_of = {problem.id: problem.source if weights else _ALL for problem in problems}
        self._shares = _shares(weights, self._pool_of.values()) if weights else {_ALL: Fraction(1)}
        self._curriculum = config.curriculum
        self._pools = {name: self._pool(name, seed) for name in self._shares}
        self._num_drawn = Counter(dict.fromkeys(self._pools, 0))

    def draw(self, count: int) -> list[Problem]:
        """Return the next `count` problems, all different; more than the pools can give is a PipelineError."""
        self._refuse_too_many(count)
        pools = self._apportion(count)
        drawn = {name: iter(pool.draw(pools.count(name))) for name, pool in self._pools.items()}
        return [self._problems[next(drawn[name])] for name in pools]

    def record(self, problem_id: str, *, num_right: int, num_scored: int) -> None:
        """Take in how many of a problem's scored completions are right; only a curriculum makes use of it."""
        pool = self._pools[self._pool_of[problem_id]]
        if num_scored and isinstance(pool, _Curriculum):
            pool.record(problem_id, num_right / num_scored)

    def state(self) -> dict[str, Any]:
        """Return all that the next draws depend on beside problems and config, as plain JSON values."""
        return {
            "of": self._identity(),
            "num_drawn": dict(self._num_drawn),
            "pools": {name: pool.state() for name, pool in self._pools.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken, with its seed; a state of other problems is a PipelineError."""
        if state["of"] != self._identity():
            raise PipelineError(
                "checkpoint: its place in the order of prompts is one among other problems, or by other rules "
                "(train_grpo.prompts); resume with those of its run, or begin a new one"
            )
        self._num_drawn = Counter(state["num_drawn"])
        for name, pool in self._pools.items():
            pool.restore(state["pools"][name])

    def _pool(self, name: str, seed: int) -> "_Passes | _Curriculum":
        ids = [problem_id for problem_id, pool in self._pool_of.items() if pool == name]
        stream = f"{seed}/{name}"
        return _Curriculum(ids, self._curriculum, stream) if self._curriculum else _Passes(ids, stream)

    def _refuse_too_many(self, count: int) -> None:
        sizes = {name: len(pool) for name, pool in self._pools.items()}
        if count > sum(sizes.values()):
            raise PipelineError(
                f"prompts_per_step is {count}, but there are only {sum(sizes.values())} problems to draw"
            )
        for name, share in self._shares.items():
            if share * count > sizes[name]:
                raise PipelineError(
                    f"train_grpo.prompts.source_weights: {float(share * count):g} of prompts_per_step = {count} are "
                    f"to be from `{name}`, but there are only {sizes[name]} such problems"
                )

    def _apportion(self, count: int) -> list[str]:
        """Return the pool of each problem of a batch: always the one that is furthest behind its share.

        So none gets a whole problem ahead, unless another one's problems are all in the batch: it then has to wait
        for the next.
        """
        most = {name: self._num_drawn[name] + len(pool) for name, pool in self._pools.items()}
        first = self._num_drawn.total() + 1
        pools: list[str] = []
        for total in range(first, first + count):
            behind = {
                name: share * total - self._num_drawn[name]
                for name, share in self._shares.items()
                if self._num_drawn[name] < most[name]
            }
            pools.append(max(behind, key=behind.__getitem__))
            self._num_drawn[pools[-1]] += 1
        return pools

    def _identity(self) -> str:
        """What a state belongs to: the problems in their order, the pools and the kind of draws."""
        identity = [list(self._pool_of), list(self._pools), self._curriculum is not None]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


class _Passes:
    """Pass after pass over the problems of a pool, every problem once in each."""

    def __init__(self, ids: Sequence[str], stream: str) -> None:
        self._ids = ids
        self._stream = stream
        self._num_seen = 0
        self._order: list[str] = []
        self._deferred: list[str] = []

    def __len__(self) -> int:
        return len(self._ids)

    def draw(self, count: int) -> list[str]:
        """Return the next different ids.

        Where a pass ends within the batch, the next one may soon hold an id of the batch again: that one is deferred,
        and opens the next batch.
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
        """The order of the pass that the next problem is in."""
        order = random.Random(f"{self._stream}/{self._num_seen // len(self._ids)}")
        return order.sample(self._ids, len(self._ids))


class _Curriculum:
    """Weighted draws from a pool: problems whose completions disagree come more often, and none is left out."""

    def __init__(self, ids: Sequence[str], config: CurriculumConfig, stream: str) -> None:
        self._ids = ids
        self._config = config
        self._stream = stream
        self._num_draws = 0
        self._pass_rates: dict[str, float] = {}
        self._weights = {problem_id: self._weight(problem_id) for problem_id in ids}

    def __len__(self) -> int:
        return len(self._ids)

    def draw(self, count: int) -> list[str]:
        """Return different ids, each drawn in proportion to the weights of those that are left.

        That is the order in which independent exponential clocks ring whose rates are the weights (Efraimidis and
        Spirakis, https://arxiv.org/abs/1012.0256).
        """
        clock = random.Random(f"{self._stream}/{self._num_draws}")
        self._num_draws += 1
        times = {problem_id: clock.expovariate(weight) for problem_id, weight in self._weights.items()}
        return heapq.nsmallest(count, times, key=times.__getitem__)

    def record(self, problem_id: str, measured: float) -> None:
        """Move the running pass rate; the first measurement is taken as it is, since nothing was known before."""
        before = self._pass_rates.get(problem_id, measured)
        self._pass_rates[problem_id] = before + (1 - self._config.memory) * (measured - before)
        self._weights[problem_id] = self._weight(problem_id)

    def state(self) -> dict[str, Any]:
        return {"stream": self._stream, "num_draws": self._num_draws, "pass_rates": dict(self._pass_rates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream, self._num_draws = state["stream"], state["num_draws"]
        self._pass_rates = dict(state["pass_rates"])
        self._weights = {problem_id: self._weight(problem_id) for problem_id in self._ids}

    def _weight(self, problem_id: str) -> float:
        return max(self._config.floor, learning_signal(self._pass_rates.get(problem_id, _UNTRIED)))


def _shares(weights: Mapping[str, float], sources: Iterable[str]) -> dict[str, Fraction]:
    """Return the shares of the sources that have one: exact, and in an order that the params file has no say in."""
    there = set(sources)
    if set(weights) != there:
        raise PipelineError(
            f"train_grpo.prompts.source_weights: there are weights for {', '.join(sorted(weights))}, but problems from "
            f"{', '.join(sorted(there))}; each source of problems needs one (0 leaves it out), and nothing else has one"
        )
    if not any(weights.values()):
        raise PipelineError(f"train_grpo.prompts.source_weights: {dict(weights)} are no shares; one must be above 0")
    exact = {source: Fraction(str(weights[source])) for source in sorted(weights) if weights[source]}
    return {source: weight / sum(exact.values()) for source, weight in exact.items()}
