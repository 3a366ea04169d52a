"""Sampling one rollout ahead: the sampler draws the next while the policy learns from the last.

What is learned from is then one update old (one step off-policy), which importance weights correct.
"""

import threading
from collections.abc import Sequence

from components.shared.problem import Problem
from components.train_grpo.rollout import Drawn, Sample


class Ahead:
    """One rollout under way in a thread of its own."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._thread: threading.Thread | None = None
        self._found: Drawn | Exception | None = None

    @property
    def under_way(self) -> bool:
        """Whether a rollout was begun that has not been taken yet."""
        return self._thread is not None or self._found is not None

    def begin(self, problems_P: Sequence[Problem], stream: str) -> None:
        """Start sampling and scoring."""

        def work() -> None:
            try:
                self._found = self._sample(problems_P, stream)
            except Exception as error:
                self._found = error

        # A daemon: a run that ends for another reason does not wait for it.
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def look(self) -> Drawn:
        """Return what was sampled, once it is; it stays to be taken."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self._found, Exception):
            raise self._found
        assert self._found is not None
        return self._found

    def take(self) -> Drawn:
        """Return what was sampled, once it is."""
        found = self.look()
        self._found = None
        return found

    def put_back(self, drawn: Drawn) -> None:
        """Have something to take that an earlier run has sampled."""
        self._found = drawn
