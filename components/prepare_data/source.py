"""What every dataset in files shares: its settings, how its rows are read, and the fields to be read from one of them.

To add a dataset, write a subclass of `FileSource` in a file such as `gsm8k.py` and add it to `Source` in `config.py`.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, model_validator

from components.shared import jsonl
from components.shared.config import Config
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

if TYPE_CHECKING:
    from components.grading.verifier import Verifier

_MAX_EXCERPT = 40
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
    """Line of the file, or row of a parquet file, from 1."""
    reason: str


class Fields(NamedTuple):
    """The part of a problem that is read from a raw row."""

    question: str
    solution: str
    answer: str
    subject: str = ""
    level: int | None = None


class FileSource(Config):
    """A dataset that is read from files; a split without a path is not used."""

    kind: str
    train: Path | None = None
    """File or folder of the train split."""
    test: Path | None = None
    """File or folder of the test split."""
    train_limit: int | None = Field(default=None, ge=1)
    """Maximum problems of the train split, from its beginning; null for all."""
    test_limit: int | None = Field(default=None, ge=1)
    """Maximum problems of the test split, from its beginning; null for all."""
    dev_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the problems in the train file that become the dev split instead, chosen by their questions."""

    @model_validator(mode="after")
    def _has_a_path(self) -> "FileSource":
        if self.train is None and self.test is None:
            raise ValueError("has neither a `train` nor a `test` path; set at least one")
        if self.dev_fraction and self.train is None:
            raise ValueError("dev_fraction needs a `train` path to hold problems out from")
        return self

    def path(self, split: Split) -> Path | None:
        """The file or folder of one split; None if the split is not used."""
        if split == Split.DEV and not self.dev_fraction:
            return None
        return self.test if split == Split.TEST else self.train

    def max_problems(self, split: Split) -> int | None:
        """How many problems of one split there can be; None if only its file tells."""
        limits = {Split.TRAIN: self.train_limit, Split.TEST: self.test_limit}
        return 0 if self.path(split) is None else limits.get(split)

    def expected_problems(self, split: Split, root: Path | None) -> int | None:
        """Return how many problems a split has if no row is malformed, from its files below `root`.

        Without `root`, where the files are elsewhere, it has as many as were published; None if that is unknown.
        """
        path = self.path(split)
        if path is None:
            return 0
        published = _PUBLISHED.get((self.kind, Split.TEST if split == Split.TEST else Split.TRAIN))
        number = published if root is None else _num_rows(root / path)
        if number is None:
            return None
        limit = self.max_problems(split)
        return round(self.dev_fraction * number) if split == Split.DEV else min(number, limit or number)

    @abstractmethod
    def read_row(self, columns: dict[str, Any], verify: "Verifier") -> Fields:
        """Return the problem in one row.

        Raises:
            MalformedRowError: The row cannot be used.
        """

    def read(self, split: Split, root: Path, verify: "Verifier") -> Iterator[Problem | MalformedRow]:
        """Yield what is in each row of a split, up to its maximum of problems; its path is relative to `root`.

        The id of a problem names its row by number from 0, or by its path in a folder.
        """
        path, num_problems = self.path(split) or Path(), 0
        for file, line, name, content in _raw_rows(root / path):
            try:
                columns = content if isinstance(content, dict) else _parse(content)
                fields = self.read_row(columns, verify)
            except MalformedRowError as error:
                if split != Split.DEV:  # whose file is read for the train split as well
                    # The path as in the config, not that of a temporary checkout.
                    yield MalformedRow(path / file.relative_to(root / path), line, str(error))
                continue
            is_dev = fraction_of(f"dev {fields.question}") < self.dev_fraction
            if split != Split.TEST and is_dev != (split == Split.DEV):
                continue
            yield Problem(id=f"{self.kind}/{split}/{name}", source=self.kind, split=split, **fields._asdict())
            num_problems += 1
            if num_problems == self.max_problems(split):
                return


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


def excerpt(value: Any) -> str:
    """Return a value as JSON, shortened for a message."""
    encoded = json.dumps(value, default=str)
    return encoded if len(encoded) <= _MAX_EXCERPT else f"{encoded[:_MAX_EXCERPT]}..."


def _num_rows(path: Path) -> int | None:
    """The rows in a file or folder, None where there is none; counted without parsing them."""
    if not path.exists():
        return None
    if path.is_dir():
        return sum(1 for _ in path.rglob("*.json"))
    if path.suffix == ".parquet":
        return len(_read_parquet(path))
    return sum(bool(line.strip()) for line in jsonl.read_lines(path))


def _raw_rows(path: Path) -> Iterator[tuple[Path, int, str, Any]]:
    """Yield file, line, name and content of each row: columns, or the bytes of a JSON object."""
    if not path.exists():
        raise PipelineError(
            f"{path}: no such file; `make data` fetches GSM8K and MATH-500, data/README.md describes the others"
        )
    if path.is_dir():
        for file in sorted(path.rglob("*.json"), key=_natural_order):
            yield file, 1, file.relative_to(path).with_suffix("").as_posix(), file.read_bytes()
        return
    rows: Iterable[Any] = _read_parquet(path) if path.suffix == ".parquet" else jsonl.read_lines(path)
    for index, row in enumerate(rows):
        if isinstance(row, dict) or row.strip():
            yield path, index + 1, f"{index:05d}", row


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    # Imported here: slow to load, and most runs read JSON lines.
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise PipelineError(f"{path}: not a readable parquet file ({reason}); is it truncated?") from None
    return rows


def _natural_order(path: Path) -> tuple[tuple[str, ...], int, str]:
    """By folder, then by number: 2.json before 10.json."""
    return path.parts[:-1], int(path.stem) if path.stem.isdecimal() else -1, path.name


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return jsonl.parse_object(line, where="")
    except PipelineError as error:
        raise MalformedRowError(str(error).removeprefix(": ")) from None
