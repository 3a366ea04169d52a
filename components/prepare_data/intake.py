"""Intake: raw files in, problems out; rows that cannot be used are set aside with file, line and reason."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.grading.verifier import Verifier
from components.prepare_data.config import (
    FileSource,
    GSM8KConfig,
    MATH500Config,
    MATHConfig,
    MBPPConfig,
    PrepareConfig,
)
from components.prepare_data.fields import Fields
from components.prepare_data.gsm8k import gsm8k_fields
from components.prepare_data.math_dataset import math500_fields, math_fields
from components.prepare_data.mbpp import mbpp_fields
from components.prepare_data.raw_rows import MalformedRowError, raw_rows
from components.prepare_data.repository import raw_files
from components.prepare_data.word_problems import word_problems
from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

Reader = Callable[[dict[str, Any]], Fields]


def reader(kind: str, verify: Verifier) -> Reader:
    """Return what makes a problem of a row's columns in the format `kind`, or raises MalformedRowError."""
    readers: dict[str, Reader] = {
        "gsm8k": gsm8k_fields,
        "math": partial(math_fields, verify=verify),
        "math500": partial(math500_fields, verify=verify),
        "mbpp": mbpp_fields,
    }
    return readers[kind]


def no_such_file(path: Path) -> str:
    """Return the error for a raw file that is missing."""
    return f"{path}: no such file; `make data` fetches GSM8K and MATH-500, data/README.md tells of the others"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row that was not used."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file or folder that was read, with the digest of its content."""

    path: str
    source: str
    split: Split
    sha256: str
    rows: int
    """Rows read: fewer than it has where the config sets a limit."""


@dataclass(slots=True)
class Intake:
    """All that was read."""

    problems: list[Problem] = field(default_factory=list)
    quarantine: list[Quarantined] = field(default_factory=list)
    files: list[RawFile] = field(default_factory=list)

    def of(self, split: Split) -> list[Problem]:
        """The problems of one split; none at all is an error."""
        problems = [problem for problem in self.problems if problem.split == split]
        if not problems:
            raise PipelineError(
                f"prepare_data.sources: none gives a {split} problem; give one a `{split}` path, "
                f"or word_problems a num_{split} above 0"
            )
        return problems


def read_sources(config: PrepareConfig) -> Intake:
    """Read every source of the config in its order, the train split of each before its test split."""
    intake = Intake()
    with raw_files(config) as root, Verifier() as verify:
        for source in config.sources:
            if isinstance(source, FileSource):
                for split in Split:
                    _read_split(source, split, reader(source.kind, verify), config.max_malformed_fraction, root, intake)
            else:
                intake.problems += word_problems(source, config.seed)
    return intake


def _read_split(
    source: GSM8KConfig | MATHConfig | MATH500Config | MBPPConfig,
    split: Split,
    read: Reader,
    max_malformed_fraction: float,
    root: Path,
    intake: Intake,
) -> None:
    path = source.path(split)
    if path is None:
        return
    if not (root / path).exists():
        raise PipelineError(no_such_file(path))
    problems: list[Problem] = []
    quarantine: list[Quarantined] = []
    for problem in _problems(source, split, root, read):
        if isinstance(problem, Problem):
            problems.append(problem)
        else:
            quarantine.append(problem)
        if len(problems) == source.limit(split):
            break
    _check(path, len(problems), quarantine, max_malformed_fraction)
    intake.problems += problems
    intake.quarantine += quarantine
    rows = len(problems) + len(quarantine)
    intake.files.append(RawFile(path.as_posix(), source.kind, split, lineage.digest(root / path), rows))


def _problems(
    source: GSM8KConfig | MATHConfig | MATH500Config | MBPPConfig, split: Split, root: Path, read: Reader
) -> Iterator[Problem | Quarantined]:
    path = source.path(split)
    assert path is not None
    for row in raw_rows(root / path):
        try:
            fields = read(row.columns())
        except MalformedRowError as error:
            # Named as in the config: where a repository's files happen to lie is nobody's business.
            name = path / row.path.relative_to(root / path)
            yield Quarantined(name.as_posix(), row.line, str(error))
        else:
            yield Problem(id=f"{source.kind}/{split}/{row.name}", source=source.kind, split=split, **fields._asdict())


def _check(path: Path, num_problems: int, quarantine: list[Quarantined], max_malformed_fraction: float) -> None:
    rows = num_problems + len(quarantine)
    if not rows:
        raise PipelineError(f"{path}: holds no row")
    if len(quarantine) > max_malformed_fraction * rows:
        first = quarantine[0]
        raise PipelineError(
            f"{len(quarantine)} of {rows} rows of {path} are malformed, more than max_malformed_fraction "
            f"({max_malformed_fraction:g}) allows; the first: {first.file}:{first.line}: {first.reason}"
        )


def as_rows(quarantine: list[Quarantined]) -> list[dict[str, Any]]:
    """Return what quarantine.jsonl holds."""
    return [asdict(row) for row in quarantine]
