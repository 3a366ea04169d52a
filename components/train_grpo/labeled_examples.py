"""What the reward model learns from: completions with the verifier's labels, and a sample of earlier iterations' ones.

The replay keeps it from forgetting: Algorithm 1 of DeepSeekMath (arXiv 2402.03300, section 4.1.4) retrains the reward
model with 10 % historical data.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from components.policy.packing import TokenSequence

_CAPACITY = 10_000
"""Examples in the replay: a tenth of the training of iterations of 90,000 completions, 22 MB at 500 tokens each."""
_Row = npt.NDArray[np.int32]


@dataclass(frozen=True)
class LabeledExample:
    """A completion with a label for each of its steps."""

    tokens: TokenSequence
    step_ends: tuple[int, ...]
    """Completion tokens up to and including the last of each step; for an outcome the completion is one step."""
    labels: tuple[float, ...]
    """For each step 1 for right, 0 for wrong, NaN for unscorable."""


def scorable(examples: Iterable[LabeledExample]) -> list[LabeledExample]:
    """Return the examples without unscorable steps, and without those that have no other steps."""
    scored = []
    for example in examples:
        pairs = [pair for pair in zip(example.step_ends, example.labels, strict=True) if not math.isnan(pair[1])]
        if pairs:
            step_ends, labels = zip(*pairs, strict=True)
            scored.append(LabeledExample(example.tokens, step_ends, labels))
    return scored


class Examples(Sequence[LabeledExample]):
    """A list of examples in 4 bytes per token: every process holds those of a whole iteration."""

    def __init__(self, examples: Iterable[LabeledExample] = ()) -> None:
        self._rows: list[_Row] = []
        self.extend(examples)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> LabeledExample: ...
    @overload
    def __getitem__(self, place: slice) -> "Examples": ...
    def __getitem__(self, place: int | slice) -> "LabeledExample | Examples":
        """Return one example, or a slice, which shares its memory with these."""
        return self._from_rows(self._rows[place]) if isinstance(place, slice) else _unpacked(self._rows[place])

    def __iter__(self) -> Iterator[LabeledExample]:
        return map(_unpacked, self._rows)

    def __setitem__(self, place: int, example: LabeledExample) -> None:
        self._rows[place] = _packed(example)

    def __add__(self, other: "Examples") -> "Examples":
        return self._from_rows(self._rows + other._rows)

    def extend(self, examples: Iterable[LabeledExample]) -> None:
        """Add examples."""
        self._rows += map(_packed, examples)

    def select(self, places: Iterable[int]) -> "Examples":
        """Return the examples at some indices, which share their memory with these."""
        return self._from_rows([self._rows[place] for place in places])

    def state(self) -> dict[str, Tensor]:
        """Return all of them in two tensors, for a checkpoint."""
        sizes = torch.tensor([len(row) for row in self._rows], dtype=torch.int64)
        return {"rows": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *self._rows])), "sizes": sizes}

    @classmethod
    def restored(cls, state: dict[str, Tensor]) -> "Examples":
        """Return the examples from their `state`."""
        return cls._from_rows([rows.numpy() for rows in state["rows"].split(state["sizes"].tolist())])

    @classmethod
    def _from_rows(cls, rows: list[_Row]) -> "Examples":
        examples = cls()
        examples._rows = rows
        return examples


def _packed(example: LabeledExample) -> _Row:
    """Return one array: the numbers of tokens of prompt and completion, the tokens, step ends, and labels."""
    prompt, completion = example.tokens.prompt_ids, example.tokens.completion_ids
    labels = np.array(example.labels, np.float32).view(np.int32)
    whole = [len(prompt), len(completion), *prompt, *completion, *example.step_ends]
    return np.concatenate([np.array(whole, np.int32), labels])


def _unpacked(row: _Row) -> LabeledExample:
    num_prompt, num_completion = row[:2].tolist()
    end_of_prompt, end = 2 + num_prompt, 2 + num_prompt + num_completion
    step_ends, labels = np.split(row[end:], 2)
    return LabeledExample(
        TokenSequence(tuple(row[2:end_of_prompt].tolist()), tuple(row[end_of_prompt:end].tolist())),
        tuple(step_ends.tolist()),
        tuple(labels.view(np.float32).tolist()),
    )


class Replay:
    """A uniform sample of all examples of earlier iterations: a reservoir, with all of them until it is full."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._sample = Examples()

    def mix(self, new: Examples, *, fraction: float, seed: int) -> Examples:
        """Return the new examples, then earlier ones: `fraction` of the result, or all there are."""
        num_old = round(len(new) * fraction / (1 - fraction))
        places = random.Random(seed).sample(range(len(self._sample)), min(num_old, len(self._sample)))
        return new + self._sample.select(places)

    def add(self, new: Iterable[LabeledExample]) -> None:
        """Add the scorable examples of a finished iteration."""
        # Algorithm R (Vitter, 1985), seeded by how many were seen: the count is all there is to restore.
        generator = random.Random(self._num_seen)
        for example in scorable(new):
            self._num_seen += 1
            if len(self._sample) < _CAPACITY:
                self._sample.extend([example])
            elif (index := generator.randrange(self._num_seen)) < _CAPACITY:
                self._sample[index] = example

    def state(self) -> dict[str, Any]:
        """Return everything as plain values, for a checkpoint."""
        return {"num_seen": self._num_seen, "examples": self._sample.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._num_seen = state["num_seen"]
        self._sample = Examples.restored(state["examples"])
