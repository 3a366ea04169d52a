"""What the learned reward model is trained on, as compact arrays, and the replay of earlier iterations.

The main process holds the examples, and hands each optimizer step's to the others: see reward_model.py.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from components.policy.packing import TokenSequence
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.process_supervision import Step
from components.train_grpo.rewards import Group, Scored, is_masked

Row = npt.NDArray[np.int32]
"""An example in 4 bytes per token: the main process holds those of a whole iteration."""
_CAPACITY = 10_000
"""Examples in the replay: a tenth of the training of iterations of 90,000 completions, 22 MB at 500 tokens each."""


@dataclass(frozen=True)
class LabeledExample:
    """A completion with a label for each of its steps."""

    tokens: TokenSequence
    step_ends: tuple[int, ...]
    """Completion tokens up to and including the last of each step; for an outcome the completion is one step."""
    labels: tuple[float, ...]
    """For each step 1 for right, 0 for wrong."""

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """What the model reads."""
        return (self.tokens,)

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Where it is read, for each of the sequences."""
        return (self.step_ends,)

    def packed(self) -> Row:
        """Return one array."""
        labels = map(int, self.labels)
        return _packed(self.tokens.prompt_ids, self.tokens.completion_ids, (), (*self.step_ends, *labels))


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of a prompt, of which the first is preferred."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def labels(self) -> tuple[float, ...]:
        """What the difference of the two scores is trained to say: that the first is better."""
        return (1.0,)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """What the model reads."""
        return tuple(TokenSequence(self.prompt_ids, ids) for ids in (self.chosen_ids, self.rejected_ids))

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Where it is read, for each of the sequences."""
        return tuple((len(ids),) for ids in (self.chosen_ids, self.rejected_ids))

    def packed(self) -> Row:
        """Return one array."""
        return _packed(self.prompt_ids, self.chosen_ids, self.rejected_ids, ())


Example = LabeledExample | PreferencePair


def _packed(prompt: Sequence[int], first: Sequence[int], second: Sequence[int], others: Sequence[int]) -> Row:
    """Return the numbers of tokens of prompt and completions, those tokens, and then step ends and labels."""
    return np.array([len(prompt), len(first), len(second), *prompt, *first, *second, *others], np.int32)


def unpacked(row: Row) -> Example:
    """Return the example of an array that `packed` returned."""
    num_prompt, num_first, num_second, *values = row.tolist()
    first, second = num_prompt + num_first, num_prompt + num_first + num_second
    prompt, completion = tuple(values[:num_prompt]), tuple(values[num_prompt:first])
    if num_second:
        return PreferencePair(prompt, completion, tuple(values[first:second]))
    num_steps = (len(values) - second) // 2
    ends, labels = tuple(values[second : second + num_steps]), tuple(map(float, values[second + num_steps :]))
    return LabeledExample(TokenSequence(prompt, completion), ends, labels)


def examples_of(config: TrainGRPOConfig, group: Group) -> list[Example]:
    """Return what a group teaches by the verifier's verdicts; masked completions and steps without one are left out.

    With the loss `pairwise` each right completion is paired with a wrong one, as long as there are both: no completion
    is in two pairs, which would be learned by heart.
    """
    assert config.reward.model is not None
    labeled = [(scored, _with_verdict(scored)) for scored in group.scored_G if not is_masked(config, scored.completion)]
    if config.reward.model.loss == "pointwise":
        return [
            LabeledExample(
                scored.completion.tokens,
                tuple(scored.completion.tokens.length_to(step.end) for step in steps),
                tuple(step.label for step in steps),
            )
            for scored, steps in labeled
            if steps
        ]
    right, wrong = (
        [scored.completion.tokens for scored, steps in labeled if steps and steps[-1].label == label]
        for label in (1.0, 0.0)
    )
    pairs = zip(right, wrong, strict=False)
    return [PreferencePair(one.prompt_ids, one.completion_ids, other.completion_ids) for one, other in pairs]


def _with_verdict(scored: Scored) -> list[Step]:
    return [step for step in scored.steps if not math.isnan(step.label)]


def joined(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return examples in two tensors, for a checkpoint."""
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return {"rows": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *rows])), "sizes": sizes}


def separated(state: dict[str, Tensor]) -> list[Row]:
    """Return the examples that were `joined`."""
    return [rows.numpy() for rows in state["rows"].split(state["sizes"].tolist())]


class Replay:
    """A uniform sample of all examples of earlier iterations: a reservoir, with all of them until it is full.

    It keeps the model from forgetting: Algorithm 1 (section 4.1.4) retrains it with 10 % historical data.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._sample: list[Row] = []

    def mix(self, new: list[Row], *, fraction: float, seed: int) -> list[Row]:
        """Return the new examples, then earlier ones: `fraction` of the result, or all there are."""
        num_old = round(len(new) * fraction / (1 - fraction))
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
        return {"num_seen": torch.tensor(self._num_seen), **joined(self._sample)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        self._num_seen, self._sample = int(state["num_seen"]), separated(state)
