"""Prepare the problems: read every source, keep test problems out of training, and record what was left out."""

from collections import Counter
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


@dataclass(slots=True)
class _Intake:
    """Everything that was read, before contaminated problems are removed."""

    problems: dict[Split, list[Problem]] = field(default_factory=lambda: {split: [] for split in Split})
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    """File, line and reason of each row that was not used."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """Path, source, split and digest of each file or folder, and the rows that were read of it."""


def prepare(config: PrepareConfig, *, problems: Path) -> dict[str, float]:
    """Turn raw datasets into problems with a train and a test split that share nothing."""
    intake = _read_sources(config)
    train, test = intake.problems[Split.TRAIN], intake.problems[Split.TEST]
    contaminated = find_contamination(train, test, config.contamination)
    removed = {each.train for each in contaminated}
    splits = {Split.TRAIN: [problem for problem in train if problem.id not in removed], Split.TEST: test}
    for split, members in splits.items():
        write_problems(problems, split, members)
    jsonl.write_rows(problems / "quarantine.jsonl", intake.quarantine)
    jsonl.write_json(problems / "contamination.json", _contamination(config, contaminated))
    manifest = {
        "splits": {split: _split_entry(problems, split, members) for split, members in splits.items()},
        "removed_as_contaminated": len(contaminated),
        "quarantined": len(intake.quarantine),
        "raw_files": intake.files,
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
                    if path := source.path(split):
                        problems, quarantine = _read_split(source, split, path, root, verify)
                        num_rows = len(problems) + len(quarantine)
                        _check_quarantine(path, quarantine, num_rows, config.max_malformed_fraction)
                        intake.problems[split] += problems
                        intake.quarantine += quarantine
                        file = {"path": path.as_posix(), "source": source.kind, "split": split}
                        intake.files.append({**file, "sha256": lineage.digest(root / path), "rows": num_rows})
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
    source: FileSource, split: Split, path: Path, root: Path, verify: Verifier
) -> tuple[list[Problem], list[dict[str, Any]]]:
    """Return the problems of one split up to its limit, and the rows that were malformed."""
    problems: list[Problem] = []
    quarantine: list[dict[str, Any]] = []
    for row in raw_rows(root / path):
        try:
            fields = source.read_row(row.columns(), verify)
        except MalformedRowError as error:
            # The path as in the config, not that of a temporary checkout.
            file = path / row.path.relative_to(root / path)
            quarantine.append({"file": file.as_posix(), "line": row.line, "reason": str(error)})
            continue
        name = f"{source.kind}/{split}/{row.name}"
        problems.append(Problem(id=name, source=source.kind, split=split, **fields._asdict()))
        if len(problems) == source.limit(split):
            break
    return problems, quarantine


def _check_quarantine(path: Path, quarantine: list[dict[str, Any]], num_rows: int, max_fraction: float) -> None:
    if not num_rows:
        raise PipelineError(f"{path}: contains no row")
    if len(quarantine) > max_fraction * num_rows:
        first = quarantine[0]
        raise PipelineError(
            f"{path}: {len(quarantine)} of {num_rows} rows are malformed, more than "
            f"prepare_data.max_malformed_fraction ({max_fraction:g}) allows; "
            f"first: {first['file']}:{first['line']}: {first['reason']}"
        )


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
