"""Prepare the problems: read every source, keep test problems out of training, and record what was left out."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.grading.verifier import Verifier
from components.prepare_data.config import PrepareConfig
from components.prepare_data.contamination import Contamination, find_contamination
from components.prepare_data.raw_files import raw_folder
from components.prepare_data.source import FileSource, MalformedRowError, raw_rows
from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, problems_file, write_problems
from components.shared.progress import say
from components.shared.stage import Stage


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
    """Rows read: fewer than it has if the config sets a limit."""


@dataclass(slots=True)
class _Intake:
    """Everything that was read, before contaminated problems are removed."""

    problems: dict[Split, list[Problem]] = field(default_factory=lambda: {split: [] for split in Split})
    quarantine: list[Quarantined] = field(default_factory=list)
    files: list[RawFile] = field(default_factory=list)


def prepare(config: PrepareConfig, *, problems: Path) -> dict[str, float]:
    """Turn raw datasets into problems with a train and a test split that share nothing."""
    intake = _read_sources(config)
    train, test = intake.problems[Split.TRAIN], intake.problems[Split.TEST]
    contaminated = find_contamination(train, test, config.contamination)
    removed = {each.train for each in contaminated}
    splits = {Split.TRAIN: [problem for problem in train if problem.id not in removed], Split.TEST: test}
    for split, members in splits.items():
        write_problems(problems, split, members)
    jsonl.write_rows(problems / "quarantine.jsonl", [asdict(row) for row in intake.quarantine])
    jsonl.write_json(problems / "contamination.json", _contamination(config, contaminated))
    manifest = {
        "splits": {split: _split_entry(problems, split, members) for split, members in splits.items()},
        "removed_as_contaminated": len(contaminated),
        "quarantined": len(intake.quarantine),
        "raw_files": [asdict(file) for file in intake.files],
    }
    jsonl.write_json(problems / "manifest.json", manifest)
    sizes = {split: len(members) for split, members in splits.items()}
    say(
        "prepare_data",
        f"{sizes[Split.TRAIN]:,} train and {sizes[Split.TEST]:,} test problems "
        f"(left out: {len(contaminated)} contaminated, {len(intake.quarantine)} malformed)",
    )
    return {
        **{f"num_{split}": size for split, size in sizes.items()},
        "num_contaminated": len(contaminated),
        "num_quarantined": len(intake.quarantine),
    }


STAGE = Stage(
    name="prepare_data",
    function=prepare,
    config=PrepareConfig,
    inputs=(),
    outputs=("problems",),
)


def _read_sources(config: PrepareConfig) -> _Intake:
    """Read every source of the config in its order, the train split of each before its test split."""
    intake = _Intake()
    with raw_folder(config) as root, Verifier() as verify:
        for source in config.sources:
            if isinstance(source, FileSource):
                for split in Split:
                    _read_split(source, split, root, verify, config.max_malformed_fraction, intake)
            else:
                for problem in source.problems(config.seed):
                    intake.problems[problem.split].append(problem)
    for split, members in intake.problems.items():
        if not members:
            raise PipelineError(
                f"prepare_data.sources: no source has a {split} problem; set the `{split}` path of one, "
                f"or num_{split} of word_problems above 0"
            )
    return intake


def _read_split(
    source: FileSource, split: Split, root: Path, verify: Verifier, max_malformed_fraction: float, intake: _Intake
) -> None:
    path = source.path(split)
    if path is None:
        return
    problems: list[Problem] = []
    quarantine: list[Quarantined] = []
    for row in _parsed_rows(source, split, root, verify):
        if isinstance(row, Quarantined):
            quarantine.append(row)
        else:
            problems.append(row)
            if len(problems) == source.limit(split):
                break
    num_rows = len(problems) + len(quarantine)
    if not num_rows:
        raise PipelineError(f"{path}: contains no row")
    if len(quarantine) > max_malformed_fraction * num_rows:
        first = quarantine[0]
        raise PipelineError(
            f"{path}: {len(quarantine)} of {num_rows} rows are malformed, more than "
            f"prepare_data.max_malformed_fraction ({max_malformed_fraction:g}) allows; "
            f"first: {first.file}:{first.line}: {first.reason}"
        )
    intake.problems[split] += problems
    intake.quarantine += quarantine
    intake.files.append(RawFile(path.as_posix(), source.kind, split, lineage.digest(root / path), num_rows))


def _parsed_rows(source: FileSource, split: Split, root: Path, verify: Verifier) -> Iterator[Problem | Quarantined]:
    path = source.path(split)
    assert path is not None
    for row in raw_rows(root / path):
        try:
            fields = source.read_row(row.columns(), verify)
        except MalformedRowError as error:
            # The path as in the config, not that of a temporary checkout.
            file = path / row.path.relative_to(root / path)
            yield Quarantined(file.as_posix(), row.line, str(error))
        else:
            yield Problem(id=f"{source.kind}/{split}/{row.name}", source=source.kind, split=split, **fields._asdict())


def _contamination(config: PrepareConfig, contaminated: list[Contamination]) -> dict[str, Any]:
    return {
        **config.contamination.model_dump(),
        "removed": len(contaminated),
        "by_match": dict(sorted(Counter(each.match.value for each in contaminated).items())),
        "problems": [asdict(each) for each in contaminated],
    }


def _split_entry(folder: Path, split: Split, problems: list[Problem]) -> dict[str, Any]:
    return {
        "problems": len(problems),
        "sha256": lineage.file_digest(problems_file(folder, split)),
        "sources": dict(Counter(problem.source for problem in problems)),
    }
