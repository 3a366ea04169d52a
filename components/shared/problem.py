"""Problems: the data that all stages from data preparation to registration read."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.config import validate
from components.shared.errors import PipelineError

_MARKED_ANSWER = re.compile(r"^####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
"""A last line that declares the answer, as in GSM8K."""


class Split(StrEnum):
    """The use of a problem."""

    TRAIN = "train"
    TEST = "test"
    DEV = "dev"
    """Held out from training for choosing settings, so that the test split is rarely used; may be missing."""


class Problem(BaseModel):
    """A question with a solution to learn from and an answer to verify."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: str = Field(min_length=1)
    """Unique over all splits and stable between runs, such as `gsm8k/test/00017`."""
    source: str = Field(min_length=1)
    """The dataset it comes from, such as `gsm8k`; accuracies are reported by source."""
    split: Split
    question: str = Field(min_length=1)
    solution: str
    """Worked solution that ends in the final answer, for supervised fine-tuning; empty if there is none."""
    answer: str = Field(min_length=1)
    """The final answer alone, for grading."""
    subject: str
    """Topic within the source; empty if the source has none."""
    level: int | None
    """Difficulty from 1 (easy); null if the source has none."""
    earlier: tuple[tuple[str, str], ...] = ()
    """Messages before the question as (role, content): a system message, earlier turns."""

    @property
    def conversation(self) -> str:
        """The question with the messages before it, for people."""
        return "\n".join([*(f"[{role}] {content}" for role, content in self.earlier), self.question])

    def solution_for(self, policy: AnswerPolicy) -> str:
        """Return the solution that fine-tuning imitates: an answer in the other declared form gets that of `policy`."""
        marked = _MARKED_ANSWER.search(self.solution)
        if policy is AnswerPolicy.BOXED and marked and r"\boxed" not in marked[1]:
            return f"{self.solution[: marked.start()]}\\boxed{{{marked[1]}}}"
        if policy is AnswerPolicy.MARKED and not marked and r"\boxed" in self.solution:
            return f"{self.solution.rstrip()}\n#### {self.answer}"
        return self.solution

    @property
    def num_steps(self) -> int | None:
        """Lines of the solution above its `####` line, as in GSM8K; None without such a line."""
        worked, marker, _ = f"\n{self.solution}".rpartition("\n####")
        if not marker:
            return None
        return sum(bool(line.strip()) for line in worked.splitlines())


def problems_file(folder: Path, split: Split) -> Path:
    """Return the file of a split in a folder of prepare_data."""
    return folder / f"{split}.jsonl"


def splits_in(folder: Path) -> list[Split]:
    """Return the splits in a folder of prepare_data; train and test are always there."""
    return [split for split in Split if split != Split.DEV or problems_file(folder, split).is_file()]


def read_problems(folder: Path, split: Split) -> list[Problem]:
    """Return the problems of one split; PipelineError if it is empty."""
    path = problems_file(folder, split)
    problems = [validate(Problem, row, name=f"{path}:{number}") for number, row in jsonl.read_rows(path)]
    if not problems:
        raise PipelineError(f"{path}: holds no problem")
    return problems


def write_problems(folder: Path, split: Split, problems: Iterable[Problem]) -> None:
    """Write the problems of one split, in their order."""
    rows = (problem.model_dump(mode="json", exclude_defaults=True) for problem in problems)
    jsonl.write_rows(problems_file(folder, split), rows)


def draw(problems: Sequence[Problem], number: int | None, seed: int) -> list[Problem]:
    """Return a random selection of problems in their order; all if `number` is None.

    The hash of an id decides: a smaller selection is part of a larger one, and if a selected problem is removed from
    the data, only one other problem takes its place.
    """
    shuffled = sorted(problems, key=lambda each: hashlib.sha256(f"{seed} {each.id}".encode()).digest())
    chosen = {each.id for each in shuffled[:number]}
    return [each for each in problems if each.id in chosen]
