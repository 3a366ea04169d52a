"""The section `prepare_data` of a params file: the datasets, and which of their problems are left out."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from components.prepare_data.calculator_problems import CalculatorProblems
from components.prepare_data.dataset import Dataset
from components.prepare_data.difficulty import DifficultyConfig
from components.prepare_data.gsm8k import GSM8K
from components.prepare_data.hub import is_hub_id
from components.prepare_data.math_dataset import MATH
from components.prepare_data.mbpp import MBPP
from components.prepare_data.one_step_problems import OneStepProblems
from components.prepare_data.reasoning_gym import ReasoningGym
from components.prepare_data.source import FileSource
from components.prepare_data.svamp import SVAMP
from components.prepare_data.word_problems import WordProblems
from components.shared.config import Config
from components.shared.problem import Split

Source = Annotated[
    CalculatorProblems | Dataset | GSM8K | MATH | MBPP | OneStepProblems | ReasoningGym | SVAMP | WordProblems,
    Field(discriminator="kind"),
]
"""All kinds of sources; the key `kind` selects one."""


class DataRepository(Config):
    """A git repository with the raw files, or DVC pointers to them, at one commit."""

    url: str = Field(min_length=1)
    """URL or folder of the repository."""
    commit: str
    """Full hash of a commit, as branches and tags may move. The form of a run on a cluster also takes a branch or a
    tag, and looks it up once."""

    @field_validator("commit")
    @classmethod
    def _check_commit(cls, value: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{40}", value):
            raise ValueError(
                f"not the full hash of a commit: give what `git rev-parse {value}` prints; a run on a cluster takes a "
                f"branch or a tag instead of this section, by `--set data_repository=... --set data_revision={value}`"
            )
        return value


class ContaminationConfig(Config):
    """When a train problem is removed as too close to a test or dev problem, and a dev problem to a test problem."""

    ngram_words: int = Field(13, ge=1)
    """Words of an n-gram; shorter questions are only compared as a whole."""
    max_overlap: float = Field(0.5, ge=0, le=1)
    """Largest fraction of the n-grams of a test or dev question that another question may have."""


class PrepareConfig(Config):
    """The section `prepare_data`."""

    seed: int = 1
    """Seed of generated problems and of `test_fraction`; files are read in their own order."""
    repository: DataRepository | None = None
    """Git and DVC repository from which the files of the sources are read; null reads them from this machine."""
    sources: list[Source] = Field(min_length=1)
    """Datasets, joined in this order."""
    max_malformed_fraction: float = Field(0.001, ge=0, lt=1)
    """Largest fraction of the rows of a file that may be malformed; they go to quarantine.jsonl with a reason."""
    contamination: ContaminationConfig = ContaminationConfig()
    difficulty: DifficultyConfig | None = None
    """Choice of train problems by the pass rates of a model; null keeps all. It applies to fine-tuning too."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: list[Source]) -> list[Source]:
        (name, number), *_ = Counter(source.name for source in sources).most_common(1)
        if number > 1:
            raise ValueError(f"`{name}` occurs twice; put both splits into one entry, or give one another `name`")
        return sources

    @model_validator(mode="after")
    def _files_are_in_the_repository(self) -> "PrepareConfig":
        outside = [path for path in self.files if path.is_absolute() or ".." in path.parts]
        if self.repository and outside:
            raise ValueError(f"sources: {outside[0]} is not in the repository; give a path relative to its top folder")
        return self

    @property
    def files(self) -> list[Path]:
        """The paths of all sources in order, some of which may be ids of datasets on the hub; then the pass rates."""
        sources = [source for source in self.sources if isinstance(source, FileSource)]
        paths = (source.path(split) for source in sources for split in (Split.TRAIN, Split.TEST))
        rates = [self.difficulty.pass_rates] if self.difficulty else []
        return [*(path for path in paths if path is not None), *rates]

    @property
    def hub_ids(self) -> set[Path]:
        """The `files` that are read from the hub unless there is a folder with that name."""
        datasets = [source for source in self.sources if isinstance(source, Dataset)]
        paths = {source.path(split) for source in datasets for split in (Split.TRAIN, Split.TEST)}
        return {path for path in paths if path is not None and is_hub_id(path)}
