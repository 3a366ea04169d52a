import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from components.train_grpo.config import ClipConfig
from components.train_grpo.tally import Tally

CLIP = ClipConfig(low=0.2, high=0.5, dual=3.0)
# Two micro-batches: ratio, advantage, kl, entropy, old and sampler log-probability of each token.
BATCHES = [
    [(1.6, 1.0, 0.3, 1.0, -1.0, -1.1), (0.5, -2.0, 0.1, 2.0, -2.0, -1.5), (4.0, -1.0, 0.7, 0.25, -0.5, -0.2)],
    [(1.4, 1.0, 0.0, 0.5, -3.0, -3.0)],
]


def _columns(batch: Sequence[tuple[float, ...]]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*batch, strict=True)]


def _tally(*, with_kl: bool = True) -> Tally:
    tally = Tally()
    for batch in BATCHES:
        ratio, advantages, kl, entropy, old, sampler = _columns(batch)
        tally.add(CLIP, ratio, advantages, kl if with_kl else None, entropy, old, sampler)
    return tally


def test_the_figures_are_means_over_all_tokens() -> None:
    """By hand over both micro-batches, the larger of which has three of the four tokens."""
    tally = _tally()
    tally.add_step({"loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.5})
    tokens = [token for batch in BATCHES for token in batch]
    assert tally.figures() == pytest.approx(
        {
            "kl": statistics.fmean(token[2] for token in tokens),
            "entropy": statistics.fmean(token[3] for token in tokens),
            "clip_high_fraction": 1 / 4,
            "clip_low_fraction": 2 / 4,
            "sampler_mismatch": (0.1 + 0.5 + 0.0 + 0.3) / 4,
            "sampler_mismatch_max": 0.5,
            "ratio_min": 0.5,
            "ratio_max": 4.0,
            "loss": 1.0,
            "gradient_norm": 2.0,
            "learning_rate": 0.5,
        },
        rel=1e-12,
    )
    assert tally.mean_mismatch == pytest.approx(0.9 / 4, rel=1e-12)


def test_processes_count_by_their_tokens() -> None:
    """Three tokens in one process and one in another have the figures of all four in one, in either order."""
    tallies = []
    for batch in BATCHES:
        ratio, advantages, kl, entropy, old, sampler = _columns(batch)
        tallies.append(Tally())
        tallies[-1].add(CLIP, ratio, advantages, kl, entropy, old, sampler)
    alone = _tally()
    alone.add_step({"loss": 1.0})
    for each in (tallies, tallies[::-1]):
        whole = Tally.whole(each)
        assert whole.mean_mismatch == pytest.approx(0.9 / 4, rel=1e-12)
        whole.add_step({"loss": 1.0})
        assert whole.figures() == pytest.approx(alone.figures(), rel=1e-12)


def test_the_figures_of_the_steps_are_averaged_over_them() -> None:
    """Loss and norm are means over the optimizer steps, however many tokens each had."""
    tally = _tally(with_kl=False)
    tally.add_step({"loss": 1.0, "gradient_norm": 2.0})
    tally.add_step({"loss": -3.0, "gradient_norm": 1.0})
    found = tally.figures()
    assert (found["loss"], found["gradient_norm"]) == (-1.0, 1.5)
    assert math.isnan(found["kl"])  # without a reference there is none to measure


def test_the_mean_mismatch_is_of_what_was_added_so_far() -> None:
    """It is known before the first optimizer step."""
    tally = Tally()
    ratio, advantages, kl, entropy, old, sampler = _columns(BATCHES[0])
    tally.add(CLIP, ratio, advantages, kl, entropy, old, sampler)
    assert tally.mean_mismatch == pytest.approx(0.9 / 3, rel=1e-12)


def test_nothing_has_the_same_figures_as_something() -> None:
    """A step without anything to learn from fits into the same curves: no gradient, and nothing that was measured."""
    tally = _tally()
    tally.add_step({"loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.5})
    nothing: dict[str, Any] = Tally.of_nothing(0.25)
    assert set(nothing) == set(tally.figures())
    measured = {name: value for name, value in nothing.items() if not math.isnan(value)}
    assert measured == {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.25}
