"""The records of a run: metrics of its steps, and sampled completions for people to read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from components.policy.training import write_curves
from components.shared import jsonl
from components.shared.live import FIRST_ROLLOUT
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.scoring import Group

Row = Mapping[str, float | None]
"""The metrics of a step; None instead of NaN, which JSON does not have."""


@dataclass
class History:
    """The records of all steps of a run."""

    curves: list[dict[str, float | None]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    reward_model: list[dict[str, float | None]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    first_rollout: list[str] = field(default_factory=list)
    """Lines that say whether the policy can learn, see `monitoring.first_look`."""

    @property
    def rows(self) -> list[dict[str, float | None]]:
        """The metrics of each step with its timings."""
        return [{**curve, **timing} for curve, timing in zip(self.curves, self.timings, strict=True)]

    def of_step(self, step: int) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """Return the metrics and timings of the last step, `step`, and its completions."""
        completions = [each for each in self.completions if each["step"] == step]
        return {**self.curves[-1], **self.timings[-1]}, completions

    def write(self, training: Path, timings: Path) -> None:
        """Write all records as JSON lines, and the curves as CSV too."""
        write_curves(training, self.curves)
        if self.validation:
            jsonl.write_rows(training / "validation.jsonl", self.validation)
        jsonl.write_rows(training / "completions.jsonl", self.completions)
        (training / FIRST_ROLLOUT).write_text("".join(f"{line}\n" for line in self.first_rollout), encoding="utf-8")
        if self.reward_model:
            jsonl.write_rows(training / "reward_model.jsonl", self.reward_model)
        jsonl.write_rows(timings / "timings.jsonl", self.timings)


def row_of(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics with None for NaN."""
    return {name: _or_none(value) for name, value in metrics.items()}


def column_mean(rows: Sequence[Row], column: str) -> float | None:
    """Return the mean of a column over the rows that have a value; None if no row has one."""
    values = [value for value in (row.get(column) for row in rows) if value is not None]
    return fmean(values) if values else None


def completion_records(
    config: TrainGRPOConfig, groups: Sequence[Group], advantages_M: Tensor, *, step: int
) -> Iterator[dict[str, Any]]:
    """Yield the first `logged_completions_per_step` completions of a rollout with their rewards."""
    first_token = 0
    samples = [(group.problem, number, scored) for group in groups for number, scored in enumerate(group.scored_G)]
    for problem, number, scored in samples[: config.logged_completions_per_step]:
        completion, grade = scored.completion, scored.grade
        yield {
            "step": step,
            "id": problem.id,
            "sample": number,
            "question": problem.conversation,
            "answer": problem.answer,
            "completion": completion.text,
            **({"turns": completion.turn_records()} if completion.turns else {}),
            "extracted": grade.extracted,
            "verdict": grade.verdict.value,
            "reason": grade.reason.value,
            "detail": grade.detail,
            "num_tokens": completion.num_tokens,
            "finished": completion.finished,
            "reward": _or_none(sum(scored.combined(config.reward.weights_of(problem.source)))),
            "rewards": {name: [_or_none(value) for value in values] for name, values in scored.rewards.items()},
            "reward_failure": scored.failure.message if scored.failure else None,
            **({"environment_failure": completion.failure} if completion.turns else {}),
            # A token's advantage is the sum over the rewarded steps that end at it or later: the first token's has all.
            "advantage": float(advantages_M[first_token]) if completion.num_tokens else 0.0,
        }
        first_token += completion.num_tokens


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
