"""Sources of problems: datasets in files (`FileSource`) and generated ones (`BuiltIn`).

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
    """A row that cannot be used."""

    file: Path
    line: int
    """Line of the file, or number of the row in a JSON array or a parquet file, from 1."""
    reason: str


class Fields(NamedTuple):
    """The fields of a `Problem` that are read from a raw row."""

    question: str
    solution: str
    answer: str
    subject: str = ""
    level: int | None = None
    earlier: tuple[tuple[str, str], ...] = ()


class FileSource(Config):
    """A dataset in files; a split without a path is not used."""

    kind: str
    name: str = ""
    """Name of the source in problems, weights, scores and the gate; by default its `kind`. Two sources of one kind need
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
    """Fraction of the problems in the train file that become the test split if there is no `test` file; chosen by their
    questions and `seed`."""
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
        """Return the name of a source whose config, with these values, has no name."""
        return str(values.get("kind", cls.model_fields["kind"].default))

    def path(self, split: Split) -> Path | None:
        """Return the file or folder of a split; None if the split is not used."""
        if split == Split.TEST and self.test:
            return self.test
        return self.train if split == Split.TRAIN or self.held_out_fraction(split) else None

    def held_out_fraction(self, split: Split) -> float:
        """Return the fraction of the train file that becomes this split; 0 for a split that is no part of that file."""
        return {Split.TEST: self.test_fraction, Split.DEV: self.dev_fraction}.get(split, 0.0)

    def max_problems(self, split: Split) -> int | None:
        """Return the maximum number of problems of a split; None if only its files limit it."""
        if self.path(split) is None:
            return 0
        return {Split.TRAIN: self.train_limit, Split.TEST: self.test_limit}.get(split)

    def expected_problems(self, split: Split, root: Path | None) -> int | None:
        """Return the number of problems of a split, from its rows below `root` or as published; None if unknown."""
        if self.path(split) is None:
            return 0
        fraction = self.held_out_fraction(split)
        if root is None:
            number = _PUBLISHED.get((self.kind, Split.TRAIN if fraction else split))
        else:
            number = self.num_rows(split, root)
        if number is None:
            return None
        if fraction:
            number = round(fraction * number)
        return min(number, self.max_problems(split) or number)

    def num_rows(self, split: Split, root: Path) -> int | None:
        """Return the number of rows in the files of a split; None if they cannot be read."""
        try:
            return sum(map(count_rows, self.files(split, root)))
        except PipelineError:  # reported when the rows are read
            return None

    def files(self, split: Split, root: Path) -> list[RawFile]:
        """Return the files of a split, whose path is relative to `root`; PipelineError if there are none."""
        path = self.path(split) or Path()  # only a split that is not used has none, and nobody reads it
        if not (root / path).exists():
            raise PipelineError(
                f"{root / path}: no such file; `make data` fetches GSM8K, MATH-500 and SVAMP; for other datasets see "
                "data/README.md"
            )
        if not (root / path).is_dir():
            return [RawFile(root / path, path)]
        files = [each for each in (root / path).rglob("*") if is_data_file(each) and each.is_file()]
        if not files:
            raise PipelineError(f"{path}: the folder has no file that can be read; accepted: {ACCEPTED}")
        names = (each.relative_to(root / path) for each in sorted(files, key=natural_order))
        return [RawFile(root / path / name, path / name, stem(name)) for name in names]

    @abstractmethod
    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem in one row; MalformedRowError if the row cannot be used."""

    def read(self, split: Split, root: Path, *, seed: int = 0) -> Iterator[Problem | MalformedRow | None]:
        """Yield the problem in each row of a split's files, up to the maximum of the split, or why it cannot be used.

        A row of the train file that belongs to another split is None. The path of the split is relative to `root`.
        `seed` decides which problems of the train file are held out.
        """
        num_problems = 0
        is_held_out = self.held_out_fraction(split) > 0
        for file in self.files(split, root):
            for row in read_rows(file):
                try:
                    if row.columns is None:
                        raise MalformedRowError(row.reason)
                    fields = self.read_row(row.columns)
                except MalformedRowError as error:
                    # The train split reports the malformed rows of the train file.
                    yield None if is_held_out else MalformedRow(row.file, row.line, str(error))
                    continue
                is_in_train_file = split == Split.TRAIN or is_held_out
                if is_in_train_file and self._split_of(fields.question, seed) != split:
                    yield None
                    continue
                yield Problem(id=f"{self.name}/{split}/{row.name}", source=self.name, split=split, **fields._asdict())
                num_problems += 1
                if num_problems == self.max_problems(split):
                    return

    def _split_of(self, question: str, seed: int) -> Split:
        """Return the split of a problem in the train file; case and spacing of the question do not matter for TEST."""
        if fraction_of(f"test {seed} {' '.join(question.casefold().split())}") < self.test_fraction:
            return Split.TEST
        # `dev_fraction` is a fraction of all problems, of which 1 - `test_fraction` are left here.
        is_dev = fraction_of(f"dev {question}") * (1 - self.test_fraction) < self.dev_fraction
        return Split.DEV if is_dev else Split.TRAIN


class BuiltIn(Config):
    """A dataset that is generated from a seed; subclasses have the number of problems of each split as `num_SPLIT`."""

    kind: str

    @model_validator(mode="after")
    def _is_consistent(self) -> "BuiltIn":
        families = getattr(self, "families", [])
        if len(set(families)) < len(families):
            raise ValueError("families must not name a family twice")
        if self.max_problems(Split.TRAIN) + self.max_problems(Split.TEST) == 0:
            raise ValueError("num_train and num_test must not both be 0")
        return self

    @property
    def name(self) -> str:
        """Name of the source in problems, weights, scores and the gate."""
        return self.kind

    def max_problems(self, split: Split) -> int:
        """Return the number of problems of a split."""
        return int(getattr(self, f"num_{split}", 0))

    def _first(self, draws: Iterator[T], split: Split, index: int) -> T:
        """Return the first of the draws, for problem number `index` of the split; PipelineError if there is none."""
        for drawn in draws:
            return drawn
        raise PipelineError(
            f"prepare_data.sources: {self.name}: num_{split} is {self.max_problems(split)}, but only {index} "
            "distinct problems exist in equal shares of families and levels; lower it or allow more of them"
        )

    def _problem(self, split: Split, index: int, answer: int | str, work: str = "", **fields: Any) -> Problem:
        """Return problem number `index` of a split, whose solution is `work`, in lines, and the answer."""
        solution = f"{work}#### {answer}"
        fields |= {"id": f"{self.name}/{split}/{index:05d}", "source": self.name, "split": split}
        return Problem(answer=str(answer), solution=solution, **fields)

    @abstractmethod
    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield the problems of every split; the same seed gives the same problems."""


