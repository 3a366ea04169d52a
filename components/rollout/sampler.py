"""Engines that hold a copy of the policy's weights of their own, which has to be kept in step with the trainer's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from components.policy.sequences import TokenSequence
from components.rollout.completion import Generate
from components.rollout.vllm_config import WeightsBy


class Sampler(Generate, Protocol):
    """What samples from its own copy of the weights."""

    weights_by: WeightsBy
    """How new weights come: see `VllmConfig`."""
    shared: bool
    """Whether the processes of a run have it together, so that one of them sends the weights."""

    def load_weights(self, folder: Path, version: int) -> None:
        """Sample from the weights in `folder` from now on; nothing that was computed with others is used again.

        StaleWeightsError where it does not compute with exactly these weights afterwards, rounded to its own precision.
        The folder is a Hugging Face one (safetensors), and stays until the next is loaded: an engine that has to start
        again reads it once more. Each version has another number.
        """
        ...

    def take_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As `load_weights`, from this process's memory; the tensors have the names that a folder gives them."""
        ...

    def expect_weights(self, version: int) -> None:
        """As `load_weights`, for weights that another process has sent."""
        ...

    def prompt_logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """Return what each copy of the weights, by name, says of each completion token at this temperature.

        Compared with what the trainer says of them, it shows that the sampler computes as the trainer does.
        """
        ...

    def close(self) -> None:
        """End what was started, and let go of what was opened."""
        ...
