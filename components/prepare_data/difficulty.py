"""Choice of train problems by how often a model answers them right: GRPO learns nothing from too easy or hard ones.

`grpo-pipeline preview --pass-rates FILE` measures pass rates. The first line of the file has the conditions: the model
with the digest of its files, temperature, and token limit. Each further line has the digest of a question, its number
of right completions and its number of completions.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.shared import jsonl
from components.shared.config import Config, validate
from components.shared.errors import PipelineError
from components.shared.problem import Problem


class DifficultyConfig(Config):
    """Which train problems are kept, by the pass rates of a model."""

    pass_rates: Path
    """File that `grpo-pipeline preview --pass-rates` has written."""
    min_pass_rate: float = Field(0.1, ge=0, le=1)
    """Fraction of right completions below which a problem is too hard to learn from."""
    max_pass_rate: float = Field(0.9, ge=0, le=1)
    """Fraction of right completions above which a problem is too easy to learn from."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "DifficultyConfig":
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError("min_pass_rate is above max_pass_rate: no problem would be kept")
        return self


class Measured(BaseModel):
    """How pass rates were measured: the first line of their file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Name or folder."""
    digest: str
    """SHA-256 of the content of the model's folder, or the commit of a model on the hub."""
    temperature: float
    max_new_tokens: int


class PassRate(BaseModel):
    """The completions of one question: a further line of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str
    """SHA-256 of the source and of the question with the messages before it: see `question_digest`."""
    right: int = Field(ge=0)
    samples: int = Field(gt=0)


def question_digest(problem: Problem) -> str:
    """Return the digest that identifies a question in a file of pass rates, whatever the order of the problems."""
    return hashlib.sha256(f"{problem.source}\n{problem.conversation}".encode()).hexdigest()


def read_pass_rates(path: Path) -> tuple[Measured, dict[str, float]]:
    """Return how pass rates were measured, and the rates by question digest; PipelineError for an invalid line."""
    rows = [(f"{path}:{number}", row) for number, row in jsonl.read_rows(path)]
    if not rows:
        raise PipelineError(f"{path}: holds no pass rate; `grpo-pipeline preview --pass-rates {path}` writes them")
    measured = validate(Measured, rows[0][1], name=rows[0][0])
    rates = [validate(PassRate, row, name=place) for place, row in rows[1:]]
    return measured, {each.question: each.right / each.samples for each in rates}


def within_band(
    problems: Sequence[Problem], config: DifficultyConfig, root: Path
) -> tuple[list[Problem], Mapping[str, Any]]:
    """Return the problems within the limits, and a record for the manifest; PipelineError if no problem is left."""
    measured, rates = read_pass_rates(root / config.pass_rates)
    kept = []
    counts = {"kept": 0, "too_easy": 0, "too_hard": 0, "unmeasured": 0}
    for problem in problems:
        rate = rates.get(question_digest(problem))
        if rate is None:
            counts["unmeasured"] += 1
        elif rate < config.min_pass_rate:
            counts["too_hard"] += 1
        elif rate > config.max_pass_rate:
            counts["too_easy"] += 1
        else:
            counts["kept"] += 1
            kept.append(problem)
    if not kept:
        raise PipelineError(
            f"prepare_data.difficulty: keeps none of {len(problems):,} train problems: {counts['too_easy']:,} are too "
            f"easy, {counts['too_hard']:,} too hard, {counts['unmeasured']:,} have no pass rate in {config.pass_rates}"
        )
    counts["rates"] = len(rates)
    return kept, {"measured": measured.model_dump(), **counts}
