"""What every dataset in files shares: its settings, how its rows are read, and the fields to be read from one of them.

To add a dataset, write a subclass of `FileSource` in a file such as `gsm8k.py` and add it to `Source` in `config.py`.
"""

import hashlib
import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, field_validator, model_validator

from components.prepare_data.rows import ACCEPTED, RawFile, count_rows, is_data_file, natural_order, read_rows, stem
from components.shared.config import Config
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

T = TypeVar("T")
_MAX_EXCERPT = 40
MAX_DRAWS = 20_000
"""Random draws without a new problem after which the problems count as exhausted."""
_NAME = re.compile(r"\w[\w.-]*")
_PUBLISHED = {
    ("gsm8k", Split.TRAIN): 7473,
    ("gsm8k", Split.TEST): 1319,
    ("math", Split.TRAIN): 7500,
    ("math", Split.TEST): 5000,
    ("math500", Split.TEST): 500,
    ("mbpp", Split.TRAIN): 374,
    ("mbpp", Split.TEST): 500,
}
"""Problems of each split as its authors published it."""


class MalformedRowError(ValueError):
    """A row that cannot be used; the message says why."""


class MalformedRow(NamedTuple):
    """Where a row is that cannot be used, and why."""

    file: Path
    line: int
    """Line of the file, or number of the row in a JSON array or a parquet file, from 1."""
    reason: str


class Fields(NamedTuple):
    """The part of a problem that is read from a raw row."""

    question: str
    solution: str
    answer: str
    subject: str = ""
    level: int | None = None
    earlier: tuple[tuple[str, str], ...] = ()


