"""Prepare the problems: read every source, keep test problems out of training, and record what is left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from decimal import ROUND_UP, Context
from pathlib import Path
from typing import Any

from components.prepare_data.config import ContaminationConfig, PrepareConfig
from components.prepare_data.contamination import Contamination, find_contamination
from components.prepare_data.dataset import Dataset
from components.prepare_data.difficulty import within_band
from components.prepare_data.raw_files import RawFolder, raw_folder
from components.prepare_data.source import FileSource, MalformedRow
from components.shared import durable, jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Material
from components.shared.problem import Problem, Split, problems_file, write_problems
from components.shared.progress import say
from components.shared.stage import Stage

Rows = list[dict[str, Any]]
HUB_PREFIX = "datasets/"
"""Prefix of datasets among the repositories of the hub, as in their URLs."""
_SPLIT_KEYS = {
    Split.TRAIN: "the `train` path",
    Split.TEST: "the `test` path or test_fraction",
    Split.DEV: "dev_fraction",
}


def prepare(config: PrepareConfig, *, problems: Path) -> dict[str, float]:
    """Turn raw datasets into problems in a train, a test and optionally a dev split; return the numbers of problems."""
    splits, malformed, raw_files, difficulty = _read_sources(config)
    contaminated = _remove_contamination(splits, config.contamination)
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
        "quarantined": len(malformed),
        "difficulty": difficulty,
        "raw_files": raw_files,
    }
    jsonl.write_rows(problems / "quarantine.jsonl", malformed)
    jsonl.write_json(problems / "contamination.json", contamination)
    jsonl.write_json(problems / "manifest.json", manifest)
    sizes = {split: len(members) for split, members in splits.items()}
    *all_but_last, last = (f"{size:,} {split}" for split, size in sizes.items())
    left_out = f"{len(contaminated)} contaminated, {len(malformed)} malformed"
    if difficulty:
        for reason in ("too_easy", "too_hard", "unmeasured"):
            left_out += f", {difficulty[reason]} {reason.replace('_', ' ')}"
    say("prepare_data", f"{', '.join(all_but_last)} and {last} problems (left out: {left_out})")
    return {
        **{f"num_{split}": size for split, size in sizes.items()},
        "num_contaminated": len(contaminated),
        "num_quarantined": len(malformed),
    }


def raw_materials(config: PrepareConfig, outputs: Mapping[str, Path]) -> dict[str, Material]:
    """Return the raw files that the problems were read from, by path."""
    rows = jsonl.read_json(outputs["problems"] / "manifest.json")["raw_files"]
    return {row["path"]: Material(**{key: row[key] for key in Material.model_fields}) for row in rows}


STAGE = Stage(
    name="prepare_data",
    function=prepare,
    config=PrepareConfig,
    inputs={},
    outputs=("problems",),
    materials=raw_materials,
)


def _read_sources(config: PrepareConfig) -> tuple[dict[Split, list[Problem]], Rows, Rows, Mapping[str, Any] | None]:
    """Return the problems by split, the malformed rows, the raw files, and the record of `within_band`, if any."""
    splits: dict[Split, list[Problem]] = {split: [] for split in Split}
    quarantine: Rows = []
    raw_files: Rows = []
    difficulty = None
    with raw_folder(config) as raw:
        for source in config.sources:
            if not isinstance(source, FileSource):
                for problem in source.problems(config.seed):
                    splits[problem.split].append(problem)
                continue
            for split in filter(source.path, Split):  # the splits that have a path
                rows = list(source.read(split, raw.path, seed=config.seed))
                problems = [row for row in rows if isinstance(row, Problem)]
                malformed = [row for row in rows if isinstance(row, MalformedRow)]
                _check_rows(source, split, rows, malformed, config.max_malformed_fraction)
                splits[split] += problems
                quarantine += [{**row._asdict(), "file": row.file.as_posix()} for row in malformed]
                name, material = _material(config, raw, source, split)
                file = {"path": name, "source": source.name, "split": split, "rows": len(problems) + len(malformed)}
                raw_files.append({**file, **material.model_dump()})
        if config.difficulty:
            path = config.difficulty.pass_rates
            splits[Split.TRAIN], difficulty = within_band(splits[Split.TRAIN], config.difficulty, raw.path)
            file = {"path": path.as_posix(), "source": None, "split": Split.TRAIN, "rows": difficulty["rates"]}
            raw_files.append({**file, **_file_material(config, raw, path).model_dump()})
    has_dev = any(source.max_problems(Split.DEV) != 0 for source in config.sources)
    wanted = [split for split in Split if has_dev or split != Split.DEV]
    for split in wanted:
        if not splits[split]:
            raise PipelineError(
                f"prepare_data.sources: no source has a {split} problem; set {_SPLIT_KEYS[split]} of one, "
                f"or num_{split} of a built-in source above 0"
            )
    return {split: splits[split] for split in wanted}, quarantine, raw_files, difficulty


def _material(config: PrepareConfig, raw: RawFolder, source: FileSource, split: Split) -> tuple[str, Material]:
    """Return the path of a split's file or folder, or `ID@REVISION` of its hub dataset, and the exact version."""
    path = source.path(split)
    assert path is not None, "the split has been read"
    if isinstance(source, Dataset) and (dataset := source.on_hub(split, raw.path)):
        return f"{path}@{source.revision}", Material(repository=f"{HUB_PREFIX}{path}", commit=dataset.commit)
    return path.as_posix(), _file_material(config, raw, path)


