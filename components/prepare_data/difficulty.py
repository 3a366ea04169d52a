"""Train problems chosen by how often a model answers them: too easy or too hard ones teach GRPO nothing.

`grpo-pipeline preview --pass-rates FILE` measures. The first line of the file says how: the model with the digest of
its files, temperature, and the limit of tokens. Each further line has a question's digest, and how many of how many
completions were right.
"""

import hashlib
from collections import Counter
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
    """Share of right completions below which a problem is too hard to learn from."""
    max_pass_rate: float = Field(0.9, ge=0, le=1)
    """Share of right completions above which it is too easy."""

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
    """SHA-256 of what the model's folder holds, or the commit of one of the hub."""
    temperature: float
    max_new_tokens: int


class PassRate(BaseModel):
    """The completions of one question: a further line of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str
    """SHA-256 of the source and the question with the messages before it."""
    right: int = Field(ge=0)
    samples: int = Field(gt=0)


def question_digest(problem: Problem) -> str:
    """Return the name of a question in a file of pass rates; it does not change with the order of the problems."""
    return hashlib.sha256(f"{problem.source}\n{problem.conversation}".encode()).hexdigest()


def read_pass_rates(path: Path) -> tuple[Measured, dict[str, float]]:
    """Return how pass rates were measured, and that of each question by its digest; PipelineError for a wrong line."""
    rows = [(f"{path}:{number}", row) for number, row in jsonl.read_rows(path)]
    if not rows:
        raise PipelineError(f"{path}: holds no pass rate; `grpo-pipeline preview --pass-rates {path}` writes them")
    measured = validate(Measured, rows[0][1], name=rows[0][0])
    rates = [validate(PassRate, row, name=place) for place, row in rows[1:]]
    return measured, {each.question: each.right / each.samples for each in rates}


def within_band(
    problems: Sequence[Problem], config: DifficultyConfig, root: Path
) -> tuple[list[Problem], Mapping[str, Any]]:
    """Return the problems that are kept, and what to record of the others; the file is relative to `root`.

    PipelineError where none is kept.
    """
    measured, rates = read_pass_rates(root / config.pass_rates)

    def judged(problem: Problem) -> str:
        rate = rates.get(question_digest(problem))
        if rate is None:
            return "unmeasured"
        return "too_hard" if rate < config.min_pass_rate else "too_easy" if rate > config.max_pass_rate else "kept"

    judgements = [judged(problem) for problem in problems]
    counts = {name: Counter(judgements)[name] for name in ("kept", "too_easy", "too_hard", "unmeasured")}
    if not counts["kept"]:
        raise PipelineError(
            f"prepare_data.difficulty: keeps none of {len(problems):,} train problems: {counts['too_easy']:,} are too "
            f"easy, {counts['too_hard']:,} too hard, {counts['unmeasured']:,} have no pass rate in {config.pass_rates}"
        )
    counts["rates"] = len(rates)
    kept = [problem for problem, judgement in zip(problems, judgements, strict=True) if judgement == "kept"]
    return kept, {"measured": measured.model_dump(), **counts}