def fraction_of(content: str) -> float:
    """Return a pseudo-random number from 0 (inclusive) to 1 (exclusive) that depends only on a text."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) / 2**64


def text(columns: dict[str, Any], *names: str) -> str:
    """Return the first of the named columns that has a value; MalformedRowError unless it is text in valid Unicode."""
    name = next((name for name in names if columns.get(name) is not None), None)
    if name is None:
        accepted = " or ".join(f"`{name}`" for name in names)
        raise MalformedRowError(f"column {accepted} is missing")
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
    """Return the first of the named columns that has a value, as text; whole numbers lose their decimals (72.0: 72)."""
    name = next((name for name in names if columns.get(name) is not None), names[0])
    value = columns.get(name)
    if isinstance(value, list) and len(value) == 1:  # datasets for several rewards have lists of answers
        return text_or_number({name: value[0]}, name)
    if type(value) is int:  # not a bool
        return str(value)
    if not isinstance(value, float | Decimal) or not math.isfinite(value):
        return text(columns, *names)  # or MalformedRowError
    # 15 digits, to which a double is exact: 0.1 + 0.2 is 0.3.
    number = Decimal(f"{value:.15g}") if isinstance(value, float) else value
    whole = number.to_integral_value()
    return format(whole if number == whole else number.normalize(), "f")


def excerpt(value: Any) -> str:
    """Return the beginning of a value's JSON for a message."""
    encoded = json.dumps(value, default=str)
    return encoded if len(encoded) <= _MAX_EXCERPT else f"{encoded[:_MAX_EXCERPT]}..."
