"""Prepare the problems: read every source, keep test problems out of training, and record what was left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.grading.verifier import Verifier
from components.prepare_data.config import PrepareConfig
from components.prepare_data.contamination import find_contamination
from components.prepare_data.raw_files import RawFolder, raw_folder
from components.prepare_data.source import FileSource, MalformedRow
from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Material
from components.shared.problem import Problem, Split, problems_file, write_problems
from components.shared.progress import say
from components.shared.stage import Stage

Rows = list[dict[str, Any]]


def prepare(config: PrepareConfig, *, problems: Path) -> dict[str, float]:
    """Turn raw datasets into problems with a train and a test split that share nothing."""
    splits, quarantine, raw_files = _read_sources(config)
    contaminated = find_contamination(splits[Split.TRAIN], splits[Split.TEST], config.contamination)
    removed = {each.train for each in contaminated}
    splits[Split.TRAIN] = [problem for problem in splits[Split.TRAIN] if problem.id not in removed]
    for split, members in splits.items():
        write_problems(problems, split, members)
    contamination = {
        **config.contamination.model_dump(),
        "removed": len(contaminated),
        "by_match": dict(sorted(Counter(each.match for each in contaminated).items())),
        "problems": [asdict(each) for each in contaminated],
    }
    manifest = {
        "splits": {
            split: {
                "problems": len(members),
                "sha256": lineage.file_digest(problems_file(problems, split)),
                "sources": Counter(problem.source for problem in members),
            }
            for split, members in splits.items()
        },
        "removed_as_contaminated": len(contaminated),
        "quarantined": len(quarantine),
        "raw_files": raw_files,
    }
    jsonl.write_rows(problems / "quarantine.jsonl", quarantine)
    jsonl.write_json(problems / "contamination.json", contamination)
    jsonl.write_json(problems / "manifest.json", manifest)
    num_train, num_test = len(splits[Split.TRAIN]), len(splits[Split.TEST])
    left_out = f"{len(contaminated)} contaminated, {len(quarantine)} malformed"
    say("prepare_data", f"{num_train:,} train and {num_test:,} test problems (left out: {left_out})")
    return {
        "num_train": num_train,
        "num_test": num_test,
        "num_contaminated": len(contaminated),
        "num_quarantined": len(quarantine),
    }


def raw_materials(config: PrepareConfig, outputs: Mapping[str, Path]) -> dict[str, Material]:
    """Return the raw files that the problems were made from, by their paths."""
    rows = jsonl.read_json(outputs["problems"] / "manifest.json")["raw_files"]
    return {row["path"]: Material(**{key: row[key] for key in Material.model_fields}) for row in rows}


STAGE = Stage(
    name="prepare_data",
    function=prepare,
    config=PrepareConfig,
    inputs=(),
    outputs=("problems",),
    materials=raw_materials,
)


def _read_sources(config: PrepareConfig) -> tuple[dict[Split, list[Problem]], Rows, Rows]:
    """Return the problems of every source, the train split of each before its test split; quarantine; raw files."""
    splits: dict[Split, list[Problem]] = {split: [] for split in Split}
    quarantine: Rows = []
    raw_files: Rows = []
    with raw_folder(config) as raw, Verifier() as verify:
        for source in config.sources:
            if not isinstance(source, FileSource):
                for problem in source.problems(config.seed):
                    splits[problem.split].append(problem)
                continue
            for split in Split:
                if path := source.path(split):
                    rows = list(source.read(split, raw.path, verify))
                    malformed = [row for row in rows if isinstance(row, MalformedRow)]
                    _check_malformed(path, malformed, len(rows), config.max_malformed_fraction)
                    splits[split] += [row for row in rows if isinstance(row, Problem)]
                    quarantine += [{**row._asdict(), "file": row.file.as_posix()} for row in malformed]
                    file = {"path": path.as_posix(), "source": source.kind, "split": split, "rows": len(rows)}
                    raw_files.append({**file, **_material(config, raw, path).model_dump()})
    for split, members in splits.items():
        if not members:
            raise PipelineError(
                f"prepare_data.sources: no source has a {split} problem; set the `{split}` path of one, "
                f"or num_{split} of word_problems above 0"
            )
    return splits, quarantine, raw_files


def _material(config: PrepareConfig, raw: RawFolder, path: Path) -> Material:
    """What a raw file or folder is, and where it came from."""
    repository = config.repository
    return Material(
        sha256=lineage.digest(raw.path / path),
        size_bytes=durable.size(raw.path / path),
        dvc_md5=raw.md5s.get(path),
        repository=repository and repository.url,
        commit=repository and repository.commit,
    )


def _check_malformed(path: Path, malformed: list[MalformedRow], num_rows: int, max_fraction: float) -> None:
    if not num_rows:
        raise PipelineError(f"{path}: contains no row")
    if len(malformed) > max_fraction * num_rows:
        first = malformed[0]
        raise PipelineError(
            f"{path}: {len(malformed)} of {num_rows} rows are malformed, more than "
            f"prepare_data.max_malformed_fraction ({max_fraction:g}) allows; "
            f"first: {first.file}:{first.line}: {first.reason}"
        )