def _file_material(config: PrepareConfig, raw: RawFolder, path: Path) -> Material:
    """Return the exact version of a file or folder, with the repository and commit if it comes from one."""
    repository = config.repository
    return Material(
        sha256=lineage.digest(raw.path / path),
        size_bytes=durable.size(raw.path / path),
        dvc_md5=raw.md5s.get(path),
        repository=repository.url if repository else None,
        commit=repository.commit if repository else None,
    )


def _remove_contamination(splits: dict[Split, list[Problem]], config: ContaminationConfig) -> list[Contamination]:
    """Remove dev problems too close to test problems, and train problems too close to either; return all of them."""
    entries = []
    held_out = list(splits[Split.TEST])
    for split in (Split.DEV, Split.TRAIN):
        if split not in splits:  # DEV may be missing
            continue
        contaminated = find_contamination(splits[split], held_out, config)
        removed = {each.train for each in contaminated}
        remaining = [problem for problem in splits[split] if problem.id not in removed]
        if not remaining:
            first = contaminated[0]
            raise PipelineError(
                f"prepare_data.sources: all {len(splits[split]):,} {split} problems were removed as contaminated: each "
                f"is among those held out from it ({first.train} as {first.test}); `train` and `test` have to be "
                "different problems: to divide one file, set `test_fraction` instead of `test`"
            )
        splits[split] = remaining
        held_out += remaining
        entries += contaminated
    return entries


def _check_rows(
    source: FileSource,
    split: Split,
    rows: list[Problem | MalformedRow | None],
    malformed: list[MalformedRow],
    max_fraction: float,
) -> None:
    """Raise PipelineError if a split has no row, or too many of the rows read from its files are malformed."""
    path = source.path(split)
    if not any(rows):
        problem = f"{path}: contains no row for the {split} split"
        if source.test_fraction or source.dev_fraction:
            problem += "; rows with the same question stay in one split: does the file have different questions?"
        raise PipelineError(problem)
    if malformed and len(malformed) / len(rows) > max_fraction:
        first = malformed[0]
        accepted = Context(prec=3, rounding=ROUND_UP).divide(len(malformed), len(rows))
        remedy = f"; correct them, or set it to {accepted:f} or more" if accepted < 1 else ""
        raise PipelineError(
            f"{path}: {len(malformed)} of {len(rows)} rows are malformed, more than "
            f"prepare_data.max_malformed_fraction ({max_fraction:g}) allows{remedy}; "
            f"first: {first.file}:{first.line}: {first.reason}"
        )
