"""A sampler with weights of its own that needs no vLLM: transformers on a copy, which is loaded from folders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from components.policy.checkpoint import Checkpoint, load
from components.policy.logprobs import CompletionScorer, completion_logprobs
from components.policy.sequences import TokenSequence
from components.rollout.completion import Completion
from components.rollout.transformers_engine import TransformersEngine
from tests import tiny


class OwnWeights:
    """Keeps the weights of a version; one that is `stale` stays with the first that it was given."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, *, stale: bool = False) -> None:
        self._tokens, self._stale = checkpoint, stale
        self._model = load(folder, dtype=torch.float32).model
        self.versions: list[int] = []
        self.sampled_from: list[int] = []

    def __call__(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """See `Generate`."""
        self.sampled_from.append(self.versions[-1])
        engine = TransformersEngine(replace(self._tokens, model=self._model), 64)
        return engine(
            questions, num_samples=num_samples, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
        )

    def load_weights(self, folder: Path, version: int) -> None:
        """See `Sampler`."""
        if not self._stale or not self.versions:
            self._model.load_state_dict(load(folder, dtype=torch.float32).model.state_dict())
        self.versions.append(version)

    def prompt_logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `Sampler`."""
        scorer = CompletionScorer(self._model, temperature=temperature)
        told = []
        for sequence in sequences:
            batches = tiny.batches([sequence], 1000)
            told.append(completion_logprobs(scorer, batches, len(sequence.completion_ids)).tolist())
        return {"a copy": told}

    def close(self) -> None:
        """Nothing is open."""
