"""The replay mechanism: earlier iterations' examples among the new ones, so that the reward model does not forget.

Algorithm 1 of DeepSeekMath (arXiv 2402.03300, section 4.1.4) retrains the reward model with 10 % historical data.
"""

import random
from collections.abc import Iterable
from typing import Any

from components.train_grpo.judged import Examples, Judged, scorable

_CAPACITY = 10_000
"""Examples kept: a tenth of the training of iterations of 90,000 completions, in about 22 MB at 500 tokens each."""


class Replay:
    """A uniform sample of all examples of earlier iterations: a reservoir, all of them until it is full."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._kept = Examples()

    def mix(self, new: Examples, *, fraction: float, seed: int) -> Examples:
        """Return the new examples, then earlier ones that make up `fraction` of the result, as far as there are."""
        num_old = round(len(new) * fraction / (1 - fraction))
        places = random.Random(seed).sample(range(len(self._kept)), min(num_old, len(self._kept)))
        return new + self._kept.chosen(places)

    def add(self, new: Iterable[Judged]) -> None:
        """Take in the scorable examples of an iteration that is over."""
        # Seeded by how many were seen, so that the count is all there is to restore. Algorithm R (Vitter, 1985).
        place = random.Random(self._num_seen)
        for example in scorable(new):
            self._num_seen += 1
            if len(self._kept) < _CAPACITY:
                self._kept.extend([example])
            elif (index := place.randrange(self._num_seen)) < _CAPACITY:
                self._kept[index] = example

    def state(self) -> dict[str, Any]:
        """Return all there is to it as plain values."""
        return {"num_seen": self._num_seen, "kept": self._kept.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._num_seen = state["num_seen"]
        self._kept = Examples.restored(state["kept"])
