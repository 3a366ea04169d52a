"""Two registered versions side by side: what each was made from, and how often each is right on the same problems."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components.evaluate.protocols import PIPELINE
from components.register.snapshot import Snapshot, Version
from components.register.storage import storage_url
from components.report.champion import same_protocol
from components.report.findings import Evaluation, Pair, outcomes_of, problems_of, read_evaluation
from components.report.gate import Outcome
from components.shared.errors import PipelineError
from components.shared.execution import environment_differences
from components.shared.lineage import FILE_NAME, Lineage, flat, parse
from components.shared.statistics import mcnemar_p, paired_gain_interval, score

EVALUATION = "evaluation/grpo"
"""Folder of a version with the records of its policy."""


@dataclass(frozen=True)
class Facts:
    """The files of a version in git, except the pointers to its weights."""

    version: Version
    aliases: tuple[str, ...]
    registration: dict[str, Any]
    """The content of version.json."""
    verdict: dict[str, Any]
    summary: dict[str, Any]
    lineage_file: Any
    storage: str

    @cached_property
    def made_by(self) -> Lineage:
        """The lineage of the version."""
        return parse(self.lineage_file, name=f"{self.version.tag}: {FILE_NAME}")

    @property
    def settings(self) -> dict[str, str]:
        """Every value of every stage's config, as JSON, by its key in a params file."""
        return {key: value for work in self.made_by.works for key, value in flat(work.stage, work.config)}

    @property
    def protocol(self) -> str:
        """The protocol by which the version was evaluated."""
        return json.loads(self.settings.get("evaluate.protocol", "null")) or PIPELINE

    @property
    def data(self) -> dict[str, str]:
        """Digests, or commits at a hub, of the data and models that the version was made from, by name."""
        materials = {name: each for work in self.made_by.works for name, each in work.materials.items()}
        named = {name: each.sha256 or each.commit or "unknown" for name, each in materials.items()}
        problems = (work.inputs["problems"].digest for work in self.made_by.works if "problems" in work.inputs)
        return {"problems": next(problems, "unknown"), **named}


def facts_of(snapshot: Snapshot, *versions: Version) -> list[Facts]:
    """Return the files of versions in git, unverified."""
    aliases = snapshot.aliases_by_version()
    paths = (*(f"{name}.json" for name in ("version", "verdict", "summary", "lineage")), ".dvc/config")
    facts = []
    for version, contents in zip(versions, snapshot.read_each(versions, *paths), strict=True):
        missing = [path for path, content in zip(paths, contents, strict=True) if content is None]
        if missing:
            raise PipelineError(f"{version.tag}: has no {missing[0]}")
        *described, config = (str(content, "utf-8") for content in contents if content is not None)
        storage = storage_url(config, snapshot.location, snapshot.origin)
        registration, verdict, summary, made_by = map(json.loads, described)
        names = tuple(aliases.get(version.tag, ()))
        facts.append(Facts(version, names, registration, verdict, summary, made_by, storage))
    return facts


def evaluations_of(snapshot: Snapshot, *versions: Version) -> list[Evaluation]:
    """Return the evaluations of the policies of versions; their files are verified."""
    with TemporaryDirectory(prefix="grpo-pipeline-records-") as scratch:
        folders = [Path(scratch) / version.version / version.name for version in versions]
        for version, folder in zip(versions, folders, strict=True):
            snapshot.get(version.tag, [EVALUATION], folder)
        return [read_evaluation(folder / EVALUATION) for folder in folders]


def outcomes(first: Evaluation, second: Evaluation) -> dict[str, Outcome]:
    """Return how two policies answered the same problems; PipelineError if the problems or the protocols differ."""
    one, other = (problems_of(evaluation.greedy) for evaluation in (first, second))
    if one != other:
        raise PipelineError(
            f"answers to different problems cannot be compared: one has {len(one):,} problems, the other "
            f"{len(other):,}, and {len(one & other):,} are in both"
        )
    if not same_protocol(*(evaluation.scores.get("protocol") or {} for evaluation in (first, second))):
        raise PipelineError("the evaluations cannot be compared: their protocols differ")
    return outcomes_of([Pair(record, second.greedy[record.id]) for record in first.greedy.values()])


def how_to_compare(first: Facts, second: Facts, registry: str) -> str:
    """Return the commands that evaluate the policy of one version on the problems of another one."""
    tag, settings = second.version.tag, second.settings
    options = {
        f"--{key.replace('_', '-')}": json.loads(settings.get(f"evaluate.{key}", "null"))
        for key in ("max_new_tokens", "limit", "seed", "system_prompt")
    }
    options["--tools"] = json.loads(settings.get("evaluate.tools.environment", "null"))
    options["--max-turns"] = json.loads(settings.get("evaluate.tools.max_turns", "null"))
    asked = " ".join(f"{option} {shlex.quote(str(value))}" for option, value in options.items() if value is not None)
    return (
        f"grpo-pipeline models get {tag} {tag} --registry {registry} && grpo-pipeline evaluate {first.version.tag} "
        f"--registry {registry} --protocol {second.protocol} --data {tag}/problems {asked} --output FOLDER"
    )


def compare(snapshot: Snapshot, first: Facts, second: Facts) -> dict[str, Any]:
    """Return how two versions differ: lines for people by subject, empty if they are equal, and figures by source.

    `incomparable` says why there are no accuracies to compare; None if there are.
    """
    accuracies, incomparable = [], None
    one, other = evaluations_of(snapshot, first.version, second.version)
    try:
        accuracies = [_accuracy(*each) for each in outcomes(one, other).items()]
    except PipelineError as error:
        incomparable = f"{error}; to compare them, run `{how_to_compare(first, second, snapshot.location)}`"
    before, after = (each.made_by.environment("train_grpo") for each in (first, second))
    return {
        "settings": list(_changes(first.settings, second.settings)),
        "data": list(_changes(first.data, second.data)),
        "code": list(_changes(_code(first.made_by), _code(second.made_by))),
        "environment": environment_differences(before, after) if before and after else [],
        "accuracies": accuracies,
        "incomparable": incomparable,
    }


def _accuracy(source: str, outcome: Outcome) -> dict[str, Any]:
    counts = outcome.counts
    return {
        "source": source,
        "first": score(counts.both + counts.only_first, counts.total),
        "second": score(counts.both + counts.only_second, counts.total),
        "gain": counts.gain,
        "gain_interval": list(paired_gain_interval(counts)),
        "only_first_right": counts.only_first,
        "only_second_right": counts.only_second,
        "p_value": mcnemar_p(counts),
    }


def _changes(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    for key in {**first, **second}:
        before, after = (values.get(key, "(none)") for values in (first, second))
        if before != after:
            yield f"{key}: {before} -> {after}"


def _code(made_by: Lineage) -> dict[str, str]:
    return {"commit": str(made_by.revision("train_grpo")), "digest": made_by.work.code[:12]}
