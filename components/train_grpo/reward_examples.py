"""Training examples of the learned reward model, as compact arrays, and the replay of earlier iterations."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from components.policy.packing import TokenSequence
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.scoring import Group, is_masked

PackedExample = npt.NDArray[np.int32]
"""A LabeledExample in 4 bytes per token, because every process holds those of a whole iteration."""
_CAPACITY = 10_000
"""Examples in the replay: enough for iterations of 90,000 completions; 22 MB at 500 tokens each."""
_OLD_FRACTION = 0.1
"""Share of examples of earlier iterations in the training (section 4.1.4 of the paper)."""


@dataclass(frozen=True)
class LabeledExample:
    """A completion with a label for each of its steps."""

    tokens: TokenSequence
    step_ends: tuple[int, ...]
    """For each step the completion tokens up to and including its last one; an outcome is a single step."""
    labels: tuple[float, ...]
    """For each step 1 for right, 0 for wrong."""

    def pack(self) -> PackedExample:
        """Return one array: the numbers of prompt and completion tokens, these tokens, step ends and labels."""
        prompt, completion = self.tokens.prompt_ids, self.tokens.completion_ids
        values = (*prompt, *completion, *self.step_ends, *map(int, self.labels))
        return np.array([len(prompt), len(completion), *values], np.int32)


def unpack(packed: PackedExample) -> LabeledExample:
    """Return the example of an array that `LabeledExample.pack` returned."""
    num_prompt, num_completion, *rest = packed.tolist()
    values = iter(rest)
    tokens = TokenSequence(tuple(islice(values, num_prompt)), tuple(islice(values, num_completion)))
    ends_and_labels = tuple(values)
    num_steps = len(ends_and_labels) // 2
    return LabeledExample(tokens, ends_and_labels[:num_steps], tuple(map(float, ends_and_labels[num_steps:])))


def examples_of(config: TrainGRPOConfig, group: Group) -> list[LabeledExample]:
    """Return a group's examples, without masked completions, and without steps that have no label."""
    examples = []
    for scored in group.scored_G:
        steps = [step for step in scored.steps if not math.isnan(step.label)]
        if steps and not is_masked(config, scored.completion):
            tokens = scored.completion.tokens
            ends = tuple(tokens.length_to(step.end) for step in steps)
            examples.append(LabeledExample(tokens, ends, tuple(step.label for step in steps)))
    return examples


def to_tensors(examples: Sequence[PackedExample], name: str) -> dict[str, Tensor]:
    """Return examples as two tensors for a checkpoint: all arrays end to end, and their sizes."""
    sizes = torch.tensor([len(each) for each in examples], dtype=torch.int64)
    rows = np.concatenate([np.empty(0, np.int32), *examples])  # an empty array, for no examples
    return {f"{name}/rows": torch.from_numpy(rows), f"{name}/sizes": sizes}


def from_tensors(state: Mapping[str, Tensor], name: str) -> list[PackedExample]:
    """Return the examples of which `to_tensors` returned `state`."""
    return [rows.numpy() for rows in state[f"{name}/rows"].split(state[f"{name}/sizes"].tolist())]


class Replay:
    """A uniform sample of the examples of earlier iterations: reservoir sampling, of at most `_CAPACITY` examples.

    It keeps the model from forgetting: Algorithm 1 (section 4.1.4) retrains it with 10 % historical data.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._sample: list[PackedExample] = []

    def mix(self, new: list[PackedExample], *, seed: int) -> list[PackedExample]:
        """Return the new examples, then earlier ones: a tenth of the result, or all if they are fewer."""
        num_old = round(len(new) * _OLD_FRACTION / (1 - _OLD_FRACTION))
        return new + random.Random(seed).sample(self._sample, min(num_old, len(self._sample)))

    def add(self, new: Sequence[PackedExample]) -> None:
        """Add the examples of a finished iteration."""
        # Algorithm R (Vitter, 1985). The seed is the number of examples seen, so a checkpoint needs no random state.
        generator = random.Random(self._num_seen)
        for example in new:
            self._num_seen += 1
            if len(self._sample) < _CAPACITY:
                self._sample.append(example)
            elif (index := generator.randrange(self._num_seen)) < _CAPACITY:
                self._sample[index] = example

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors, for a checkpoint."""
        return {"num_seen": torch.tensor(self._num_seen), **to_tensors(self._sample, "replay")}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        self._num_seen, self._sample = int(state["num_seen"]), from_tensors(state, "replay")
