"""Sampling with transformers from weights that training has cut up among processes (ZeRO 3).

Decoding takes hundreds of passes, and each process another number of them: gathering every layer for each pass would
be slow, and would have processes wait for passes that never come.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from components.policy.checkpoint import Checkpoint
from components.policy.lora import copy_weights
from components.rollout.completion import Completion
from components.rollout.transformers_engine import TransformersEngine


class ShardedEngine:
    """Generates from a whole copy of the weights, which every call renews; all processes call it together."""

    def __init__(self, checkpoint: Checkpoint, max_batch_size: int) -> None:
        """Copy a model that is not cut up yet, and has no adapters."""
        self._sharded = checkpoint.model
        self._engine = TransformersEngine(replace(checkpoint, model=copy.deepcopy(checkpoint.model)), max_batch_size)
        self.whole_weights: Callable[[], AbstractContextManager[None]]
        """How the weights are made whole; set once something has cut them up."""

    def __call__(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """See `Generate`."""
        with self.whole_weights():
            copy_weights(self._sharded, to=self._engine.checkpoint.model)
        return self._engine(
            questions, num_samples=num_samples, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
        )
