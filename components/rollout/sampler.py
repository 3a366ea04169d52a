"""Engines that hold a copy of the policy's weights of their own, which has to be kept in step with the trainer's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from components.policy.sequences import TokenSequence
from components.rollout.completion import Generate


class Sampler(Generate, Protocol):
    """What samples from its own copy of the weights."""

    def load_weights(self, folder: Path, version: int) -> None:
        """Sample from the weights in `folder` from now on; nothing that was computed with others is used again.

        The folder is a Hugging Face one (safetensors), and stays until the next is loaded: an engine that has to start
        again reads it once more. Each version has another number.
        """
        ...

    def prompt_logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """Return what each copy of the weights, by name, says of each completion token at this temperature.

        Compared with what the trainer says of them, it proves that the weights have arrived.
        """
        ...

    def close(self) -> None:
        """End what was started, and let go of what was opened."""
        ...
