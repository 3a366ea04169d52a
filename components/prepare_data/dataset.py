"""Any dataset, in files or on the hub: which of its columns are the question, the answer and the solution."""

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from components.grading.extract import final_answer
from components.prepare_data.hub import HubDataset, files_in, find_on_hub, is_hub_id
from components.prepare_data.math_dataset import level_of
from components.prepare_data.rows import RawFile
from components.prepare_data.source import Fields, FileSource, MalformedRowError, text, text_or_number
from components.shared.answer_policy import AnswerPolicy
from components.shared.config import Config
from components.shared.problem import Split

_DEFAULTS = {
    "question": ("question", "prompt", "problem", "query", "instruction"),
    "answer": ("answer", "final_answer", "expected_answer", "ground_truth", "target"),
    "solution": ("solution", "rationale", "explanation"),
    "subject": ("subject", "topic", "category"),
    "level": ("level", "difficulty"),
}
_SPLIT_WORDS = re.compile(r"(?:^|[-_.])(?:train|training|test|testing|eval|data)(?=$|[-_.])", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")
_MARK = "####"


class Columns(Config):
    """Names of columns; `a.b` is the key `b` of the objects in column `a`."""

    question: str | None = Field(default=None, min_length=1)
    """Column of the question; null for the first of: question, prompt, problem, query, instruction."""
    answer: str | None = Field(default=None, min_length=1)
    """Column of the final answer; null for the first of: answer, final_answer, expected_answer, ground_truth, target,
    or else for what the solution declares after `####` or in a box."""
    solution: str | None = Field(default=None, min_length=1)
    """Column of the worked solution; null for the first of: solution, rationale, explanation. Without one there is
    nothing for fine-tuning to imitate."""
    subject: str | None = Field(default=None, min_length=1)
    """Column of the topic; null for the first of: subject, topic, category, where it is text."""
    level: str | None = Field(default=None, min_length=1)
    """Column of the difficulty, from 1; null for the first of: level, difficulty, where it is a number."""


class Dataset(FileSource):
    """Questions with answers: a file, a folder of files, or a dataset on the Hugging Face hub."""

    kind: Literal["dataset"]
    columns: Columns = Columns()
    subset: str | None = Field(default=None, min_length=1)
    """Subset (configuration) of a dataset folder or a dataset on the hub; null where it has one."""
    train_split: str | None = Field(default=None, min_length=1)
    """Split of a dataset folder or on the hub that `train` reads; null for `train`, or the only one."""
    test_split: str | None = Field(default=None, min_length=1)
    """Split of a dataset folder or on the hub that `test` reads; null for `test`, or the only one."""
    revision: str = Field("main", min_length=1)
    """Commit, branch or tag of a dataset on the hub; the commit is recorded with the problems."""

    @model_validator(mode="after")
    def _one_revision(self) -> "Dataset":
        if self.revision != "main" and self.train and self.test and self.train != self.test:
            raise ValueError("revision is of one dataset, and `train` and `test` are two; make them two sources")
        return self

    @classmethod
    def default_name(cls, values: dict[str, Any]) -> str:
        """Return the name of the file or dataset, without what says which split it is, or else that of its folder."""
        path = Path(str(values.get("train") or values.get("test") or ""))
        stem = path.name if is_hub_id(path) else path.name.partition(".")[0]
        name = _SPLIT_WORDS.sub("", stem).strip("-_.") or path.parent.name
        return _NOT_IN_NAMES.sub("-", name).strip("-.") or "dataset"

    def files(self, split: Split, root: Path) -> list[RawFile]:
        """Return the files of a split; its path is relative to `root`, or is fetched from the hub."""
        path = self.path(split) or Path()
        if (dataset := self.on_hub(split, root)) is not None:
            return dataset.files(*self._split(split))
        if (root / path).is_dir():
            return files_in(root / path, path, *self._split(split))
        return super().files(split, root)

    def on_hub(self, split: Split, root: Path) -> HubDataset | None:
        """Return the dataset of the hub that a split is read from; None where it is a file or folder below `root`."""
        return _resolved(str(self.path(split)), self.revision) if self.is_on_hub(split, root) else None

    def is_on_hub(self, split: Split, root: Path) -> bool:
        """Tell whether a split is read from the hub: its path may be an id, and `root` has no such folder."""
        path = self.path(split)
        return path is not None and is_hub_id(path) and not (root / path).exists()

    def check_on_hub(self, split: Split, root: Path) -> None:
        """Raise PipelineError where a split is to be read from the hub and is not there; no rows are fetched."""
        if (dataset := self.on_hub(split, root)) is not None:
            dataset.names(*self._split(split))

    def num_rows(self, split: Split, root: Path) -> int | None:
        """Return the rows in the files of a split; None for those on the hub, which are fetched later."""
        return None if self.is_on_hub(split, root) else super().num_rows(split, root)

    def _split(self, split: Split) -> tuple[str | None, str | None, str]:
        is_test = split == Split.TEST and self.test is not None
        return self.subset, self.test_split if is_test else self.train_split, "test" if is_test else "train"

    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem in one row; a solution that does not declare its answer gets it as an additional line."""
        question_column = self._column(columns, "question")
        if not question_column:
            raise self._missing(columns, "question")
        solution_column = self._column(columns, "solution")
        solution = text(solution_column, *solution_column) if solution_column else ""
        answer_column = self._column(columns, "answer")
        if answer_column:
            answer = text_or_number(answer_column, *answer_column).strip()
            if not solution and _MARK in answer:  # as in GSM8K, whose answers are solutions
                solution, answer = answer, _declared(answer, *answer_column)
        elif solution:
            answer = _declared(solution, *solution_column)
        else:
            raise self._missing(columns, "answer")
        if solution and final_answer(solution, AnswerPolicy.DECLARED) is None and "\n" not in answer:
            solution = f"{solution.rstrip()}\n{_MARK} {answer}"
        question, earlier = _question(question_column)
        return Fields(question, solution, answer, self._subject(columns), self._level(columns), earlier)

    def _column(self, columns: dict[str, Any], field: str) -> dict[str, Any]:
        """Return the name and value of the column that is a field; nothing where it has no value."""
        name: str | None = getattr(self.columns, field)
        if name and name not in columns and not _has(columns, name):
            raise MalformedRowError(f"no column `{name}`; columns: {', '.join(columns)}")
        values = {each: _value(columns, each) for each in ((name,) if name else _DEFAULTS[field])}
        return next(({each: value} for each, value in values.items() if value is not None), {})

    def _missing(self, columns: dict[str, Any], field: str) -> MalformedRowError:
        """Return what is wrong with a row that has no value for a field."""
        named: str | None = getattr(self.columns, field)
        if empty := next((name for name in ((named,) if named else _DEFAULTS[field]) if name in columns), named):
            return MalformedRowError(f"column `{empty}`, the {field}, is empty")
        known = " or ".join(f"`{name}`" for name in _DEFAULTS[field])
        return MalformedRowError(
            f"has no {field} ({known}); columns: {', '.join(columns)}; name one as `columns.{field}`"
        )

    def _subject(self, columns: dict[str, Any]) -> str:
        column = self._column(columns, "subject")
        if not column or (self.columns.subject is None and not isinstance(next(iter(column.values())), str)):
            return ""
        return text_or_number(column, *column)

    def _level(self, columns: dict[str, Any]) -> int | None:
        for name, level in self._column(columns, "level").items():
            try:
                return level_of({name: level}, name)
            except MalformedRowError:
                if self.columns.level:  # a column that nobody named may be anything
                    raise
        return None


@cache
def _resolved(name: str, revision: str) -> HubDataset:
    """Return a dataset of the hub; a branch is looked up once in a process, so that both splits are of one commit."""
    return find_on_hub(name, revision)


def _declared(solution: str, column: str) -> str:
    answer = final_answer(solution, AnswerPolicy.DECLARED)
    if answer is None:
        raise MalformedRowError(
            rf"column `{column}` declares no final answer, such as `#### 42` or `\boxed{{42}}`, and no column has it; "
            "name it as `columns.answer`"
        )
    return answer


def _question(column: dict[str, Any]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a question, with the messages before it where it ends a conversation, given as a list or as text.

    A conversation may begin with a system message; then user and assistant take turns, and the user asks last.
    """
    ((name, value),) = column.items()
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return text(column, name), ()
    roles = [each.get("role") for each in value]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) % 2 == 0 or turns != [("user", "assistant")[number % 2] for number in range(len(turns))]:
        raise MalformedRowError(
            f"column `{name}` has messages of {', '.join(map(str, roles)) or 'no role'}; accepted: an "
            "optional system message, then user and assistant in turns, with the user's question last"
        )
    *earlier, question = (text({name: each.get("content")}, name) for each in value)
    return question, tuple(zip(roles, earlier, strict=False))


def _has(columns: dict[str, Any], name: str) -> bool:
    return isinstance(columns.get(name.partition(".")[0]), dict)


def _value(columns: dict[str, Any], name: str) -> Any:
    """Return the value of a column, or of a key of its objects; None if it is missing or white space."""
    if name in columns:
        value = columns[name]
        return None if isinstance(value, str) and not value.strip() else value
    first, _, rest = name.partition(".")
    inner = columns.get(first)
    return _value(inner, rest) if rest and isinstance(inner, dict) else None