class FileSource(Config):
    """A dataset that is read from files; a split without a path is not used."""

    kind: str
    name: str = ""
    """Name of the source in problems, weights, scores and the gate; `kind` if not set. Two sources of one kind need
    different names."""
    train: Path | None = None
    """File or folder of the train split."""
    test: Path | None = None
    """File or folder of the test split."""
    train_limit: int | None = Field(default=None, ge=1)
    """Maximum problems of the train split, from its beginning; null for all."""
    test_limit: int | None = Field(default=None, ge=1)
    """Maximum problems of the test split, from its beginning; null for all."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the problems in the train file that become the test split, where there is no `test` file; chosen by
    their questions and `seed`."""
    dev_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the problems in the train file that become the dev split instead, chosen by their questions."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("name"):
            return {**values, "name": cls.default_name(values)}
        return values

    @field_validator("name")
    @classmethod
    def _name_is_one_word(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("is part of ids: accepted are letters, digits, `_`, `-` and `.`")
        return name

    @model_validator(mode="after")
    def _has_a_path(self) -> "FileSource":
        if self.train is None and self.test is None:
            raise ValueError("has neither a `train` nor a `test` path; set at least one")
        for key in ("test_fraction", "dev_fraction"):
            if getattr(self, key) and self.train is None:
                raise ValueError(f"{key} needs a `train` path to hold problems out from")
        if self.test_fraction and self.test:
            raise ValueError("`test` and test_fraction exclude one another: the test split is a file or part of one")
        if self.test_fraction + self.dev_fraction >= 1:
            raise ValueError("test_fraction and dev_fraction must leave some of the problems to train on")
        if self.train == self.test and self.train and is_data_file(self.train):
            raise ValueError(
                f"`train` and `test` are the same file, {self.train}; set test_fraction instead of `test` to divide it"
            )
        return self

    @classmethod
    def default_name(cls, values: dict[str, Any]) -> str:
        """Return the name of a source whose settings give none."""
        return str(values.get("kind", cls.model_fields["kind"].default))

    def path(self, split: Split) -> Path | None:
        """The file or folder of one split; None if the split is not used."""
        fraction = {Split.TEST: self.test_fraction, Split.DEV: self.dev_fraction}.get(split)
        if split == Split.TEST and self.test:
            return self.test
        return self.train if fraction is None or fraction > 0 else None

    def max_problems(self, split: Split) -> int | None:
        """How many problems of one split there can be; None if only its file tells."""
        limits = {Split.TRAIN: self.train_limit, Split.TEST: self.test_limit}
        return 0 if self.path(split) is None else limits.get(split)

    def is_held_out(self, split: Split) -> bool:
        """Tell whether a split is a random part of the train file."""
        return self.path(split) is not None and (split == Split.DEV or (split == Split.TEST and self.test is None))

    def expected_problems(self, split: Split, root: Path | None) -> int | None:
        """Return how many problems a split has if no row is malformed, from its files below `root`.

        Without `root`, where the files are elsewhere, it has as many as were published; None if that is unknown.
        """
        if self.path(split) is None:
            return 0
        published = _PUBLISHED.get((self.kind, Split.TRAIN if self.is_held_out(split) else split))
        number = published if root is None else self.num_rows(split, root)
        if number is None:
            return None
        fraction = {Split.TEST: self.test_fraction, Split.DEV: self.dev_fraction}.get(split)
        expected = round(fraction * number) if fraction else number
        return min(expected, self.max_problems(split) or expected)

    def num_rows(self, split: Split, root: Path) -> int | None:
        """Return the rows in the files of a split; None where they cannot be counted."""
        try:
            return sum(map(count_rows, self.files(split, root)))
        except PipelineError:  # reported where the rows are read
            return None

    def files(self, split: Split, root: Path) -> list[RawFile]:
        """Return the files of a split; its path is relative to `root`.

        Raises:
            PipelineError: There are none.
        """
        path = self.path(split) or Path()
        if not (root / path).is_dir():
            if not (root / path).exists():
                raise PipelineError(
                    f"{path}: no such file; `make data` fetches GSM8K, MATH-500 and SVAMP, data/README.md describes "
                    "the others"
                )
            return [RawFile(root / path, path)]
        files = [each for each in (root / path).rglob("*") if is_data_file(each) and each.is_file()]
        if not files:
            raise PipelineError(f"{path}: the folder has no file that can be read; accepted: {ACCEPTED}")
        names = (each.relative_to(root / path) for each in sorted(files, key=natural_order))
        return [RawFile(root / path / name, path / name, stem(name)) for name in names]

    @abstractmethod
    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem in one row.

        Raises:
            MalformedRowError: The row cannot be used.
        """

    def read(self, split: Split, root: Path, *, seed: int = 0) -> Iterator[Problem | MalformedRow]:
        """Yield what is in each row of a split, up to its maximum of problems; its path is relative to `root`.

        The id of a problem names its row by number from 0, or by its path in a folder. `seed` decides which problems
        are held out for the test split.
        """
        num_problems, in_train_file = 0, split == Split.TRAIN or self.is_held_out(split)
        for file in self.files(split, root):
            for row in read_rows(file):
                try:
                    if row.columns is None:
                        raise MalformedRowError(row.reason)
                    fields = self.read_row(row.columns)
                except MalformedRowError as error:
                    if split == Split.TRAIN or not in_train_file:  # else the train split has it
                        yield MalformedRow(row.file, row.line, str(error))
                    continue
                if in_train_file and self._split_of(fields.question, seed) != split:
                    continue
                yield Problem(id=f"{self.name}/{split}/{row.name}", source=self.name, split=split, **fields._asdict())
                num_problems += 1
                if num_problems == self.max_problems(split):
                    return

    def _split_of(self, question: str, seed: int) -> Split:
        """Return the split of a problem in the train file: the same for questions that differ in case and space."""
        if fraction_of(f"test {seed} {' '.join(question.casefold().split())}") < self.test_fraction:
            return Split.TEST
        is_dev = fraction_of(f"dev {question}") * (1 - self.test_fraction) < self.dev_fraction
        return Split.DEV if is_dev else Split.TRAIN


class BuiltIn(Config):
    """A dataset that is generated from a seed; its subclasses say how many problems of each split."""

    kind: str

    @model_validator(mode="after")
    def _is_consistent(self) -> "BuiltIn":
        families = getattr(self, "families", [])
        if len(set(families)) < len(families):
            raise ValueError("families must not name a family twice")
        if not self.max_problems(Split.TRAIN) + self.max_problems(Split.TEST):
            raise ValueError("num_train and num_test must not both be 0")
        return self

    @property
    def name(self) -> str:
        """Name of the source in problems, weights, scores and the gate."""
        return self.kind

    def max_problems(self, split: Split) -> int:
        """The number of problems of one split."""
        return int(getattr(self, f"num_{split}", 0))

    def _first(self, new: Iterator[T], split: Split, index: int) -> T:
        """Return the first new problem that was drawn; PipelineError where too many draws gave none."""
        if (drawn := next(new, None)) is None:
            raise PipelineError(
                f"prepare_data.sources: {self.name}: num_{split} is {self.max_problems(split)}, but only {index} "
                "distinct problems exist in equal shares of families and levels; lower it or allow more of them"
            )
        return drawn

    def _problem(self, split: Split, index: int, **fields: Any) -> Problem:
        return Problem(id=f"{self.name}/{split}/{index:05d}", source=self.name, split=split, **fields)

    @abstractmethod
    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield the problems of every split; equal seeds give equal problems."""


def fraction_of(content: str) -> float:
    """Return a number from 0 to 1 that depends on a text alone."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) / 2**64


def text(columns: dict[str, Any], *names: str) -> str:
    """Return the first of the columns that is present; MalformedRowError unless it is text with valid characters."""
    name = next((name for name in names if columns.get(name) is not None), None)
    if name is None:
        raise MalformedRowError(f"column {' or '.join(f'`{name}`' for name in names)} is missing")
    value = columns[name]
    if not isinstance(value, str):
        raise MalformedRowError(f"column `{name}` is {excerpt(value)}, expected text")
    if not value.strip():
        raise MalformedRowError(f"column `{name}` is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise MalformedRowError(f"column `{name}` contains half a surrogate pair, which is not a character") from None
    return value


def text_or_number(columns: dict[str, Any], *names: str) -> str:
    """Return the first of the columns that is present as text; a whole number has no decimals: 72.0 is 72."""
    value = next((columns[name] for name in names if columns.get(name) is not None), None)
    if isinstance(value, list) and len(value) == 1:  # as in data for several rewards
        return text_or_number({names[0]: value[0]}, names[0])
    if type(value) is int:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        return text(columns, *names)
    # A double is exact to 15 digits: 0.1 + 0.2 is 0.3.
    exact = Decimal(f"{value:.15g}") if isinstance(value, float) else Decimal(value)
    return format(exact.to_integral_value() if exact == exact.to_integral_value() else exact.normalize(), "f")


def excerpt(value: Any) -> str:
    """Return a value as JSON, shortened for a message."""
    encoded = json.dumps(value, default=str)
    return encoded if len(encoded) <= _MAX_EXCERPT else f"{encoded[:_MAX_EXCERPT]}..."
