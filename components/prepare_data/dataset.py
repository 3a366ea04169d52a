"""Any dataset, in files or on the hub, whose columns are recognised by their names or named in the config."""

import json
import math
import re
from contextlib import suppress
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

_DEFAULT_COLUMNS = {
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
    """Column of the final answer, which no row may lack; null for the first of: answer, final_answer, expected_answer,
    ground_truth, target, or else, where these are empty, for what the solution declares after `####` or in a box."""
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
    """Subset (configuration) of a dataset in a folder or on the hub; null if it has only one."""
    train_split: str | None = Field(default=None, min_length=1)
    """Split of a dataset in a folder or on the hub that `train` reads; null for `train`, or the only one."""
    test_split: str | None = Field(default=None, min_length=1)
    """Split of a dataset in a folder or on the hub that `test` reads; null for `test`, or the only one."""
    revision: str = Field("main", min_length=1)
    """Commit, branch or tag of a dataset on the hub; the commit is recorded with the problems."""

    @model_validator(mode="after")
    def _one_revision(self) -> "Dataset":
        if self.revision != "main" and self.train and self.test and self.train != self.test:
            raise ValueError("revision is of one dataset, and `train` and `test` are two; make them two sources")
        return self

    @classmethod
    def default_name(cls, values: dict[str, Any]) -> str:
        """Return the name of the file or dataset without words such as `train`, else the name of its folder."""
        path = Path(str(values.get("train") or values.get("test") or ""))
        stem = path.name if is_hub_id(path) else path.name.partition(".")[0]
        name = _SPLIT_WORDS.sub("", stem).strip("-_.") or path.parent.name
        return _NOT_IN_NAMES.sub("-", name).strip("-.") or "dataset"

    def files(self, split: Split, root: Path) -> list[RawFile]:
        """Return the files of a split: from the hub, fetched if necessary, or below `root`."""
        path = self.path(split) or Path()
        dataset = self.on_hub(split, root)
        if dataset is not None:
            return dataset.files(*self._selection(split))
        if (root / path).is_dir():
            return files_in(root / path, path, *self._selection(split))
        return super().files(split, root)

    def on_hub(self, split: Split, root: Path) -> HubDataset | None:
        """Return the dataset on the hub that a split is read from; None if it is read from files below `root`."""
        return find_on_hub(str(self.path(split)), self.revision) if self.is_on_hub(split, root) else None

    def is_on_hub(self, split: Split, root: Path) -> bool:
        """Tell whether a split is read from the hub: its path has the form of an id, and `root` has no such folder."""
        path = self.path(split)
        return path is not None and is_hub_id(path) and not (root / path).exists()

    def check_on_hub(self, split: Split, root: Path) -> None:
        """Raise PipelineError if a split is read from the hub and is missing there."""
        dataset = self.on_hub(split, root)
        if dataset is not None:
            dataset.names(*self._selection(split))

    def num_rows(self, split: Split, root: Path) -> int | None:
        """Return the number of rows in the files of a split; None for files on the hub, which are fetched later."""
        return None if self.is_on_hub(split, root) else super().num_rows(split, root)

    def _selection(self, split: Split) -> tuple[str | None, str | None, str]:
        """Return the subset, the configured split and the default split: the arguments of `HubDataset.names`."""
        if split == Split.TEST and self.test is not None:
            return self.subset, self.test_split, "test"
        return self.subset, self.train_split, "train"  # also for a split that is held out from the train file

    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem in one row; a solution that does not declare its answer gets it as an additional line."""
        names = {field: name for field in _DEFAULT_COLUMNS if (name := self._column_name(columns, field))}
        values = {name: _value(columns, name) for name in names.values()}
        if "question" not in names:
            raise self._missing(columns, "question")
        question, earlier = _question(names["question"], values[names["question"]])
        solution, answer = _solution_and_answer(names, values)
        if not answer:
            raise self._missing(columns, "answer")
        if solution and final_answer(solution, AnswerPolicy.DECLARED) is None and "\n" not in answer:
            solution = f"{solution.rstrip()}\n{_MARK} {answer}"
        subject, level = "", None
        # A column that the config does not name may hold something else; then there is no subject or level.
        if "subject" in names and (self.columns.subject or isinstance(values[names["subject"]], str)):
            subject = text_or_number(values, names["subject"])
        if "level" in names:
            try:
                level = level_of(values, names["level"])
            except MalformedRowError:
                if self.columns.level:
                    raise
        return Fields(question, solution, answer, subject, level, earlier)

    def _column_name(self, columns: dict[str, Any], field: str) -> str | None:
        """Return the name of the column that has a field of the problem; None if the row has no value for it.

        A row without a value in the column that the config names for answers is malformed.
        """
        name: str | None = getattr(self.columns, field)
        # For `a.b`, column `a` has objects, and those without a key `b` have no value.
        if name and name not in columns and not isinstance(columns.get(name.partition(".")[0]), dict):
            raise MalformedRowError(f"no column `{name}`; columns: {', '.join(columns)}")
        names = (name,) if name else _DEFAULT_COLUMNS[field]
        column = next((each for each in names if _value(columns, each) is not None), None)
        if field == "answer" and name and column is None:
            raise self._missing(columns, field)
        return column

    def _missing(self, columns: dict[str, Any], field: str) -> MalformedRowError:
        """Return the error for a row without a value for a field of the problem."""
        named: str | None = getattr(self.columns, field)
        empty = named or next((name for name in _DEFAULT_COLUMNS[field] if name in columns), None)
        if empty:
            return MalformedRowError(f"column `{empty}`, the {field}, is empty")
        known = " or ".join(f"`{name}`" for name in _DEFAULT_COLUMNS[field])
        return MalformedRowError(
            f"has no {field} ({known}); columns: {', '.join(columns)}; name one as `columns.{field}`"
        )


def _solution_and_answer(names: dict[str, str], values: dict[str, Any]) -> tuple[str, str]:
    """Return the solution and the final answer, each empty if there is none; `names` has the columns by field."""
    solution = text(values, names["solution"]) if "solution" in names else ""
    if "answer" in names:
        answer = text_or_number(values, names["answer"]).strip()
        if not solution and _MARK in answer:  # as in GSM8K, where the answer is a solution
            return answer, _declared(answer, names["answer"])
        return solution, answer
    return (solution, _declared(solution, names["solution"])) if solution else ("", "")


def _declared(solution: str, column: str) -> str:
    """Return the final answer that a solution declares; `column` is its name, for the MalformedRowError."""
    answer = final_answer(solution, AnswerPolicy.DECLARED)
    if answer is None:
        raise MalformedRowError(
            rf"column `{column}` declares no final answer, such as `#### 42` or `\boxed{{42}}`, and no column has it; "
            "name it as `columns.answer`"
        )
    return answer


def _question(name: str, value: Any) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the question in a column and, if the column has a conversation, the messages before as (role, content).

    A conversation, a list or its JSON text, may begin with a system message; then user and assistant take turns, and
    the user asks last.
    """
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return text({name: value}, name), ()
    roles = [each.get("role") for each in value]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", *["assistant", "user"] * (len(turns) // 2)]:
        reason = (
            f"column `{name}` has messages of {', '.join(map(str, roles)) or 'no role'}; accepted: an "
            "optional system message, then user and assistant in turns, with the user's question last"
        )
        if roles[-1:] == ["assistant"]:
            reason += "; move the assistant's last message to a column `answer` or, if it shows its work, `solution`"
        raise MalformedRowError(reason)
    *earlier, question = (text({name: each.get("content")}, name) for each in value)
    return question, tuple(zip(roles[:-1], earlier, strict=True))


def _value(columns: dict[str, Any], name: str) -> Any:
    """Return the value of a column or, for `a.b`, of key `b` in column `a`; None if it is missing, blank or NaN."""
    if name in columns:
        value = columns[name]
        is_blank = isinstance(value, str) and not value.strip()
        return None if is_blank or (isinstance(value, float) and math.isnan(value)) else value
    first, _, rest = name.partition(".")
    inner = columns.get(first)
    return _value(inner, rest) if rest and isinstance(inner, dict) else None
