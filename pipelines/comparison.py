"""Two registered versions side by side: what each was made from, and how often each is right on the same problems."""

import json
import shlex
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
from components.report.gate import Outcome, figures
from components.shared.errors import PipelineError
from components.shared.execution import environment_differences
from components.shared.lineage import FILE_NAME, Lineage, flat, parse
from pipelines.tables import changes, setting_changes

EVALUATION = "evaluation/grpo"  # folder of a version with the records of its policy


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
    """The content of lineage.json, which is parsed when `made_by` is needed."""
    storage: str
    """Folder or URL with the weights."""

    @cached_property
    def made_by(self) -> Lineage:
        """The lineage of the version."""
        return parse(self.lineage_file, name=f"{self.version.tag}: {FILE_NAME}")

    @property
    def settings(self) -> dict[str, str]:
        """Each value of the stages' configs, as JSON, by its key such as `train_grpo.num_steps`."""
        return {key: value for work in self.made_by.works for key, value in flat(work.stage, work.config)}

    @property
    def protocol(self) -> str:
        """The protocol by which the version was evaluated."""
        return json.loads(self.settings.get("evaluate.protocol", "null")) or PIPELINE

    @property
    def inputs(self) -> dict[str, str]:
        """SHA-256 of the problems, and SHA-256 or hub commit of each file and model that stages read, by name."""
        works = self.made_by.works
        problems = next((work.inputs["problems"].digest for work in works if "problems" in work.inputs), None)
        identities = {"problems": f"SHA-256 {problems}"}
        for work in works:
            for name, each in work.materials.items():
                identities[name] = f"SHA-256 {each.sha256}" if each.sha256 else f"commit {each.commit}"
        return identities


def facts_of(snapshot: Snapshot, *versions: Version) -> list[Facts]:
    """Return the facts of versions from their files in git, whose digests are not verified."""
    aliases = snapshot.aliases_by_version()
    paths = (*(f"{name}.json" for name in ("version", "verdict", "summary", "lineage")), ".dvc/config")
    facts = []
    for version, contents in zip(versions, snapshot.read_each(versions, *paths), strict=True):
        missing = [path for path, content in zip(paths, contents, strict=True) if content is None]
        if missing:
            raise PipelineError(f"{version.tag}: has no {missing[0]}")
        *files, dvc_config = (content.decode() for content in contents if content is not None)
        registration, verdict, summary, lineage_file = map(json.loads, files)
        storage = storage_url(dvc_config, snapshot.location, snapshot.origin)
        names = tuple(aliases.get(version.tag, ()))
        facts.append(Facts(version, names, registration, verdict, summary, lineage_file, storage))
    return facts


def evaluations_of(snapshot: Snapshot, *versions: Version) -> list[Evaluation]:
    """Fetch, verify and return the evaluations of the versions' policies."""
    with TemporaryDirectory(prefix="grpo-pipeline-records-") as scratch:
        folders = [Path(scratch) / version.version / version.name for version in versions]
        for version, folder in zip(versions, folders, strict=True):
            snapshot.get(version.tag, [EVALUATION], folder)
        return [read_evaluation(folder / EVALUATION) for folder in folders]


def outcomes(first: Evaluation, second: Evaluation) -> dict[str, Outcome]:
    """Return by source how two policies answered the same problems; PipelineError if problems or protocols differ."""
    problems, other_problems = problems_of(first.greedy), problems_of(second.greedy)
    if problems != other_problems:
        raise PipelineError(
            f"the test problems differ ({len(problems):,} and {len(other_problems):,}, of which "
            f"{len(problems & other_problems):,} are in both)"
        )
    if not same_protocol(first.scores["protocol"], second.scores["protocol"]):
        raise PipelineError("the protocols of evaluation differ")
    return outcomes_of([Pair(record, second.greedy[record.id]) for record in first.greedy.values()])


def how_to_compare(first: Facts, second: Facts, registry: str) -> str:
    """Return the shell commands that evaluate the policy of the first version on the problems of the second."""
    tag = second.version.tag
    keys = {f"--{key.replace('_', '-')}": key for key in ("max_new_tokens", "limit", "seed", "system_prompt")}
    keys |= {"--tools": "tools.environment", "--max-turns": "tools.max_turns"}
    options = ""
    for option, key in keys.items():
        value = json.loads(second.settings.get(f"evaluate.{key}", "null"))  # settings are JSON
        if value is not None:
            options += f"{option} {shlex.quote(str(value))} "
    return (
        f"grpo-pipeline models get {tag} DIR --registry {registry} && grpo-pipeline evaluate {first.version.tag} "
        f"--registry {registry} --protocol {second.protocol} --data DIR/problems {options}--output FOLDER"
    )


def compare_versions(snapshot: Snapshot, first: Facts, second: Facts) -> dict[str, Any]:
    """Return the differences of two versions by kind, and their accuracies, or why these are `incomparable`."""
    accuracies, incomparable = [], None
    evaluations = evaluations_of(snapshot, first.version, second.version)
    try:
        accuracies = [
            {"source": source, **figures(outcome.counts, "first", "second")}
            for source, outcome in outcomes(*evaluations).items()
        ]
    except PipelineError as error:
        commands = how_to_compare(first, second, snapshot.location)
        tags = f"{first.version.tag} on the problems of {second.version.tag}"
        incomparable = f"{error}; to evaluate {tags}, run\n{commands}"
    before, after = (each.made_by.environment("train_grpo") for each in (first, second))
    return {
        "settings": setting_changes(first.settings, second.settings),
        "inputs": changes(first.inputs, second.inputs),
        "code": changes(_code(first.made_by), _code(second.made_by)),
        "environment": environment_differences(before, after) if before and after else [],
        "accuracies": accuracies,
        "incomparable": incomparable,
    }


def _code(made_by: Lineage) -> dict[str, str]:
    return {"commit": str(made_by.revision("train_grpo")), "digest": made_by.work.code[:12]}
