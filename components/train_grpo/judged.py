"""Completions with what the verifier said of them: the examples that the reward model learns from."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from components.policy.packing import TokenSequence

_Row = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Judged:
    """A completion with what the verifier said of it: an example to learn from."""

    tokens: TokenSequence
    ends: tuple[int, ...]
    """Numbers of completion tokens after which it was judged: all of them for the outcome, else each step's last."""
    labels: tuple[float, ...]
    """For each end 1 for right, 0 for wrong, NaN for unscorable."""


def scorable(examples: Iterable[Judged]) -> list[Judged]:
    """Return the examples without the ends that nothing can be learned from, and none that has no other."""
    kept = []
    for example in examples:
        judged = [pair for pair in zip(example.ends, example.labels, strict=True) if not math.isnan(pair[1])]
        if judged:
            ends, labels = zip(*judged, strict=True)
            kept.append(Judged(example.tokens, ends, labels))
    return kept


class Examples(Sequence[Judged]):
    """Examples in 4 bytes per token, read one at a time.

    Every process holds those of a whole iteration, which as Python integers would take nine times as much.
    """

    def __init__(self, examples: Iterable[Judged] = ()) -> None:
        self._rows: list[_Row] = []
        self.extend(examples)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Judged: ...
    @overload
    def __getitem__(self, place: slice) -> "Examples": ...
    def __getitem__(self, place: int | slice) -> "Judged | Examples":
        """Return one example, or some of them, which share their memory with these."""
        return self._of_rows(self._rows[place]) if isinstance(place, slice) else _unpacked(self._rows[place])

    def __iter__(self) -> Iterator[Judged]:
        return map(_unpacked, self._rows)

    def __setitem__(self, place: int, example: Judged) -> None:
        self._rows[place] = _packed(example)

    def __add__(self, other: "Examples") -> "Examples":
        return self._of_rows(self._rows + other._rows)

    def extend(self, examples: Iterable[Judged]) -> None:
        """Take in more examples."""
        self._rows += map(_packed, examples)

    def chosen(self, places: Iterable[int]) -> "Examples":
        """Return the examples at some places, which share their memory with these."""
        return self._of_rows([self._rows[place] for place in places])

    def state(self) -> dict[str, Tensor]:
        """Return all of them in two tensors."""
        sizes = torch.tensor([len(row) for row in self._rows], dtype=torch.int64)
        return {"rows": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *self._rows])), "sizes": sizes}

    @classmethod
    def restored(cls, state: dict[str, Tensor]) -> "Examples":
        """Return the examples whose `state` it is."""
        return cls._of_rows([rows.numpy() for rows in state["rows"].split(state["sizes"].tolist())])

    @classmethod
    def _of_rows(cls, rows: list[_Row]) -> "Examples":
        made = cls()
        made._rows = rows
        return made


def _packed(example: Judged) -> _Row:
    """The example in one array: how many tokens the prompt and the completion have, tokens, ends, and labels."""
    prompt, completion = example.tokens.prompt_ids, example.tokens.completion_ids
    labels = np.array(example.labels, np.float32).view(np.int32)
    whole = [len(prompt), len(completion), *prompt, *completion, *example.ends]
    return np.concatenate([np.array(whole, np.int32), labels])


def _unpacked(row: _Row) -> Judged:
    num_prompt, num_completion = row[:2].tolist()
    end_of_prompt, end = 2 + num_prompt, 2 + num_prompt + num_completion
    ends, labels = np.split(row[end:], 2)
    return Judged(
        TokenSequence(tuple(row[2:end_of_prompt].tolist()), tuple(row[end_of_prompt:end].tolist())),
        tuple(ends.tolist()),
        tuple(labels.view(np.float32).tolist()),
    )
