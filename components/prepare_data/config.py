"""What data preparation reads and what it refuses: the section `prepare_data` of a params file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from components.shared.config import Config
from components.shared.problem import Split

MAX_OPERANDS = 6
"""Single digits: six of them keep every intermediate result of a word problem within 0 to 60."""

Family = Literal["total", "gains_and_losses", "shared", "leftovers"]


class WordProblemsConfig(Config):
    """Built-in generated word problems: nothing to download, small enough for a model made from scratch."""

    kind: Literal["word_problems"]
    num_train: int = Field(ge=0)
    """Problems of the train split."""
    num_test: int = Field(ge=0)
    """Problems of the test split; none of their calculations occurs in the train split."""
    worked_fraction: float = Field(ge=0, le=1)
    """Fraction of the solutions that show their steps; the others are the bare answer."""
    families: list[Family] = Field(min_length=1)
    """Kinds of problem, in equal shares; each becomes a subject of the scores."""
    min_operands: int = Field(ge=2, le=MAX_OPERANDS)
    """Numbers in an easiest problem (level 1); each number more is a level more."""
    max_operands: int = Field(ge=2, le=MAX_OPERANDS)
    """Numbers in a hardest problem."""

    def most(self, split: Split) -> int | None:
        """How many problems of one split there are."""
        return self.num_train if split == Split.TRAIN else self.num_test

    @model_validator(mode="after")
    def _can_be_made(self) -> "WordProblemsConfig":
        if self.max_operands < self.min_operands:
            raise ValueError(f"max_operands must not be below min_operands ({self.min_operands})")
        if len(set(self.families)) < len(self.families):
            raise ValueError("families must not name a family twice")
        if self.num_train + self.num_test == 0:
            raise ValueError("num_train and num_test must not both be 0")
        return self


class FileSource(Config):
    """A dataset that is read from files; a split without a path is not used."""

    train: Path | None = None
    """File or folder of the train split."""
    test: Path | None = None
    """File or folder of the test split."""
    train_limit: int | None = Field(default=None, ge=1)
    """Problems taken of the train split, from its beginning; all of them where absent."""
    test_limit: int | None = Field(default=None, ge=1)
    """Problems taken of the test split, from its beginning; all of them where absent."""

    @model_validator(mode="after")
    def _names_a_file(self) -> "FileSource":
        if self.train is None and self.test is None:
            raise ValueError("names neither a `train` nor a `test` path")
        return self

    def path(self, split: Split) -> Path | None:
        """Where one split lies, if it is used."""
        return self.train if split == Split.TRAIN else self.test

    def most(self, split: Split) -> int | None:
        """How many problems of one split there may be; None where its file alone decides."""
        return 0 if self.path(split) is None else self.limit(split)

    def limit(self, split: Split) -> int | None:
        """How many problems of one split are taken at most."""
        return self.train_limit if split == Split.TRAIN else self.test_limit


class GSM8KConfig(FileSource):
    """GSM8K as published: JSON lines with `question` and `answer`."""

    kind: Literal["gsm8k"]


class MATHConfig(FileSource):
    """MATH as JSON lines, as parquet, or as the original folder of a split with one JSON file per problem."""

    kind: Literal["math"]


class MATH500Config(FileSource):
    """The MATH-500 selection: JSON lines with `problem`, `solution`, `answer`, `subject` and `level`."""

    kind: Literal["math500"]


class MBPPConfig(FileSource):
    """MBPP, whole or sanitized: programming tasks with `text` or `prompt`, `code` and `test_list`."""

    kind: Literal["mbpp"]


Source = Annotated[
    GSM8KConfig | MATHConfig | MATH500Config | MBPPConfig | WordProblemsConfig, Field(discriminator="kind")
]


class DataRepository(Config):
    """A git repository whose files, or DVC's pointers to them, are read at one commit."""

    url: str = Field(min_length=1)
    """URL or folder of the repository."""
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    """The whole hash: what a branch or a tag means may be another thing tomorrow."""


class ContaminationConfig(Config):
    """When a train problem is too close to a test problem to be kept."""

    ngram_words: int = Field(ge=1)
    """Words in a row that are compared; questions with fewer are compared as a whole."""
    max_overlap: float = Field(ge=0, le=1)
    """Fraction of a test question's n-grams that a train question may share."""


class PrepareConfig(Config):
    """The section `prepare_data`."""

    seed: int
    """Seed of everything that is generated; files are read in their own order."""
    repository: DataRepository | None = None
    """Where the files of the sources are read from; null for this machine."""
    sources: list[Source] = Field(min_length=1)
    """Datasets, joined in this order."""
    max_malformed_fraction: float = Field(ge=0, lt=1)
    """Fraction of the rows of one file that may be unusable; they are set aside with a reason."""
    contamination: ContaminationConfig

    @field_validator("sources")
    @classmethod
    def _kinds_differ(cls, sources: list[Source]) -> list[Source]:
        kinds = [source.kind for source in sources]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice:
            raise ValueError(f"`{twice}` is named twice; give both splits in one entry")
        return sources

    @model_validator(mode="after")
    def _files_are_in_the_repository(self) -> "PrepareConfig":
        outside = [path for path in self.files if path.is_absolute() or ".." in path.parts]
        if self.repository and outside:
            raise ValueError(f"sources: {outside[0]} is not in the repository; name a path relative to its top folder")
        return self

    @property
    def files(self) -> list[Path]:
        """The files and folders that the sources name, in their order."""
        named = [source for source in self.sources if isinstance(source, FileSource)]
        return [path for source in named for split in Split if (path := source.path(split)) is not None]
