"""What the learned reward model is trained on, as compact arrays, and the replay of earlier iterations."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from components.policy.packing import TokenSequence
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.scoring import Group, is_masked

Row = npt.NDArray[np.int32]
"""An example in 4 bytes per token: every process holds those of a whole iteration."""
_CAPACITY = 10_000
"""Examples in the replay: a tenth of the training of iterations of 90,000 completions, 22 MB at 500 tokens each."""
_OLD_FRACTION = 0.1
"""Share of earlier iterations in what the model is trained on (section 4.1.4 of the paper)."""


@dataclass(frozen=True)
class LabeledExample:
    """A completion with a label for each of its steps."""

    tokens: TokenSequence
    step_ends: tuple[int, ...]
    """Completion tokens up to and including the last of each step; for an outcome the completion is one step."""
    labels: tuple[float, ...]
    """For each step 1 for right, 0 for wrong."""

    def packed(self) -> Row:
        """Return one array: the numbers of tokens of prompt and completion, those tokens, step ends and labels."""
        prompt, completion = self.tokens.prompt_ids, self.tokens.completion_ids
        values = (*prompt, *completion, *self.step_ends, *map(int, self.labels))
        return np.array([len(prompt), len(completion), *values], np.int32)


def unpacked(row: Row) -> LabeledExample:
    """Return the example of an array that `packed` returned."""
    num_prompt, num_completion, *values = row.tolist()
    prompt, rest = tuple(values[:num_prompt]), values[num_prompt:]
    completion, steps = tuple(rest[:num_completion]), rest[num_completion:]
    ends, labels = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    return LabeledExample(TokenSequence(prompt, completion), tuple(ends), tuple(map(float, labels)))


def examples_of(config: TrainGRPOConfig, group: Group) -> list[LabeledExample]:
    """Return a group's examples, labeled by the verifier, without masked completions and steps that have no verdict."""
    labeled = [
        (scored.completion.tokens, [step for step in scored.steps if not math.isnan(step.label)])
        for scored in group.scored_G
        if not is_masked(config, scored.completion)
    ]
    return [
        LabeledExample(tokens, tuple(tokens.length_to(step.end) for step in steps), tuple(step.label for step in steps))
        for tokens, steps in labeled
        if steps
    ]


def joined(rows: Sequence[Row], name: str) -> dict[str, Tensor]:
    """Return examples in two tensors with names of their own, for a checkpoint."""
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {f"{name}/rows": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *rows])), f"{name}/sizes": sizes}


def separated(state: Mapping[str, Tensor], name: str) -> list[Row]:
    """Return the examples that were `joined`."""
    return [rows.numpy() for rows in state[f"{name}/rows"].split(state[f"{name}/sizes"].tolist())]


class Replay:
    """A uniform sample of all examples of earlier iterations: a reservoir, with all of them until it is full.

    It keeps the model from forgetting: Algorithm 1 (section 4.1.4) retrains it with 10 % historical data.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._sample: list[Row] = []

    def mix(self, new: list[Row], *, seed: int) -> list[Row]:
        """Return the new examples, then earlier ones: a tenth of the result, or all there are."""
        num_old = round(len(new) * _OLD_FRACTION / (1 - _OLD_FRACTION))
        return new + random.Random(seed).sample(self._sample, min(num_old, len(self._sample)))

    def add(self, new: Sequence[Row]) -> None:
        """Add the examples of a finished iteration."""
        # Algorithm R (Vitter, 1985), seeded by how many were seen: the count is all there is to restore.
        generator = random.Random(self._num_seen)
        for example in new:
            self._num_seen += 1
            if len(self._sample) < _CAPACITY:
                self._sample.append(example)
            elif (index := generator.randrange(self._num_seen)) < _CAPACITY:
                self._sample[index] = example

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors, for a checkpoint."""
        return {"num_seen": torch.tensor(self._num_seen), **joined(self._sample, "replay")}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        self._num_seen, self._sample = int(state["num_seen"]), separated(state, "replay")
