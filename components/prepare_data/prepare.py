"""Prepare the problems: read every source, keep test problems out of training, and write down what was done."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from components.prepare_data.config import PrepareConfig
from components.prepare_data.contamination import Contamination, find_contamination
from components.prepare_data.intake import Intake, as_rows, read_sources
from components.shared import jsonl, lineage
from components.shared.problem import Problem, Split, problems_file, write_problems
from components.shared.progress import say
from components.shared.step import Out

_STAGE = "prepare_data"


def prepare(config: PrepareConfig, *, problems: Out) -> dict[str, float]:
    """Turn raw datasets into problems with a train and a test split that share nothing."""
    intake = read_sources(config)
    test = intake.of(Split.TEST)
    contaminated = find_contamination(intake.of(Split.TRAIN), test, config.contamination)
    removed = {found.train for found in contaminated}
    train = [problem for problem in intake.of(Split.TRAIN) if problem.id not in removed]
    splits = {Split.TRAIN: train, Split.TEST: test}
    for split, kept in splits.items():
        write_problems(problems, split, kept)
    jsonl.write_rows(problems / "quarantine.jsonl", as_rows(intake.quarantine))
    jsonl.write_json(problems / "contamination.json", _contamination(config, contaminated))
    digests = {split: lineage.file_digest(problems_file(problems, split)) for split in Split}
    jsonl.write_json(problems / "manifest.json", _manifest(intake, splits, digests, contaminated))
    say(
        _STAGE,
        f"{len(train):,} train and {len(test):,} test problems "
        f"(left out: {len(contaminated)} contaminated, {len(intake.quarantine)} malformed)",
    )
    return {
        "num_train": len(train),
        "num_test": len(test),
        "num_contaminated": len(contaminated),
        "num_quarantined": len(intake.quarantine),
    }


def _contamination(config: PrepareConfig, contaminated: list[Contamination]) -> dict[str, Any]:
    return {
        **config.contamination.model_dump(),
        "removed": len(contaminated),
        "by_match": dict(sorted(Counter(found.match.value for found in contaminated).items())),
        "problems": [asdict(found) for found in contaminated],
    }


def _manifest(
    intake: Intake,
    splits: dict[Split, list[Problem]],
    digests: dict[Split, str],
    contaminated: list[Contamination],
) -> dict[str, Any]:
    return {
        "splits": {
            split: {
                "problems": len(kept),
                "sha256": digests[split],
                "sources": dict(Counter(problem.source for problem in kept)),
            }
            for split, kept in splits.items()
        },
        "removed_as_contaminated": len(contaminated),
        "quarantined": len(intake.quarantine),
        "raw_files": [asdict(file) for file in intake.files],
    }
