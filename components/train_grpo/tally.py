"""The metrics of an update, summed over the tokens that are in its loss.

Shape suffixes:
    N  completion tokens of a micro-batch
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from components.train_grpo.config import ClipConfig
from components.train_grpo.loss import clipped_high, clipped_low
from components.train_grpo.sampler_correction import mismatch

_MEANS = ("kl", "entropy", "clip_high_fraction", "clip_low_fraction", "sampler_mismatch")


class Tally:
    """Sums over one pass through a rollout."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sums = dict.fromkeys(_MEANS, 0.0)
        self._ratio_min, self._ratio_max, self._mismatch_max = math.inf, -math.inf, 0.0
        self._steps: list[dict[str, float]] = []

    @property
    def mean_mismatch(self) -> float:
        """Mean absolute difference of the sampler's log-probabilities from the trainer's so far, in nats."""
        return self._sums["sampler_mismatch"] / self._num_tokens

    @torch.no_grad()
    def add(
        self,
        clip: ClipConfig,
        ratio_N: Tensor,
        advantages_N: Tensor,
        kl_N: Tensor | None,
        entropy_N: Tensor,
        old_N: Tensor,
        sampler_N: Tensor,
    ) -> None:
        """Add the tokens of a micro-batch."""
        mismatch_N = mismatch(old_N, sampler_N)
        added = {
            "kl": torch.full_like(ratio_N, torch.nan) if kl_N is None else kl_N,
            "entropy": entropy_N,
            "clip_high_fraction": clipped_high(ratio_N, advantages_N, clip),
            "clip_low_fraction": clipped_low(ratio_N, advantages_N, clip),
            "sampler_mismatch": mismatch_N,
        }
        self._num_tokens += ratio_N.numel()
        for name, values_N in added.items():
            self._sums[name] += float(values_N.sum())
        self._ratio_min = min(self._ratio_min, float(ratio_N.min()))
        self._ratio_max = max(self._ratio_max, float(ratio_N.max()))
        self._mismatch_max = max(self._mismatch_max, float(mismatch_N.max()))

    @staticmethod
    def whole(tallies: "Sequence[Tally]") -> "Tally":
        """Return the tally of all processes: the tokens of each, and no optimizer step yet."""
        whole = Tally()
        whole._num_tokens = sum(each._num_tokens for each in tallies)
        whole._sums = {name: sum(each._sums[name] for each in tallies) for name in _MEANS}
        whole._ratio_min = min(each._ratio_min for each in tallies)
        whole._ratio_max = max(each._ratio_max for each in tallies)
        whole._mismatch_max = max(each._mismatch_max for each in tallies)
        return whole

    def add_step(self, figures: dict[str, float]) -> None:
        """Add what an optimizer step says of itself."""
        self._steps.append(figures)

    @staticmethod
    def of_nothing(learning_rate: float) -> dict[str, float]:
        """Return the figures of an update that had nothing to learn from: it changed nothing, and measured nothing."""
        unknown = dict.fromkeys((*_MEANS, "sampler_mismatch_max", "ratio_min", "ratio_max"), math.nan)
        return {**unknown, "loss": 0.0, "gradient_norm": 0.0, "learning_rate": learning_rate}

    def figures(self) -> dict[str, float]:
        """Return means over tokens, extremes, and the means over the optimizer steps."""
        return {
            **{name: total / self._num_tokens for name, total in self._sums.items()},
            "sampler_mismatch_max": self._mismatch_max,
            "ratio_min": self._ratio_min,
            "ratio_max": self._ratio_max,
            **{name: sum(step[name] for step in self._steps) / len(self._steps) for name in self._steps[0]},
        }
